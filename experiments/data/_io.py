"""Opening files that may be gzip-compressed, and arrays that may not hold code."""

from __future__ import annotations

import gzip
import io
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

__all__ = ["PathLike", "open_plain", "read_arrays", "read_bytes", "read_text"]

PathLike = str | Path
GZIP_MAGIC = b"\x1f\x8b"
NPY_ERRORS = (ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError)


@contextmanager
def open_plain(path: PathLike) -> Iterator[BinaryIO]:
    """Open a file for reading, decompressed if its first bytes say gzip, whatever its name."""
    path = Path(path)
    with path.open("rb") as raw:
        packed = raw.read(2) == GZIP_MAGIC
        raw.seek(0)
        if not packed:
            yield raw
            return
        try:
            with gzip.open(raw, "rb") as plain:
                yield cast(BinaryIO, plain)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path} is a damaged or incomplete gzip file ({error}): fetch it again") from error


def read_bytes(path: PathLike) -> bytes:
    """Read a whole plain or gzip-compressed file."""
    with open_plain(path) as file:
        return file.read()


def read_text(path: PathLike) -> str:
    """Read a whole plain or gzip-compressed UTF-8 file."""
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}): save it as UTF-8 first") from error


def read_arrays(path: PathLike, *names: str) -> tuple[NDArray[Any], ...]:
    """Read named arrays of an npz file without unpickling anything."""
    try:
        file = np.load(io.BytesIO(Path(path).read_bytes()), allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ValueError("it holds a single array")
        missing = [name for name in names if name not in file]
        if missing:
            raise ValueError(f"it has no array {missing[0]!r}, only {sorted(file)}")
        return tuple(file[name] for name in names)
    except NPY_ERRORS as error:
        raise ValueError(f"{path} cannot be read as an npz file of {names}: {error}") from error
