"""The log marginal likelihood of Laplace's approximation, from eigenvalues alone, and the prior that maximises it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesify._core.maths import minimise

__all__ = ["LEAST", "MOST", "Residuals", "Spectrum", "choose", "log_evidence"]

LEAST, MOST = math.log(1e-6), math.log(1e10)  # of a prior precision
ROUNDS = 200


@dataclass(frozen=True)
class Spectrum:
    """What the evidence needs to know of the parameters that share a prior precision.

    Attributes:
        values: Eigenvalues of the curvature, of unit noise where the noise is one number; float64.
        square_norm: |w|^2 of the parameters at the mode.
    """

    values: Tensor
    square_norm: float

    def penalty(self, precision: float, scale: float) -> float:
        """Return (delta |w|^2 + ln det(scale H + delta) - P ln delta) / 2: what the evidence loses by fitting."""
        occam = torch.log1p(self.values * (scale / precision)).sum().item()
        return 0.5 * (precision * self.square_norm + occam)


@dataclass(frozen=True)
class Residuals:
    """What a Gaussian likelihood with one noise variance needs: sum (y - f)^2 and the number of targets.

    Attributes:
        square_sum: Of all residuals.
        count: How many there are.
        power: The curvature is that of unit noise divided by variance^power: 1 for the GGN, 2 for the empirical Fisher.
    """

    square_sum: float
    count: float
    power: int = 1

    def log_likelihood(self, variance: float) -> float:
        """Return sum ln N(y; f, variance)."""
        return -0.5 * (self.square_sum / variance + self.count * math.log(2 * math.pi * variance))


def log_evidence(
    log_likelihood: float, spectra: Sequence[Spectrum], precisions: Sequence[float], scale: float = 1.0
) -> float:
    """Return ln p(D) = ln p(D | w) - sum_g (delta_g |w_g|^2 + ln det(scale H_g + delta_g) - P_g ln delta_g) / 2.

    Exact where ln p(D | w) is quadratic and w its mode under the prior, as for linear regression.

    >>> one = Spectrum(torch.tensor([3.0], dtype=torch.float64), square_norm=0.0)
    >>> round(log_evidence(0.0, [one], [1.0]), 4)  # -ln(4) / 2
    -0.6931
    """
    pairs = zip(spectra, precisions, strict=True)
    return log_likelihood - sum(spectrum.penalty(precision, scale) for spectrum, precision in pairs)


def choose(
    spectra: Sequence[Spectrum],
    precisions: Sequence[float],
    *,
    residuals: Residuals | None = None,
    variance: float = 1.0,
    fixed_precision: bool = False,
) -> tuple[list[float], float]:
    """Return the prior precisions and the noise variance of most evidence, never worse than those given.

    Given the noise each precision is a search of its own, and given the precisions so is the noise; they take turns
    until neither changes. The mode is kept where it is, as is usual for networks.

    Args:
        spectra: One for each precision.
        precisions: Where to start.
        residuals: If the noise variance is to be chosen too.
        variance: Where it starts, or what it is.
        fixed_precision: Whether to choose the noise alone.
    """
    chosen = list(precisions)
    for _ in range(ROUNDS):
        before = [*chosen, variance]
        scale = 1.0 if residuals is None else variance**-residuals.power
        if not fixed_precision:
            chosen = [_best(spectrum, scale, start) for spectrum, start in zip(spectra, chosen, strict=True)]
        if residuals is None:
            break
        variance = _best_variance(spectra, chosen, residuals, variance)
        if all(abs(math.log(a / b)) < 1e-7 for a, b in zip(before, [*chosen, variance], strict=True)):
            break
    return chosen, variance


def _best(spectrum: Spectrum, scale: float, start: float) -> float:
    def loss(log_precision: float) -> float:
        return spectrum.penalty(math.exp(log_precision), scale)

    return math.exp(minimise(loss, LEAST, MOST, start=math.log(start))[0])


def _best_variance(
    spectra: Sequence[Spectrum], precisions: Sequence[float], residuals: Residuals, start: float
) -> float:
    def loss(log_variance: float) -> float:
        variance = math.exp(log_variance)
        scale = variance**-residuals.power
        return -log_evidence(residuals.log_likelihood(variance), spectra, precisions, scale)

    # The variance of the residuals is the answer without parameters; with P of them it grows by at most n / (n - P).
    centre = math.log(max(residuals.square_sum / residuals.count, 1e-12))
    return math.exp(minimise(loss, centre - 2.0, centre + 12.0, start=math.log(start))[0])
