"""The idx format of the MNIST family."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify.data import Split
from experiments.data._io import PathLike, read_bytes

__all__ = ["read_idx", "read_idx_split"]

IDX_TYPES: dict[int, np.dtype[Any]] = {
    0x08: np.dtype(np.uint8),
    0x09: np.dtype(np.int8),
    0x0B: np.dtype(">i2"),
    0x0C: np.dtype(">i4"),
    0x0D: np.dtype(">f4"),
    0x0E: np.dtype(">f8"),
}


def read_idx(path: PathLike) -> Tensor:
    """Read one idx file, plain or gzip-compressed.

    The header is two zero bytes, a type byte, the number of dimensions, and each dimension as a
    big-endian 32-bit number; the values follow in row-major order.

    Returns:
        A tensor of the shape and type that the header states.
    """
    content = read_bytes(path)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in IDX_TYPES:
        raise ValueError(
            f"{path} is not an idx file: it starts with {content[:4].hex() or 'nothing'} "
            "instead of two zero bytes, a type and a number of dimensions"
        )
    dtype, dimensions = IDX_TYPES[content[2]], content[3]
    start = 4 + 4 * dimensions
    if dimensions == 0 or len(content) < start:
        raise ValueError(f"{path} is not a whole idx file: its header ends too early")
    shape = tuple(np.frombuffer(content, ">u4", dimensions, 4).tolist())
    expected = start + dtype.itemsize * math.prod(shape)
    if len(content) != expected:
        kind = "truncated" if len(content) < expected else "too long"
        raise ValueError(
            f"{path} is {kind}: its header promises {shape} values of {dtype.name}, "
            f"{expected} bytes, but there are {len(content)}: fetch it again"
        )
    values = np.frombuffer(content, dtype, offset=start).reshape(shape)
    return torch.from_numpy(values.astype(dtype.newbyteorder("=")))


def read_idx_split(images: PathLike, labels: PathLike) -> Split:
    """Read an image file and its label file.

    Returns:
        Inputs ``(N, 1, H, W)`` uint8 and targets ``(N,)`` int64.
    """
    inputs, targets = read_idx(images), read_idx(labels)
    if inputs.ndim != 3 or inputs.dtype != torch.uint8:
        raise ValueError(
            f"{images} holds {tuple(inputs.shape)} {inputs.dtype}, not N grey images of uint8; "
            "are the image and the label file swapped?"
        )
    if targets.ndim != 1 or targets.is_floating_point():
        raise ValueError(f"{labels} holds {tuple(targets.shape)} {targets.dtype}, not N labels")
    return Split(inputs[:, None], targets.long())
