"""Scores of predictive means, variances, samples and intervals.

All arrays of one call have the same shape (no broadcasting) and results are averages over every
element; for a target with D outputs multiply the log score by D to get nats per example.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bayesify._core.maths import gaussian_crps, gaussian_log_prob
from bayesify.evaluation.measures.arguments import check_same_shape, to_double

if TYPE_CHECKING:
    from bayesify.evaluation.measures.arguments import ArrayLike

__all__ = [
    "crps_gaussian",
    "crps_samples",
    "gaussian_nll",
    "interval_coverage",
    "interval_width",
    "rmse",
]


def rmse(mean: ArrayLike, target: ArrayLike) -> float:
    """Compute the root mean squared error of the predictive mean.

    sqrt((1/N) sum_n (m_n - y_n)^2).

    Args:
        mean: Predictive means (N, ...).
        target: Observed values (N, ...).

    Returns:
        Error in the unit of the target.

    Example:
        >>> round(rmse([1.0, 2.0], [1.0, 4.0]), 6)
        1.414214
    """
    mean, target = _check(mean=mean, target=target)
    return float((mean - target).square().mean().sqrt())


def gaussian_nll(mean: ArrayLike, variance: ArrayLike, target: ArrayLike) -> float:
    """Compute the mean negative log density of the targets under Gaussian predictions.

    (1/N) sum_n [log(2 pi v_n) + (y_n - m_n)^2 / v_n] / 2, in nats, constant included.

    Args:
        mean: Predictive means (N, ...).
        variance: Predictive variances (N, ...), observation noise included.
        target: Observed values (N, ...).

    Returns:
        Mean nats per element; changes by log(c) when the target is rescaled by c.

    Example:
        >>> round(gaussian_nll([0.0], [1.0], [0.0]), 4)
        0.9189
    """
    mean, variance, target = _check(mean=mean, variance=variance, target=target)
    _check_positive(variance)
    return float(-gaussian_log_prob(target, mean, variance.log()).mean())


def crps_gaussian(mean: ArrayLike, variance: ArrayLike, target: ArrayLike) -> float:
    """Compute the continuous ranked probability score of Gaussian predictions in closed form.

    sd [z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi)] with z = (y - m) / sd; Gneiting et al.,
    "Calibrated Probabilistic Forecasting Using Ensemble Model Output Statistics and Minimum
    CRPS Estimation", 2005.

    Args:
        mean: Predictive means (N, ...).
        variance: Predictive variances (N, ...), not standard deviations.
        target: Observed values (N, ...).

    Returns:
        Mean score in the unit of the target, lower is better; |y - m| as the variance vanishes.

    Example:
        >>> round(crps_gaussian([0.0], [1.0], [0.0]), 4)
        0.2337
    """
    mean, variance, target = _check(mean=mean, variance=variance, target=target)
    _check_positive(variance)
    return float(gaussian_crps(target, mean, variance).mean())


def crps_samples(samples: ArrayLike, target: ArrayLike, *, fair: bool = True) -> float:
    """Compute the continuous ranked probability score from samples of the prediction.

    (1/S) sum_s |x_s - y| - c sum_{s,t} |x_s - x_t| / 2 with c = 1 / (S (S - 1)) if ``fair``,
    which is unbiased for the distribution behind the samples, so that scores from different
    numbers of samples compare; c = 1 / S^2 otherwise, the exact score of the empirical
    distribution, which is larger by 1 / S of its spread. Ferro, "Fair scores for ensemble
    forecasts", 2014. Cost: a sort over the samples, S log S, not all pairs.

    Args:
        samples: Draws of the target (S, N, ...), observation noise included.
        target: Observed values (N, ...).
        fair: Score the distribution behind the samples rather than the samples themselves.

    Returns:
        Mean score in the unit of the target; a single fair score may be negative.

    Example:
        >>> crps_samples([[0.0], [2.0]], [1.0]), crps_samples([[0.0], [2.0]], [1.0], fair=False)
        (0.0, 0.5)
    """
    draws = to_double(samples, "samples").detach()
    observed = to_double(target, "target").detach().to(draws.device)
    if draws.shape[1:] != observed.shape:
        raise ValueError(
            f"samples have shape {tuple(draws.shape)} and target {tuple(observed.shape)}; pass "
            "samples as (S, N, ...) with the draws first and target as (N, ...)."
        )
    num = len(draws)
    if fair and num < 2:
        raise ValueError("The fair score needs two samples or more; draw more or pass fair=False.")
    deviation = (draws - observed).sort(dim=0).values
    # sum_{s,t} |x_s - x_t| / 2 = sum_s (2 s - S - 1) x_(s) over the sorted samples, s = 1..S.
    weight = 2 * torch.arange(1, num + 1, dtype=torch.float64, device=draws.device) - num - 1
    spread = torch.tensordot(weight, deviation, dims=1) / (num * (num - 1) if fair else num**2)
    return float((deviation.abs().mean(0) - spread).mean())


def interval_coverage(lower: ArrayLike, upper: ArrayLike, target: ArrayLike) -> float:
    """Compute the share of targets inside their predictive interval.

    (1/N) #{lower_n <= y_n <= upper_n}; for intervals of level a this should be close to a.

    Args:
        lower: Lower ends (N, ...).
        upper: Upper ends (N, ...).
        target: Observed values (N, ...).

    Returns:
        Coverage in [0, 1].

    Example:
        >>> interval_coverage([0.0, 0.0], [1.0, 1.0], [0.5, 2.0])
        0.5
    """
    lower, upper, target = _check(lower=lower, upper=upper, target=target)
    _check_ordered(lower, upper)
    return float(((lower <= target) & (target <= upper)).double().mean())


def interval_width(lower: ArrayLike, upper: ArrayLike) -> float:
    """Compute the mean width of predictive intervals.

    (1/N) sum_n (upper_n - lower_n); of two methods with the same coverage prefer the narrower.

    Args:
        lower: Lower ends (N, ...).
        upper: Upper ends (N, ...).

    Returns:
        Width in the unit of the target.

    Example:
        >>> interval_width([0.0, 0.0], [1.0, 3.0])
        2.0
    """
    lower, upper = _check(lower=lower, upper=upper)
    _check_ordered(lower, upper)
    return float((upper - lower).mean())


def _check(**arrays: ArrayLike) -> list[Tensor]:
    tensors = {name: to_double(values, name).detach() for name, values in arrays.items()}
    check_same_shape(**tensors)
    device = next(iter(tensors.values())).device
    return [tensor.to(device) for tensor in tensors.values()]


def _check_positive(variance: Tensor) -> None:
    if variance.min() <= 0:
        raise ValueError(
            "variance has entries that are not positive; add the variance of the observation "
            "noise, and square standard deviations."
        )


def _check_ordered(lower: Tensor, upper: Tensor) -> None:
    if (lower > upper).any():
        raise ValueError("lower exceeds upper in some intervals; swap the two arguments there.")
