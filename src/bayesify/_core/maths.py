"""Pieces of mathematics that several parts share: entropies, a minimum, a matrix as a product of vectors."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = [
    "IGNORED",
    "LEAST",
    "as_double",
    "at_least_float32",
    "descend",
    "entropy",
    "exact_top",
    "gaussian_crps",
    "gaussian_log_prob",
    "label_log_prob",
    "log_rest",
    "minimise",
    "rank_one_factors",
    "scaled_channels",
    "softmax_below",
]

IGNORED = -100  # the label of positions that do not count, as torch has it
LEAST = -1e4  # no positive number has a logarithm below this one
ROUNDING = 8  # in units of a type's precision


def at_least_float32(x: Tensor) -> Tensor:
    """Promote half precision to float32, and leave float32 and float64."""
    # Not a plain `to`: a graph that is traced would hold the question as well.
    return x if x.dtype in (torch.float32, torch.float64) else x.to(torch.promote_types(x.dtype, torch.float32))


def as_double(x: Tensor) -> Tensor:
    """Return float64, in main memory where the device has none."""
    return (x.cpu() if x.device.type == "mps" else x).double()


def scaled_channels(x: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:
    """Return a x + c for an activation (N, C, ...), with numbers a, and c where it is given, of each row and channel.

    Args:
        x: The activation.
        scale: a, (N, C).
        shift: c, (N, C).

    Example:
        >>> scaled_channels(torch.ones(2, 1, 3), torch.tensor([[2.0], [3.0]]))
        tensor([[[2., 2., 2.]],
        <BLANKLINE>
                [[3., 3., 3.]]])
    """
    rows = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) and x.ndim > 2 and x.is_contiguous()
    plain = type(x) is Tensor and type(scale) is Tensor and not torch.compiler.is_compiling()
    if not rows or not plain or x.dtype != scale.dtype or not x.numel():
        each = (*scale.shape, *[1] * (x.ndim - 2))
        return x * scale.view(each) if shift is None else torch.addcmul(shift.view(each), x, scale.view(each))
    # As a normalisation of N C channels with mean 0 and variance 1. Numbers that broadcast are met entry by entry where
    # there are two of them, and their gradients are sums of products that are written first: this is one loop each.
    number = scale.numel()
    mean, var = scale.new_zeros(number), scale.new_ones(number)
    own = None if shift is None else shift.reshape(-1)
    made = torch.batch_norm(x.view(1, number, -1), scale.reshape(-1), own, mean, var, False, 0.0, 0.0, False)
    return made.view(x.shape)


def label_log_prob(log_probs: Tensor, labels: Tensor, ignore_index: int = IGNORED) -> Tensor:
    """Return ln p of each label, (...), from those of all classes, (..., C); 0 where a position does not count.

    >>> label_log_prob(torch.tensor([[0.5, 0.5], [1.0, 0.0]]).log(), torch.tensor([1, -100]))
    tensor([-0.6931,  0.0000])
    """
    counted = labels != ignore_index
    return log_probs.gather(-1, labels.where(counted, 0)[..., None])[..., 0].where(counted, 0)


def gaussian_crps(target: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return the continuous ranked probability score of N(mean, variance) at each target, (...).

    sd [z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi)] with z = (target - mean) / sd.

    >>> gaussian_crps(torch.zeros(1), torch.zeros(1), torch.ones(1))
    tensor([0.2337])
    """
    std = variance.sqrt()
    z = (target - mean) / std
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    # 2 Phi(z) - 1 = erf(z / sqrt 2)
    return std * (z * torch.erf(z / math.sqrt(2)) + 2 * density - 1 / math.sqrt(math.pi))


