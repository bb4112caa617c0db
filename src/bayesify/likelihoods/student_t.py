"""Numbers with noise that has heavy tails."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bayesify._core.maths import at_least_float32, minimise
from bayesify.likelihoods.gaussian import Gaussian, scaled
from bayesify.likelihoods.likelihood import Likelihood, Stream, variance_of
from bayesify.likelihoods.pooling import Pooling, Temperatures
from bayesify.likelihoods.prediction import Prediction, RegressionPrediction
from bayesify.likelihoods.shapes import check_averaged, check_shapes, drop_one, own_factor
from bayesify.likelihoods.student_prediction import StudentPrediction

__all__ = ["StudentT"]

LEAST = 1e-5  # degrees of freedom above 2, as float32 can tell: at 2 the variance is infinite


class StudentT(Likelihood):
    """Numbers y = f(x) + scale t, t of Student's distribution: regression that outliers do not spoil.

    The degrees of freedom are above 2, so that there is a variance, scale^2 dof / (dof - 2). A last dimension of size
    one is dropped, of outputs and of targets; several outputs share the scale. `calibrate` multiplies the predictive
    variance, noise and epistemic part alike.

    Args:
        dof: Degrees of freedom; None learns them, from 4.
        scale: Of the noise; None learns it, from 1.

    Example:
        >>> StudentT(dof=3.0, scale=1.0).log_prob(torch.zeros(1, 1), torch.zeros(1))
        tensor([-1.0009])
    """

    kind = "student-t"
    variance_scale: Tensor
    log_excess: Tensor
    log_scale: Tensor

    def __init__(self, dof: float | None = None, *, scale: float | None = None) -> None:
        super().__init__()
        if dof is not None and not 2 + LEAST <= dof < math.inf:
            raise ValueError(
                f"dof must be None or a number above 2, by {LEAST:g} or more, since there noise has a variance, "
                f"but it is {dof!r}. For infinitely many use likelihood='regression'."
            )
        if scale is not None and not 0 < scale < math.inf:
            raise ValueError(f"scale must be None or a positive number, but it is {scale!r}.")
        self.fixed = {"dof": None if dof is None else float(dof), "scale": None if scale is None else float(scale)}
        self.register_buffer("variance_scale", torch.ones(()))
        if dof is None:
            self.log_excess = nn.Parameter(torch.tensor(2.0).log())
        if scale is None:
            self.log_scale = nn.Parameter(torch.zeros(()))

    @property
    def dof(self) -> Tensor:
        """Return the degrees of freedom; where they are learned, 2 + exp(log_excess), or 1e-5 for the latter."""
        fixed = self.fixed["dof"]
        return 2 + self.log_excess.exp().clamp_min(LEAST) if fixed is None else self.variance_scale.new_tensor(fixed)

    @property
    def scale(self) -> Tensor:
        """Return the scale of the noise."""
        fixed = self.fixed["scale"]
        return self.log_scale.exp() if fixed is None else self.variance_scale.new_tensor(fixed)

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return dict(self.fixed)

    def extra_repr(self) -> str:
        """Show what is fixed and what is learned."""
        return ", ".join(f"{name}={'learned' if value is None else value}" for name, value in self.fixed.items())

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        """Return ln p = ln G((n+1)/2) - ln G(n/2) - ln(n pi scale^2)/2 - (n+1)/2 ln(1 + z^2/n), (B, ...).

        n are the degrees of freedom, G is the gamma function, z = (target - output) / scale.
        """
        mean = self.centre(output)
        dof, scale = self.dof.to(mean.dtype), self.scale.to(mean.dtype)
        z = (drop_one(target).to(mean.dtype) - mean) / scale
        constant = torch.lgamma((dof + 1) / 2) - torch.lgamma(dof / 2) - (dof * math.pi).log() / 2 - scale.log()
        return constant - (dof + 1) / 2 * torch.log1p(z.square() / dof)

    def centre(self, output: Tensor) -> Tensor:
        """Return the means."""
        return drop_one(at_least_float32(output))

    def output_factor(
        self,
        output: Tensor,
        target: Tensor | None = None,
        *,
        num_draws: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return the root of the Fisher information, (n + 1) / ((n + 3) scale^2), (B, N, 1, 1), or with random signs.

        Not the Hessian, which is negative at outliers.
        """
        del target
        with torch.no_grad():
            information = (self.dof + 1) / ((self.dof + 3) * self.scale.square())
        mean = self.centre(output.detach())
        return own_factor(information.to(mean.dtype).expand_as(mean), num_draws=num_draws, generator=generator)

    def check(self, output: Tensor, target: Tensor) -> None:
        """Raise where outputs and targets do not fit."""
        check_shapes(output, target, what="mean")

    @torch.no_grad()
    def calibrate(
        self,
        batches: Sequence[tuple[Tensor, Tensor]],
        *,
        parts: Sequence[int] = (),
        pooling: Pooling | float = "probs",
        temperatures: Temperatures = "one",
    ) -> tuple[float, float]:
        """Fit the scale of the predictive variance, of least NLL; the degrees of freedom stay as they are."""
        del parts
        check_averaged(pooling, temperatures, what="numbers have one scale of the variance")
        found = Prediction.join([self.from_samples(outputs) for outputs, _ in batches])
        assert isinstance(found, StudentPrediction)
        target = torch.cat([drop_one(target) for _, target in batches])

        def loss(log_factor: float) -> float:
            return -scaled(found, math.exp(log_factor)).log_prob(target).mean().item()

        if not math.isfinite(loss(0.0)):
            raise ValueError("The predictions or the targets are not finite, so there is nothing to calibrate.")
        best, value = minimise(loss, -14.0, 14.0, start=0.0, points=29, tolerance=1e-4)
        self.variance_scale.mul_(math.exp(best))
        return loss(0.0), value

    def stream(self, *, keep_samples: bool = False) -> Stream:
        """Return a collector of draws."""
        return _StudentStream(self, keep_samples)

    def integrate(
        self, mean: Tensor, variance: Tensor | None, covariance: Tensor | None, *, part: int = 0
    ) -> StudentPrediction:
        """Return the prediction of a Gaussian mean, which is exact; see `StudentPrediction`."""
        del part
        return self.predicted(self.centre(mean), drop_one(variance_of(variance, covariance)))

    def mixture(self, parts: Sequence[Prediction], weights: Sequence[float], *, views: bool = False) -> Prediction:
        """Return the mixture's mean and variance; the scale is of all of the variance, also of that between parts."""
        if len(parts) == 1:
            return parts[0]
        scale = self.variance_scale
        mixed = Prediction.mixture([scaled(part, 1 / scale) for part in parts], weights, views=views)
        return scaled(mixed, scale)

    def predicted(self, mean: Tensor, epistemic: Tensor, samples: Tensor | None = None) -> StudentPrediction:
        """Return the prediction of means that vary so much."""
        dof, scale = self.dof.detach(), self.scale.detach()
        noise = scale.square() * dof / (dof - 2) * self.variance_scale
        return StudentPrediction(
            mean=mean,
            aleatoric=noise.to(mean.dtype).expand_as(mean),
            epistemic=epistemic * self.variance_scale,
            samples=samples,
            dof=dof.to(mean.dtype).expand_as(mean),
        )


class _StudentStream(Stream):
    def __init__(self, likelihood: StudentT, keep_samples: bool) -> None:
        self.likelihood = likelihood
        self.means = Gaussian(1.0).stream(keep_samples=keep_samples)

    def add(self, outputs: Tensor, *, part: int = 0, view: int = 0) -> None:
        del part
        self.means.add(outputs, view=view)

    def result(self) -> StudentPrediction:
        found = self.means.result()
        assert isinstance(found, RegressionPrediction)
        made = self.likelihood.predicted(found.mean, found.epistemic, found.samples)
        between = found.view_epistemic
        return made if between is None else replace(made, view_epistemic=between * self.likelihood.variance_scale)
