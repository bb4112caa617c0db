"""The prediction of a count, and the negative binomial distribution that it is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bayesify._core.maths import as_double
from bayesify.likelihoods.prediction import RegressionPrediction

__all__ = ["CountPrediction", "count_cdf", "count_log_prob"]

LARGE = 100.0  # a size from which on Stirling's series has all digits
LARGEST = 1e15
STEPS = 5000  # of the continued fraction; it takes about the root of the count


@dataclass(frozen=True, repr=False)
class CountPrediction(RegressionPrediction):
    """A predictive mean and variance of a count, and what the variance is made of.

    The draws' rates r_s leave a mixture of counts. Its mean and variance are exact; its probabilities are taken to be
    those of the negative binomial distribution with this mean and variance, so that memory does not grow with the
    draws. That is exact for a Poisson count whose rate is gamma distributed, or the same in all draws.

    Attributes:
        mean: Mean rate, (B, ...).
        aleatoric: Mean variance of the counts in a draw, (B, ...).
        epistemic: Variance of the draws' rates, (B, ...).
        samples: The draws' rates (S, B, ...), if they were asked for.
        predictor: Which one-pass predictor made it, in words; None if draws did.

    Example:
        >>> one = torch.ones(1)
        >>> prediction = CountPrediction(2 * one, 2 * one, 0 * one)
        >>> prediction.log_prob(torch.tensor([0])).exp()  # exp(-2)
        tensor([0.1353], dtype=torch.float64)
        >>> prediction.interval(0.95)
        (tensor([0.]), tensor([5.]))
    """

    unit = "std"
    discrete = True

    @property
    def size(self) -> Tensor:
        """Return the negative binomial's r: variance = mean + mean^2 / r, in float64."""
        mean, excess = as_double(self.mean), as_double(self.variance) - as_double(self.mean)
        # The variance of counts is a sum of which the mean is one part: below its rounding there is no excess.
        least = 4 * torch.finfo(self.mean.dtype).eps * mean
        return torch.where(excess > least, mean.square() / excess.clamp_min(1e-300), LARGEST).clamp(1e-300, LARGEST)

    def log_prob(self, targets: Tensor) -> Tensor:
        """Return ln p of counts, (B, ...), in float64.

        Args:
            targets: Of the mean's shape, or with one more dimension of size one.
        """
        return count_log_prob(self.aligned(targets), as_double(self.mean).log(), self.size)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the least counts whose cumulated probabilities reach (1 - level) / 2 and (1 + level) / 2."""
        if not 0 < level < 1:
            raise ValueError(f"level is a probability between 0 and 1, but it is {level}.")
        mean, std, size = as_double(self.mean), as_double(self.variance).sqrt(), self.size
        ends = (_quantile(tail, mean, std, size) for tail in ((1 - level) / 2, (1 + level) / 2))
        low, high = (end.to(self.mean) for end in ends)
        return low, high

    def divergence(self, other: Any) -> Tensor:
        """Refuse: there is no formula."""
        raise ValueError(
            f"There is no divergence of a CountPrediction from a {type(other).__name__}: compare log_prob."
        )


def count_log_prob(count: Tensor, log_mean: Tensor, size: Tensor) -> Tensor:
    """Return ln p of counts of a negative binomial distribution with a mean m and a size r; r = 1e15 is Poisson's.

    p(y) = Gamma(y + r) / (Gamma(r) y!) (r / (r + m))^r (m / (r + m))^y, with Stirling's series for large r, in which
    differences of nearly equal terms are written out.

    >>> rate = torch.tensor([3.0]).double()
    >>> count_log_prob(torch.tensor([2.0]).double(), rate.log(), torch.tensor([1e15]).double())
    tensor([-1.4959], dtype=torch.float64)
    """
    small, large = size.clamp_max(LARGE), size.clamp_min(LARGE)
    orders = torch.lgamma(count + 1)
    direct = torch.lgamma(count + small) - torch.lgamma(small) + count * (log_mean - small.log())
    direct = direct - (count + small) * functional.softplus(log_mean - small.log(), threshold=60)
    series = (large + count - 0.5) * torch.log1p(count / large) - count + _stirling(large + count) - _stirling(large)
    series = series + count * log_mean - (count + large) * torch.exp(log_mean - large.log()).log1p()
    found = torch.where(size < LARGE, direct, series) - orders
    return torch.where((count == 0) & (log_mean == -torch.inf), 0.0, found)  # a rate of 0


def _stirling(x: Tensor) -> Tensor:
    """Return ln Gamma(x) - ((x - 1/2) ln x - x + ln(2 pi) / 2), for large x."""
    square = x.square()
    return (1 - (1 - 2 / (7 * square)) / (30 * square)) / (12 * x)


def count_cdf(count: Tensor, mean: Tensor, size: Tensor) -> Tensor:
    """Return P(Y <= count) of a negative binomial distribution: an incomplete beta function, I_x(r, count + 1).

    By the continued fraction of the function or of its complement, whichever converges fast.

    >>> half = torch.tensor([0.5]).double()
    >>> count_cdf(torch.tensor([0.0]).double(), mean=half, size=half)  # (r / (r + m))^r
    tensor([0.7071], dtype=torch.float64)
    """
    x = size / (size + mean)
    rest = mean / (size + mean)
    a, b = size, count + 1
    swap = x > (a + 1) / (a + b + 2)
    # x^r (1 - x)^(count + 1) / B(r, count + 1) is the probability of the count, times (r + count) (1 - x).
    front = count_log_prob(count, mean.log(), size) + torch.log(size + count) + rest.log()
    few = mean < 1e-6 * size  # Poisson's, which need no fraction: it would be the slowest of all
    one, two = torch.where(swap, b, a), torch.where(swap, a, b)
    at = torch.where(swap, rest, x).where(~few, 0.0)
    found = front.exp() / (one * _fraction(at, one, two))
    found = torch.where(swap, 1 - found, found)
    return torch.where(few, torch.special.gammaincc(b, mean), found).clamp(0, 1)


def _fraction(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return 1 + d_1 / (1 + d_2 / (1 + ...)) of the incomplete beta function, by Lentz's method."""
    tiny = 1e-290
    value = torch.ones_like(x)
    upper, lower = torch.ones_like(x), torch.zeros_like(x)
    for step in range(1, STEPS):
        half = step // 2
        if step % 2:
            term = -(a + half) * (a + b + half) / ((a + 2 * half) * (a + 2 * half + 1)) * x
        else:
            term = half * (b - half) / ((a + step - 1) * (a + step)) * x
        lower = 1 + term * lower
        lower = 1 / torch.where(lower.abs() < tiny, tiny, lower)
        upper = 1 + term / upper
        upper = torch.where(upper.abs() < tiny, tiny, upper)
        change = upper * lower
        value = value * change
        if step % 32 == 0 and not bool(((change - 1).abs() > 1e-13).any()):
            break
    return value


def _quantile(level: float, mean: Tensor, std: Tensor, size: Tensor) -> Tensor:
    """Return the least count whose cumulated probability reaches a level, by halving; NaN where the mean is."""
    known, none = (mean > 0) & mean.isfinite() & std.isfinite(), mean == 0
    mean, std, size = (torch.where(known, x, 1.0) for x in (mean, std, size))
    low = torch.full_like(mean, -1.0)
    high = torch.ceil(mean + std)
    for _ in range(64):  # a quantile is at most so many standard deviations away
        short = count_cdf(high, mean, size) < level
        if not bool(short.any()):
            break
        low, high = torch.where(short, high, low), torch.where(short, torch.ceil(2 * high + std + 1), high)
    for _ in range(max(1, math.ceil(math.log2(float((high - low).max()) + 1))) if low.numel() else 0):
        middle = torch.floor((low + high) / 2)
        reached = count_cdf(middle.clamp_min(0), mean, size) >= level
        inside = (middle > low) & (middle < high)
        high = torch.where(inside & reached, middle, high)
        low = torch.where(inside & ~reached, middle, low)
    return torch.where(known, high, torch.nan).where(~none, 0.0)
