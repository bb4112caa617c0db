"""Numbers with Gaussian noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bayesify._core.maths import at_least_float32, gaussian_log_prob
from bayesify.likelihoods.likelihood import Likelihood, Stream, variance_of
from bayesify.likelihoods.pooling import Pooling, Temperatures
from bayesify.likelihoods.pooling_fit import folds_of
from bayesify.likelihoods.prediction import Prediction, RegressionPrediction

__all__ = ["Gaussian", "scaled"]

_VARIANCES = ("aleatoric", "epistemic", "view_epistemic")


class Gaussian(Likelihood):
    """Numbers y = f(x) + noise, noise ~ N(0, noise_std^2).

    A last dimension of size one is dropped, of outputs and of targets: predictions are (B,) for outputs (B, 1).

    Args:
        noise_std: None learns one number; a number fixes it; "per-output" learns one for each output; "head" reads
            it from the network, whose output then is (mean, log variance): a tuple of two tensors, or one tensor
            whose last dimension holds the means first and the log variances second.
        num_outputs: The number of outputs, needed for "per-output".
    """

    kind = "gaussian"
    variance_scale: Tensor
    log_noise: Tensor

    def __init__(
        self,
        noise_std: float | Literal["per-output", "head"] | None = None,
        *,
        num_outputs: int | None = None,
    ) -> None:
        super().__init__()
        self.noise_std = noise_std
        self.num_outputs = num_outputs
        self.side_by_side = 2 if noise_std == "head" else 1
        self.register_buffer("variance_scale", torch.ones(()))
        if noise_std is None:
            self.log_noise = nn.Parameter(torch.zeros(()))
        elif noise_std == "per-output":
            if num_outputs is None:
                raise ValueError('noise_std="per-output" needs the number of outputs: num_outputs=...')
            self.log_noise = nn.Parameter(torch.zeros(num_outputs))
        elif noise_std != "head":
            if isinstance(noise_std, str) or not 0 < noise_std < math.inf:
                raise ValueError(
                    f'noise_std must be None, a positive number, "per-output" or "head", but it is {noise_std!r}.'
                )
            self.noise_std = float(noise_std)

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"noise_std": self.noise_std, "num_outputs": self.num_outputs}

    def extra_repr(self) -> str:
        """Show the noise."""
        return f"noise_std={'learned' if self.noise_std is None else self.noise_std}"

    def read(self, output: Any, key: str | int | None) -> Tensor:
        """Find the means, or with a noise head the means and log variances side by side."""
        if self.noise_std == "head" and key is None and isinstance(output, list | tuple) and len(output) == 2:
            mean, log_variance = output
            if mean.shape != log_variance.shape:
                raise ValueError(
                    f"The two heads must have one shape, but they have {tuple(mean.shape)} and "
                    f"{tuple(log_variance.shape)}."
                )
            if mean.ndim == 1:
                mean, log_variance = mean[:, None], log_variance[:, None]
            return torch.cat([mean, log_variance], dim=-1)
        return super().read(output, key)

    def moments(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and the noise variance that an output means; a last dimension of one is dropped."""
        mean, log_variance = self._split(output)
        return mean, log_variance.exp()

    def _split(self, output: Tensor) -> tuple[Tensor, Tensor]:
        output = at_least_float32(output)
        if self.noise_std == "head":
            if output.shape[-1] % 2:
                raise ValueError(
                    "A noise head needs means and log variances in the last dimension, but its size "
                    f"{output.shape[-1]} is odd."
                )
            mean, log_variance = output.chunk(2, dim=-1)
            return _drop_one(mean), _drop_one(log_variance)
        if isinstance(self.noise_std, float):
            log_variance = output.new_full((), 2 * math.log(self.noise_std))
        else:
            log_variance = 2 * self.log_noise.to(output.dtype)
        if log_variance.numel() not in (1, output.shape[-1]):
            raise ValueError(
                f"The likelihood has noise for {self.num_outputs} outputs, but the network has {output.shape[-1]}: "
                f"Gaussian('per-output', num_outputs={output.shape[-1]})."
            )
        return _drop_one(output), _drop_one(log_variance.expand_as(output))

    def single_variance(self) -> float | None:
        """Return the noise variance where it is one number for all examples and outputs, else None.

        >>> Gaussian(0.5).single_variance(), Gaussian("head").single_variance()
        (0.25, None)
        """
        if isinstance(self.noise_std, float):
            return self.noise_std**2
        return float((2 * self.log_noise.detach()).exp()) if self.noise_std is None else None

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        """Return ln N(target; mean, noise variance), (B, ...)."""
        mean, log_variance = self._split(output)
        return gaussian_log_prob(_drop_one(target), mean, log_variance)

    def centre(self, output: Tensor) -> Tensor:
        """Return the means."""
        return self.moments(output)[0]

    def residuals(self, output: Tensor, target: Tensor) -> Tensor:
        """Return target - mean."""
        mean = self.centre(output)
        return target.reshape(mean.shape) - mean

    def output_factor(
        self,
        output: Tensor,
        target: Tensor | None = None,
        *,
        num_draws: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return 1 / noise std of each mean, (B, N, 1, 1); or z / std, z a standard normal.

        Of a noise head it is the Fisher information in mean and log variance, diag(1 / variance, 1 / 2), in draws
        (z / std, (z^2 - 1) / 2), and not the Hessian, which depends on the target and can be negative.
        """
        del target
        precise = self.moments(output.detach())[1].rsqrt().reshape(*output.shape[:-1], -1)[..., None]
        noise: Tensor | None = None
        if num_draws is not None:
            shape = (*precise.shape[:-1], num_draws)
            noise = torch.randn(shape, generator=generator, dtype=precise.dtype, device=precise.device)
        factor = precise if noise is None else precise * noise
        if self.noise_std == "head":
            half = torch.full_like(precise, math.sqrt(0.5)) if noise is None else (noise.square() - 1) / 2
            factor = torch.cat([factor, half], -2)
        return factor.reshape(len(output), -1, 1, factor.shape[-1]) / math.sqrt(num_draws or 1)

    def check(self, output: Tensor, target: Tensor) -> None:
        """Raise where outputs and targets do not fit."""
        mean, _ = self.moments(output)
        if mean.shape != _drop_one(target).shape:
            raise ValueError(
                f"Outputs of shape {tuple(output.shape)} (means {tuple(mean.shape)}) do not fit targets of shape "
                f"{tuple(target.shape)}. Regression needs one mean per target."
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
        """Fit the scale of the predictive variance; the NLL's minimum is mean((y - mean)^2 / variance)."""
        del parts
        if pooling not in ("auto", "probs") or temperatures == "each":
            raise ValueError(
                f"pooling={pooling!r} and temperatures={temperatures!r} are for classes: numbers have the mixture's "
                "mean and variance, and one scale of the variance. Leave both as they are."
            )
        prediction = Prediction.join([self.from_samples(outputs) for outputs, _ in batches])
        assert isinstance(prediction, RegressionPrediction)
        target = torch.cat([_drop_one(target) for _, target in batches])
        before = -prediction.log_prob(target).mean().item()
        ratio = ((target.double() - prediction.mean.double()) ** 2 / prediction.variance.double()).mean().item()
        if not math.isfinite(ratio + before):
            raise ValueError("The predictions or the targets are not finite, so there is nothing to calibrate.")
        factor = max(ratio, 1e-12)
        self.variance_scale.mul_(factor)
        return before, before + 0.5 * (math.log(factor) + ratio / factor - ratio)

    @torch.no_grad()
    def held_out_nll(self, batches: Sequence[tuple[Tensor, Tensor]], *, parts: Sequence[int] = ()) -> Tensor:
        """Return the mean NLL of each example, (E,), with the scale of the variance of other examples."""
        del parts
        prediction = Prediction.join([self.from_samples(outputs) for outputs, _ in batches])
        assert isinstance(prediction, RegressionPrediction)
        target = torch.cat([_drop_one(target) for _, target in batches]).double()
        rows = len(target)
        ratios = ((target - prediction.mean.double()) ** 2 / prediction.variance.double()).reshape(rows, -1)
        nll = -prediction.log_prob(target).reshape(rows, -1)
        folds, number = folds_of(torch.arange(rows, device=target.device))
        found = torch.empty(rows, dtype=torch.float64, device=target.device)
        for fold in range(number):
            own = folds == fold
            scale = ratios[~own].mean().clamp_min(1e-12) if number > 1 else ratios.new_ones(())
            found[own] = (nll[own] + 0.5 * (scale.log() + ratios[own] / scale - ratios[own])).mean(1)
        return found

    def stream(self, *, keep_samples: bool = False) -> Stream:
        """Return a collector of draws."""
        return _GaussianStream(self, keep_samples)

    def integrate(
        self, mean: Tensor, variance: Tensor | None, covariance: Tensor | None, *, part: int = 0
    ) -> RegressionPrediction:
        """Return N(mean, variance + noise variance); with a noise head all arguments hold both halves."""
        del part
        centre, noise = self.moments(mean)
        variance = variance_of(variance, covariance)
        if self.noise_std == "head":
            variance, of_log = variance.chunk(2, dim=-1)
            noise = noise * (_drop_one(of_log) / 2).exp()  # the mean of a log-normal
        return RegressionPrediction(
            mean=centre,
            aleatoric=noise * self.variance_scale,
            epistemic=_drop_one(variance) * self.variance_scale,
        )

    def mixture(self, parts: Sequence[Prediction], weights: Sequence[float], *, views: bool = False) -> Prediction:
        """Return the mixture's mean and variance; the scale is of all of the variance, also of that between parts."""
        if len(parts) == 1:
            return parts[0]
        scale = self.variance_scale
        mixed = Prediction.mixture([scaled(part, 1 / scale) for part in parts], weights, views=views)
        return scaled(mixed, scale)


def scaled(prediction: Prediction, factor: Tensor | float) -> Prediction:
    """Return a prediction with its variances multiplied by a number."""
    return prediction._map(lambda name, t: t * factor if name in _VARIANCES else t)


def _drop_one(x: Tensor) -> Tensor:
    return x[..., 0] if x.ndim > 1 and x.shape[-1] == 1 else x


class _GaussianStream(Stream):
    def __init__(self, likelihood: Gaussian, keep_samples: bool) -> None:
        self.likelihood = likelihood
        self.samples: list[Tensor] | None = [] if keep_samples else None
        self.count = 0
        self.views: dict[int, tuple[Tensor, int]] = {}  # sums of means, and how many

    def add(self, outputs: Tensor, *, part: int = 0, view: int = 0) -> None:
        del part
        means, noises = self.likelihood.moments(outputs)
        if means.ndim == 1:  # (S, B) with B = 1 must keep its batch
            means, noises = means[:, None], noises[:, None]
        if self.samples is not None:
            self.samples.append(means)
        number = means.shape[0]
        mean = means.mean(0)
        spread = ((means - mean) ** 2).sum(0)
        noise = noises.sum(0)
        known = self.views.get(view)
        self.views[view] = (mean * number, number) if known is None else (known[0] + mean * number, known[1] + number)
        if self.count == 0:
            self.mean, self.spread, self.noise = mean, spread, noise
        else:
            step = mean - self.mean
            total = self.count + number
            self.mean = self.mean + step * (number / total)
            self.spread = self.spread + spread + step**2 * (self.count * number / total)
            self.noise = self.noise + noise
        self.count += number

    def result(self) -> RegressionPrediction:
        scale = self.likelihood.variance_scale
        return RegressionPrediction(
            mean=self.mean,
            aleatoric=self.noise / self.count * scale,
            epistemic=self.spread / self.count * scale,
            view_epistemic=self._between() * scale if len(self.views) > 1 else None,
            samples=None if self.samples is None else torch.cat(self.samples),
        )

    def _between(self) -> Tensor:
        """Return the variance of the views' means."""
        each = [(count / self.count) * (total / count - self.mean).square() for total, count in self.views.values()]
        return torch.stack(each).sum(0)
