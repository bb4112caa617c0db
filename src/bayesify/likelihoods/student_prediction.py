"""The prediction of a number with noise of Student's distribution."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesify._core.maths import as_double, gaussian_log_prob
from bayesify.likelihoods.prediction import RegressionPrediction

__all__ = ["StudentPrediction"]

POINTS = 192
AT_ONCE = 2**10  # examples, whose numbers stay in a processor's cache
STEPS = 500  # at most; far out they grow by a factor


@dataclass(frozen=True, repr=False)
class StudentPrediction(RegressionPrediction):
    """A predictive mean and variance of a number with noise of Student's distribution.

    The distribution is that of m + e, m ~ N(mean, epistemic) and e ~ scale t(dof), with scale^2 = aleatoric (dof - 2) /
    dof: exact for Gaussian outputs, for draws with as much as their means are not Gaussian, and Student's own where
    epistemic is 0. Since t is a Gaussian whose precision is gamma distributed, p(y) = E_l N(y; mean, epistemic +
    scale^2 / l), an integral over one number, by 192 steps in ln l: exact to rounding.

    Attributes:
        mean: Predictive mean, (B, ...).
        aleatoric: Noise variance, (B, ...).
        epistemic: Variance of the draws' means, (B, ...).
        samples: The draws' means (S, B, ...), if they were asked for.
        predictor: Which one-pass predictor made it, in words; None if draws did.
        dof: The noise's degrees of freedom, (B, ...).

    Example:
        >>> from bayesify import StudentT
        >>> prediction = StudentT(dof=3.0, scale=1.0).from_gaussian(torch.zeros(1, 1), torch.zeros(1, 1))
        >>> prediction.log_prob(torch.zeros(1)), prediction.variance
        (tensor([-1.0009], dtype=torch.float64), tensor([3.]))
        >>> prediction.interval(0.95)[1]
        tensor([3.1824])
    """

    dof: Tensor | None = None

    def log_prob(self, targets: Tensor) -> Tensor:
        """Return ln p of targets, (B, ...), in float64.

        Args:
            targets: Of the mean's shape, or with one more dimension of size one.
        """
        distance = (self.aligned(targets) - as_double(self.mean)).flatten()
        return self._by_rows(_log_density, distance)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the central interval that holds `level` of the probability."""
        if not 0 < level < 1:
            raise ValueError(f"level is a probability between 0 and 1, but it is {level}.")
        half = self._by_rows(_half_width, torch.full_like(as_double(self.mean), level).flatten()).to(self.mean)
        return self.mean - half, self.mean + half

    def divergence(self, other: Any) -> Tensor:
        """Refuse: there is no formula."""
        raise ValueError(
            f"There is no divergence of a StudentPrediction from a {type(other).__name__}: compare log_prob."
        )

    def _by_rows(self, function: Callable[..., Tensor], values: Tensor) -> Tensor:
        """Apply a function of values, epistemic variance, squared scale and degrees of freedom, some rows at a time."""
        assert self.dof is not None
        dof = as_double(self.dof)
        square = as_double(self.aleatoric) * (dof - 2) / dof
        columns = (values, *(x.flatten() for x in (as_double(self.epistemic), square, dof)))
        parts = [function(*some) for some in zip(*(torch.split(x, AT_ONCE) for x in columns), strict=True)]
        return torch.cat(parts).reshape(self.mean.shape)


def _grid(dof: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
    """Return ln l at equal steps, (N, P), and the logarithms of the gamma density's shares at them.

    Its density in u = ln l is exp(a (u - exp u)), a = dof / 2, up to a constant; `reach` is how much further to the
    left an observation moves the mass.
    """
    a = dof[:, None] / 2
    tail, width = 36 / a, (72 / a).sqrt()
    low, high = -(tail + width) - reach[:, None], torch.log1p(tail + width)
    u = low + (high - low) * torch.linspace(0, 1, POINTS, dtype=a.dtype, device=a.device)
    log_shares = a * (u - torch.expm1(u))
    return u, log_shares - log_shares.logsumexp(1, keepdim=True)


def _log_density(distance: Tensor, epistemic: Tensor, square: Tensor, dof: Tensor) -> Tensor:
    u, log_shares = _grid(dof, torch.log1p(distance.square() / (square * dof)))
    variance = epistemic[:, None] + square[:, None] * (-u).exp()
    return (log_shares + gaussian_log_prob(distance[:, None], torch.zeros_like(u), variance.log())).logsumexp(1)


def _half_width(level: Tensor, epistemic: Tensor, square: Tensor, dof: Tensor) -> Tensor:
    """Return d with P(|y - mean| < d) = level; P is concave in d, so that Newton's steps from 0 never go too far."""
    u, log_shares = _grid(dof, torch.zeros_like(dof))
    precise, shares = (epistemic[:, None] + square[:, None] * (-u).exp()).rsqrt(), log_shares.exp()

    half = torch.zeros_like(dof)
    for _ in range(STEPS):
        z = half[:, None] * precise
        left = level - (shares * torch.erf(z / math.sqrt(2))).sum(1)
        slope = (shares * precise * (-z.square() / 2).exp()).sum(1) * math.sqrt(2 / math.pi)
        step = (left / slope).clamp_min(0)
        half = half + step
        if not bool((step > 1e-14 * half).any()):
            break
    return half
