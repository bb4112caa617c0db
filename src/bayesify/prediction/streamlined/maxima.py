"""The larger of two random numbers, and the largest of many."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["FAR", "larger", "largest"]

FAR = {torch.float32: 8.0, torch.float64: 25.0}  # standard deviations beyond which nothing changes but for rounding
ONE_BY_ONE = 256  # the largest of more would take as many steps, each of a few operations
_ROOT = math.sqrt(2 * math.pi)

Pair = tuple[Tensor, Tensor]


def larger(one: Pair, other: Pair, shared: Tensor | None = None) -> Pair:
    """Return mean and variance of the larger of two Gaussians (Clark 1961, equations 2 to 4).

    With d the distance of the means in deviations t of the difference, t^2 = v + u - 2 r sqrt(v u), P = P(d) and
    h = p(d) - d (1 - P): E = max + t h, and Var = P v + (1 - P) u - t^2 h (h + d), v that of the larger mean. These are
    Clark's, written so that no large numbers are subtracted.

    Args:
        one: Mean and variance.
        other: Mean and variance.
        shared: The correlation r, None for 0.
    """
    (m1, v1), (m2, v2) = one, other
    square = v1 + v2
    if shared is not None:
        square = (square - 2 * shared * (v1 * v2).sqrt()).clamp_min_(0)
    std = square.clamp_min(torch.finfo(square.dtype).tiny).sqrt_()
    distance = ((m1 - m2) / std).abs_().clamp_max_(FAR.get(square.dtype, 8.0))
    wins = (distance * math.sqrt(0.5)).erf_().add_(1).mul_(0.5)
    gain = (distance.square() * -0.5).exp_().div_(_ROOT).sub_(distance * (1 - wins)).clamp_min_(0)
    first = m1 >= m2
    front, back = torch.where(first, v1, v2), torch.where(first, v2, v1)
    variance = back + wins * (front - back) - square * gain * (gain + distance)
    return torch.maximum(m1, m2) + std * gain, variance.clamp_min_(0)


def largest(mean: Tensor, variance: Tensor, shared: Tensor | None = None) -> Pair:
    """Return mean and variance of the largest along the first dimension, one entry after the other.

    The larger of two is not Gaussian, so what follows is approximate; two by two would be further off. Only of more
    than `ONE_BY_ONE` are pairs made first.

    Args:
        mean: (n, ...).
        variance: (n, ...).
        shared: The correlation of any two of them, None for 0.
    """
    while mean.shape[0] > ONE_BY_ONE:
        half = mean.shape[0] // 2
        found = larger((mean[:half], variance[:half]), (mean[half : 2 * half], variance[half : 2 * half]), shared)
        mean, variance = (torch.cat([new, old[2 * half :]]) for new, old in zip(found, (mean, variance), strict=True))
    first, *others = zip(mean.unbind(0), variance.unbind(0), strict=True)
    for other in others:
        first = larger(first, other, shared)
    return first
