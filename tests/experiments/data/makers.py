"""Tiny files in the formats that the readers read."""

from __future__ import annotations

import gzip
import hashlib
import io
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np

IDX_CODES = {"uint8": 8, "int8": 9, "int16": 0x0B, "int32": 0x0C, "float32": 0x0D, "float64": 0x0E}


def idx_bytes(array: np.ndarray) -> bytes:
    header = struct.pack(">HBB", 0, IDX_CODES[array.dtype.name], array.ndim)
    header += b"".join(struct.pack(">I", n) for n in array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def sha256(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def cifar_images(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8)
    return images, rng.integers(0, 10, n, dtype=np.uint8)


def cifar_records(images: np.ndarray, labels: np.ndarray) -> bytes:
    return np.concatenate([labels[:, None], images.reshape(len(images), -1)], 1).tobytes()


def cifar_tar(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def cifar_zip(path: Path, images: np.ndarray, labels: np.ndarray, *, strip: int = 2) -> Path:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for start in range(0, len(images), strip):
            pixels = images[start : start + strip].transpose(0, 2, 3, 1).reshape(-1, 32, 3)
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, "WEBP", lossless=True)
            archive.writestr(f"{start:05d}.webp", buffer.getvalue())
        buffer = io.BytesIO()
        np.save(buffer, labels)
        archive.writestr("labels.npy", buffer.getvalue())
    return path
