"""What changes when a tensor does."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["state_of"]


def state_of(tensors: Iterable[Tensor]) -> tuple[Any, ...]:
    """Return what changes when one of some tensors does: its memory, its type, or its numbers.

    A version counts changes in place, but not those that are written through `.data`, as one does with parameters, so
    that of these the sum of squares is looked at too. It is a dot product, which reads as fast as memory gives.

    >>> weight = nn.Parameter(torch.ones(3))
    >>> before = state_of([weight])
    >>> weight.data[0] = 2
    >>> state_of([weight]) == before
    False
    """
    found: list[Any] = []
    for tensor in tensors:
        counted = not tensor.is_inference()
        found.append((id(tensor), tensor._version if counted else 0, tensor.data_ptr(), tensor.dtype))
        if not counted or (type(tensor) is not Tensor and isinstance(tensor, nn.Parameter)):
            number = _size(tensor)
            known = abs(number) < math.inf  # NaN differs from itself, and what is infinite hides all others
            found.append(number if known else _size(tensor.nan_to_num(0.0, 0.0, 0.0)))
    return tuple(found)


def _size(tensor: Tensor) -> float:
    flat = tensor.reshape(-1)
    if flat.is_cpu and flat.dtype in (torch.float32, torch.float64):
        return torch.dot(flat, flat).item()
    return flat.sum().item()
