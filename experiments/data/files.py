"""Find a file of a data set on disk, or download it; never read one that is not whole."""

from __future__ import annotations

import hashlib
import http.client
import os
import secrets
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from experiments.data._io import PathLike, open_plain

__all__ = ["File", "Opener", "Progress", "data_root", "download", "locate"]

Opener = Callable[[str], IO[bytes]]
Progress = Callable[[int, "int | None"], None]
CHUNK = 1 << 20
TIMEOUT = 60.0


@dataclass(frozen=True)
class File:
    """Describe one file of a data set.

    Attributes:
        path: where it belongs below the root, without ``.gz``.
        digest: ``sha256:...`` or ``md5:...`` of the content. With ``gz`` it is that of the
            uncompressed content, because compressing the same data again changes the file.
        url: where it can be downloaded, if the download is what the reader reads.
        gz: whether the file may also be there compressed, as ``path + ".gz"``.
    """

    path: str
    digest: str
    url: str | None = None
    gz: bool = False

    def names(self) -> tuple[str, ...]:
        """Return the names under which the file may lie, the usual one first."""
        return (self.path + ".gz", self.path) if self.gz else (self.path,)

    def measured(self, path: PathLike) -> str:
        """Compute the digest of a file on disk, in the form of ``digest``."""
        kind = self.digest.partition(":")[0]
        state = hashlib.new(kind, usedforsecurity=False)
        with open_plain(path) if self.gz else Path(path).open("rb") as file:
            while chunk := file.read(CHUNK):
                state.update(chunk)
        return f"{kind}:{state.hexdigest()}"


def data_root(root: PathLike | None = None) -> Path:
    """Return ``root``, else the environment variable BAYESIFY_DATA, else ~/.cache/bayesify."""
    given = root if root is not None else os.environ.get("BAYESIFY_DATA")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "bayesify"


def locate(
    file: File,
    root: PathLike | None = None,
    *,
    opener: Opener | None = None,
    progress: Progress | None = None,
) -> Path:
    """Return the path of a file whose content is right, downloading it where that is possible.

    Args:
        file: what is wanted.
        root: see `data_root`.
        opener: opens a URL for reading, by default ``urllib.request.urlopen``.
        progress: called with the bytes so far and the total, if the server tells it.

    Raises:
        FileNotFoundError: the file is not there and could not be downloaded; the message says which
            file to put where.
        ValueError: the file has another content than the one expected.
    """
    folder = data_root(root)
    for name in file.names():
        path = folder / name
        if path.is_file():
            _verify(file, path, f"{path} is damaged or another version: move it away")
            return path
    wanted = f"put it at {folder / file.names()[0]}, content {file.digest}"
    if file.url is None:
        raise FileNotFoundError(
            f"{folder / file.names()[0]} is missing and has no download that can be read as it is: "
            f"{wanted}, or set BAYESIFY_DATA to the folder that has {file.names()[0]}"
        )
    path = folder / (file.path + (".gz" if file.gz and file.url.endswith(".gz") else ""))
    try:
        download(file, path, opener=opener, progress=progress)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise FileNotFoundError(
            f"{path} is missing and could not be downloaded ({error}): fetch {file.url} by other means and {wanted}"
        ) from error
    return path


def download(
    file: File,
    path: PathLike,
    *,
    opener: Opener | None = None,
    progress: Progress | None = None,
) -> None:
    """Download a file; its name appears only once the whole content is there and verified."""
    if file.url is None:
        raise ValueError(f"{file.path} has no address to download it from")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        with part.open("xb") as out, (opener or _urlopen)(file.url) as response:
            _copy(response, out, progress)
        _verify(file, part, f"{file.url} sent something else")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _urlopen(url: str) -> IO[bytes]:
    try:
        response: IO[bytes] = urllib.request.urlopen(url, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection open
        raise
    return response


def _copy(response: IO[bytes], out: IO[bytes], progress: Progress | None) -> None:
    length = getattr(response, "headers", {}).get("Content-Length")
    total, done = int(length) if length else None, 0
    while chunk := response.read(CHUNK):
        out.write(chunk)
        done += len(chunk)
        if progress is not None:
            progress(done, total)
    if total is not None and done != total:
        raise ValueError(f"the connection ended after {done} of {total} bytes")


def _verify(file: File, path: Path, otherwise: str) -> None:
    measured = file.measured(path)
    if measured != file.digest:
        raise ValueError(f"{otherwise} (expected {file.digest}, found {measured})")
