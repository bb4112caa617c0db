"""Numerically safe pieces of information theory, on logarithms of probabilities."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["at_least_float32", "entropy", "minimise"]


def at_least_float32(x: Tensor) -> Tensor:
    """Promote half precision to float32, and leave float32 and float64."""
    # Not a plain `to`: a graph that is traced would hold the question as well.
    return x if x.dtype in (torch.float32, torch.float64) else x.to(torch.promote_types(x.dtype, torch.float32))


def entropy(log_probs: Tensor, probs: Tensor | None = None) -> Tensor:
    """Return the entropy -sum_c p_c ln p_c over the last dimension, in nats, with 0 ln 0 = 0.

    The probabilities may be given where they are known.

    >>> entropy(torch.tensor([0.0, -torch.inf]))
    tensor(0.)
    """
    probs = log_probs.exp() if probs is None else probs
    # No positive number has a logarithm below this one; torch.special.entr would take the logarithm again.
    return 0.0 - (probs * log_probs.clamp_min(-1e4)).sum(-1)


def minimise(
    function: Callable[[float], float],
    low: float,
    high: float,
    *,
    start: float,
    points: int = 25,
    tolerance: float = 1e-6,
) -> tuple[float, float]:
    """Minimise a function of one number: a grid, then golden sections around its best point.

    The result is never worse than `start`, and within `tolerance` of the minimum next to the grid's best point.

    >>> round(minimise(lambda x: (x - 0.3) ** 2, -4, 4, start=0.0)[0], 4)
    0.3
    """
    step = (high - low) / (points - 1)
    grid = [start, *(low + step * index for index in range(points))]
    values = {x: function(x) for x in grid}
    centre = min(values, key=values.__getitem__)
    left, right = max(low, centre - step), min(high, centre + step)
    ratio = (5**0.5 - 1) / 2

    def value(x: float) -> float:
        values[x] = function(x)
        return values[x]

    a, b = right - ratio * (right - left), left + ratio * (right - left)
    below, above = value(a), value(b)
    while right - left > tolerance:
        if below < above:
            right, b, above = b, a, below
            a = right - ratio * (right - left)
            below = value(a)
        else:
            left, a, below = a, b, above
            b = left + ratio * (right - left)
            above = value(b)
    best = min(values, key=values.__getitem__)
    return best, values[best]