def gaussian_log_prob(target: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    """Return ln N(target; mean, variance) = -((target - mean)^2 / variance + ln variance + ln 2 pi) / 2.

    >>> gaussian_log_prob(torch.zeros(1), torch.zeros(1), torch.zeros(1))
    tensor([-0.9189])
    """
    residual = (target - mean) * (-0.5 * log_variance).exp()  # scaled before it is squared, which could overflow
    return -0.5 * (residual**2 + log_variance + math.log(2 * math.pi))


def entropy(log_probs: Tensor, probs: Tensor | None = None) -> Tensor:
    """Return the entropy -sum_c p_c ln p_c over the last dimension, in nats, with 0 ln 0 = 0.

    The probabilities may be given where they are known.

    >>> entropy(torch.tensor([0.0, -torch.inf]))
    tensor(0.)
    """
    probs = log_probs.exp() if probs is None else probs
    # torch.special.entr would take the logarithm again.
    return 0.0 - (probs * log_probs.clamp_min(LEAST)).sum(-1)


def exact_top(log_probs: Tensor) -> Tensor:
    """Return log-probabilities (..., C) whose largest, where it is near 0, is ln(1 - sum of the others).

    Log-softmax rounds ln p of a class with p = 1 - 1e-9 to 0 in float32. What is lost, 1e-9, is as large as the mutual
    information of a confident prediction, which is a difference of entropies.

    >>> exact_top(torch.tensor([20.0, 0.0]).log_softmax(-1))[0]
    tensor(-2.0612e-09)
    """
    largest, top = log_probs.max(-1, keepdim=True)
    rest = log_probs.exp().scatter(-1, top, 0.0).sum(-1, keepdim=True)
    return log_probs.scatter(-1, top, torch.where(rest < 0.25, torch.log1p(-rest), largest))


def softmax_below(logits: Tensor, top: Tensor) -> Tensor:
    """Return ln p of logits (..., C) whose largest is zero, and at `top`, (..., 1).

    With r the sum of the others' exponentials, ln p = logits - ln(1 + r), and the largest is as exact as `exact_top`
    makes it.

    >>> softmax_below(torch.tensor([0.0, -20.0]), torch.tensor([0]))
    tensor([-2.0612e-09, -2.0000e+01])
    """
    return logits - log_rest(logits, top)


def log_rest(logits: Tensor, top: Tensor) -> Tensor:
    """Return ln(1 + r), (..., 1), with r the sum of the exponentials of all logits but the largest, which is zero.

    >>> log_rest(torch.tensor([0.0, -20.0]), torch.tensor([0]))
    tensor([2.0612e-09])
    """
    return logits.exp().scatter(-1, top, 0.0).sum(-1, keepdim=True).log1p()


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


def descend(
    function: Callable[[float], float], low: float, high: float, *, start: float, step: float, most: int = 10
) -> tuple[float, float]:
    """Minimise a function of one number that is dear to evaluate: a walk downhill, two halvings, and a parabola.

    Steps go from `start` to both sides, and on from the better end until a point is below both its neighbours. The
    result is never worse than `start`, and no function is called more than `most` times.

    >>> tried = []
    >>> descend(lambda x: tried.append(x) or (x - 3.1) ** 2, -9, 9, start=0.0, step=2.0)[0], len(tried)
    (3.1, 10)
    """
    values: dict[float, float] = {}

    def look(*points: float) -> None:
        for x in points:
            x = min(max(x, low), high)
            if x not in values and len(values) < most:
                values[x] = function(x)

    def best() -> float:
        return min(values, key=values.__getitem__)

    look(start, start - step, start + step)
    while len(values) < most and best() in (min(values), max(values)):
        centre, known = best(), len(values)
        look(centre - step, centre + step)
        if len(values) == known:  # at an end of the interval
            break
    for _ in range(2):
        step /= 2
        look(best() - step, best() + step)
    centre = best()
    below, above = values.get(max(centre - step, low)), values.get(min(centre + step, high))
    if below is not None and above is not None:
        bend = below - 2 * values[centre] + above
        if 0 < bend < math.inf:
            look(centre + 0.5 * step * (below - above) / bend)
    return best(), values[best()]


def rank_one_factors(variance: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return r and c with U = r c', a number for each row times one for each column; None if there are none.

    One variance for a whole layer has them, and one for each row or column. A product with U then costs what one with a
    vector does: U m = r (c . m).

    >>> rank_one_factors(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))[0]
    tensor([3., 9.])
    >>> rank_one_factors(torch.tensor([[1.0, 2.0], [3.0, 5.0]])) is None
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
