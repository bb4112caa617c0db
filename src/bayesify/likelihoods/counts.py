"""What likelihoods of counts share."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from bayesify._core.maths import at_least_float32, minimise
from bayesify.likelihoods.count_prediction import CountPrediction
from bayesify.likelihoods.gaussian import Gaussian
from bayesify.likelihoods.likelihood import Likelihood, Stream, variance_of
from bayesify.likelihoods.pooling import Pooling, Temperatures
from bayesify.likelihoods.prediction import Prediction, RegressionPrediction
from bayesify.likelihoods.shapes import check_averaged, check_shapes, drop_one, has_wrong

__all__ = ["Counts"]


class Counts(Likelihood):
    """Counts 0, 1, 2, ..., from the logarithm of their rate; the variance of a count is rate + dispersion rate^2.

    A last dimension of size one is dropped, of outputs and of targets. Targets may be floating-point numbers.
    """

    @property
    @abstractmethod
    def dispersion(self) -> Tensor:
        """Return the dispersion that predictions have, calibration included."""

    @abstractmethod
    def set_dispersion(self, value: float) -> None:
        """Change the calibration so that predictions have this dispersion."""

    def centre(self, output: Tensor) -> Tensor:
        """Return the logarithms of the rates."""
        return drop_one(at_least_float32(output))

    def check(self, output: Tensor, target: Tensor) -> None:
        """Raise where outputs and targets do not fit, or targets are no counts."""
        check_shapes(output, target, what="logarithm of a rate")
        whole = target.isfinite() & (target == target.floor()) if target.is_floating_point() else True
        if has_wrong(target, (target >= 0) & whole):
            raise ValueError(
                f"Targets of a likelihood of counts must be whole numbers of at least 0, and they run from "
                f"{target.min().item():g} to {target.max().item():g}. For other numbers use likelihood='regression'."
            )

    @torch.no_grad()
    def calibrate(
        self,
        batches: Sequence[tuple[Tensor, Tensor]],
        *,
        parts: Sequence[int] = (),
        pooling: Pooling | float = "probs",
        temperatures: Temperatures = "one",
    ) -> tuple[float, float]:
        """Fit the dispersion to the predictions, never worse than it is; rates stay as they are."""
        del parts
        check_averaged(pooling, temperatures, what="counts have one dispersion")
        found = Prediction.join([self.from_samples(outputs) for outputs, _ in batches])
        assert isinstance(found, CountPrediction)
        target = torch.cat([drop_one(target) for _, target in batches])

        def loss(log_dispersion: float) -> float:
            made = counted(found.mean.double(), found.epistemic.double(), math.exp(log_dispersion))
            return -made.log_prob(target).mean().item()

        before = -found.log_prob(target).mean().item()
        if not math.isfinite(before):
            raise ValueError("The predictions or the targets are not finite, so there is nothing to calibrate.")
        best, value = minimise(loss, -16.0, 4.0, start=math.log(max(self.dispersion.item(), 1e-7)))
        if value < before:
            self.set_dispersion(math.exp(best))
        return before, min(value, before)

    def stream(self, *, keep_samples: bool = False) -> Stream:
        """Return a collector of draws."""
        return _CountStream(self, keep_samples)

    def integrate(
        self, mean: Tensor, variance: Tensor | None, covariance: Tensor | None, *, part: int = 0
    ) -> CountPrediction:
        """Return the prediction of a Gaussian logarithm N(m, v) of the rate, in closed form.

        The rate is log-normal: its mean is exp(m + v / 2) and its variance mean^2 (exp(v) - 1).
        """
        del part
        spread = drop_one(variance_of(variance, covariance)).clamp_min(0)
        rate = (self.centre(mean) + spread / 2).exp()
        return counted(rate, rate.square() * torch.expm1(spread), self.dispersion)


def counted(rate: Tensor, epistemic: Tensor, dispersion: Tensor | float, **others: Tensor | None) -> CountPrediction:
    """Return the prediction of rates with a mean and variance: E[r + d r^2] = mean + d (mean^2 + variance)."""
    aleatoric = rate + dispersion * (rate.square() + epistemic)
    return CountPrediction(mean=rate, aleatoric=aleatoric, epistemic=epistemic, **others)  # type: ignore[arg-type]


class _CountStream(Stream):
    def __init__(self, likelihood: Counts, keep_samples: bool) -> None:
        self.likelihood = likelihood
        self.rates = Gaussian(1.0).stream(keep_samples=keep_samples)

    def add(self, outputs: Tensor, *, part: int = 0, view: int = 0) -> None:
        del part
        self.rates.add(at_least_float32(outputs).exp(), view=view)

    def result(self) -> CountPrediction:
        found = self.rates.result()
        assert isinstance(found, RegressionPrediction)
        return counted(
            found.mean,
            found.epistemic,
            self.likelihood.dispersion,
            samples=found.samples,
            view_epistemic=found.view_epistemic,
        )
