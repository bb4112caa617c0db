"""Variances of a matrix that are a product of a number for each row and one for each column."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["factors"]

ROUNDING = 8  # in units of the type's precision


def factors(variance: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return r and c with U = r c', or None if there are none.

    One variance for a whole layer has them, and one for each row or column. A product with U then costs what one with a
    vector does: U m = r (c . m).

    >>> factors(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))[0]
    tensor([3., 9.])
    >>> factors(torch.tensor([[1.0, 2.0], [3.0, 5.0]])) is None
    True
    """
    if variance.ndim != 2 or variance.numel() == 0 or torch.compiler.is_compiling():
        return None  # while a program is traced there are no numbers to look at
    precision = ROUNDING * torch.finfo(variance.dtype).eps
    row = variance.sum(1)
    largest = int(row.argmax())
    column = variance[largest] / row[largest].clamp_min(torch.finfo(variance.dtype).tiny)
    error = (variance - row[:, None] * column).abs_()
    return (row, column) if bool((error <= precision * variance).all()) else None
