"""A Gaussian with the moments of some weight vectors: directions that all weights share, and variances beside them."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesify.laws.components import Component
from bayesify.laws.tensors import Codec

__all__ = ["leading", "low_rank_component"]

MOST = 20  # directions; each costs a product with the weights for each example


def low_rank_component(codec: Codec, mean: Tensor, variance: Tensor, columns: Tensor) -> Component:
    """Return N(mean, diag(variance) + columns' columns) as a component.

    Args:
        codec: How a vector becomes tensors.
        mean: (D,).
        variance: (D,).
        columns: (K, D).
    """
    return Component(codec.split(mean), codec.split(variance), columns=codec.split(columns.contiguous()))


def leading(columns: Tensor, most: int = MOST) -> tuple[Tensor, Tensor]:
    """Return the longest orthogonal directions of columns (M, D), as (K, D), and what they leave of variances, (D,).

    diag(left) + found' found has the diagonal of columns' columns; where there are at most K columns, it is that.

    >>> found, left = leading(torch.tensor([[3.0, 0.0], [0.0, 1.0]]), most=1)
    >>> found.abs(), left
    (tensor([[3., 0.]]), tensor([0., 1.]))
    """
    if columns.shape[0] <= most:
        return columns, torch.zeros_like(columns[0])
    values, vectors = torch.linalg.eigh((columns @ columns.mT).double())
    found = vectors[:, values.argsort(descending=True)[:most]].mT.to(columns.dtype) @ columns
    return found, (columns.square().sum(0) - found.square().sum(0)).clamp_min(0)
