"""CIFAR-10, in the original binary layout or as lossless strips in zip files."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bayesify.data import Split
from experiments.data._io import PathLike

__all__ = ["CIFAR10_CLASSES", "read_cifar10", "read_cifar10_archive", "read_cifar10_file"]

CIFAR10_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
BATCHES = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}
ARCHIVE = "cifar-10-binary.tar.gz"
SIDE, CHANNELS = 32, 3
RECORD = 1 + CHANNELS * SIDE * SIDE
ZIP_ERRORS = (zipfile.BadZipFile, KeyError, EOFError, ValueError, OSError, zlib.error)


def read_cifar10(folder: PathLike, part: str) -> Split:
    """Read the training or test part from a folder, whichever layout is there.

    It looks for ``test_batch.zip``, then ``test_batch.bin`` (also in ``cifar-10-batches-bin``),
    then ``cifar-10-binary.tar.gz``.

    Args:
        folder: the folder that holds the files.
        part: ``"train"`` or ``"test"``.

    Returns:
        Inputs ``(N, 3, 32, 32)`` uint8 and targets ``(N,)`` int64, in the standard order.
    """
    folder = Path(folder)
    if files := batch_files(folder, part, ".zip") or batch_files(folder, part, ".bin"):
        return _join([read_cifar10_file(file) for file in files])
    if (folder / ARCHIVE).is_file():
        return read_cifar10_archive(folder / ARCHIVE, part)
    raise FileNotFoundError(
        f"{folder} holds no CIFAR-10 {part} part: put {ARCHIVE} there (the binary version; the "
        "python version is pickle, which could run code, and is never read)"
    )


def batch_files(folder: Path, part: str, suffix: str) -> list[Path]:
    """Return the files of a part if all of them are there, otherwise none."""
    for place in (folder, folder / "cifar-10-batches-bin"):
        files = [place / (name + suffix) for name in _batches(part)]
        if all(file.is_file() for file in files):
            return files
    return []


def read_cifar10_archive(path: PathLike, part: str) -> Split:
    """Read the training or test part of ``cifar-10-binary.tar.gz`` without unpacking it."""
    names = [f"cifar-10-batches-bin/{name}.bin" for name in _batches(part)]
    found: dict[str, Split] = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                if member.name.startswith("cifar-10-batches-py"):
                    raise ValueError(f"it is the pickle version, never read: use {ARCHIVE}")
                if member.name in names and (file := archive.extractfile(member)) is not None:
                    found[member.name] = _records(file.read(), f"{path}: {member.name}")
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error, ValueError) as error:
        raise ValueError(f"{path} cannot be read as CIFAR-10: {error}") from error
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"{path} has no {missing[0]}: it is not the binary version of CIFAR-10")
    return _join([found[name] for name in names])


def read_cifar10_file(path: PathLike) -> Split:
    """Read one batch: ``*.bin`` of the binary version, or a ``*.zip`` of WebP strips.

    A zip holds strips of any number of 32x32 images stacked downwards, read in the order of their
    names, and ``labels.npy``.
    """
    path = Path(path)
    if path.suffix == ".bin":
        return _records(path.read_bytes(), str(path))
    if path.suffix == ".zip":
        return _strips(path.read_bytes(), str(path))
    raise ValueError(
        f"{path} is neither *.bin nor *.zip; batches without a suffix are the python version, "
        f"which is pickle, could run code, and is never read: use {ARCHIVE}"
    )


def _batches(part: str) -> tuple[str, ...]:
    if part not in BATCHES:
        raise ValueError(f"CIFAR-10 has the parts {list(BATCHES)}, not {part!r}")
    return BATCHES[part]


def _records(content: bytes, name: str) -> Split:
    if not content or len(content) % RECORD:
        raise ValueError(
            f"{name} has {len(content)} bytes, not a multiple of {RECORD} (label and image): "
            "it is truncated or no CIFAR-10 batch"
        )
    table = np.frombuffer(content, np.uint8).reshape(-1, RECORD)
    images = torch.from_numpy(table[:, 1:].copy()).reshape(-1, CHANNELS, SIDE, SIDE)
    return _checked(images, table[:, 0], name)


def _strips(content: bytes, path: str) -> Split:
    from PIL import Image as image  # noqa: N813

    strips = []
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            labels = np.load(io.BytesIO(archive.read("labels.npy")), allow_pickle=False)
            for name in sorted(n for n in archive.namelist() if n.endswith(".webp")):
                with image.open(io.BytesIO(archive.read(name)), formats=["WEBP"]) as strip:
                    pixels = np.asarray(strip.convert("RGB"))
                if pixels.shape[1] != SIDE:
                    raise ValueError(f"{name} is {pixels.shape[1]} pixels wide instead of {SIDE}")
                strips.append(pixels.reshape(-1, SIDE, SIDE, CHANNELS))
        images = torch.from_numpy(np.concatenate(strips)).permute(0, 3, 1, 2).contiguous()
        return _checked(images, labels, path)
    except ZIP_ERRORS as error:
        raise ValueError(f"{path} cannot be read as CIFAR-10 strips: {error}") from error


def _checked(images: Tensor, labels: NDArray[Any], name: str) -> Split:
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or not np.isin(labels, range(10)).all():
        raise ValueError(f"{name} has labels outside 0..9: it is no CIFAR-10 batch")
    return Split(images, torch.from_numpy(labels.astype(np.int64)))


def _join(splits: list[Split]) -> Split:
    return Split(torch.cat([s.inputs for s in splits]), torch.cat([s.targets for s in splits]))
