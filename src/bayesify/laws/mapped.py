"""Tensors that live in a safetensors file, and in memory only as far as they are used."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["mapped_tensor"]

_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def mapped_tensor(path: Path, name: str, like: Tensor) -> Tensor:
    """Make a new safetensors file with a tensor of zeros, and return the tensor: what is written to it is in the file.

    Args:
        path: The file; it must not exist.
        name: The tensor's name in it.
        like: Of which shape and type; on a CPU.
    """
    if like.device.type != "cpu":
        raise ValueError(f"A file is mapped into a CPU's memory, and the tensor is on {like.device}.")
    size = like.numel() * like.element_size()
    entry = {"dtype": _NAMES[like.dtype], "shape": list(like.shape), "data_offsets": [0, size]}
    header = json.dumps({name: entry}).encode()
    header += b" " * (-len(header) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)  # zeros that take no room on the disk until they are written to
    storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=8 + len(header) + size)
    assert isinstance(storage, torch.UntypedStorage)
    place = (8 + len(header)) // like.element_size()
    return torch.empty(0, dtype=like.dtype).set_(storage, place, like.shape, like.contiguous().stride())
