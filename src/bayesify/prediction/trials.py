"""How good a posterior is as it stands, on validation data: what a search for its width goes by."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import length_hint
from typing import Any

import torch
from torch import Tensor

from bayesify._core.dividing import in_order
from bayesify._core.maths import gaussian_log_prob
from bayesify._core.progress import bar
from bayesify._core.trees import to_device
from bayesify.laws import Posterior
from bayesify.likelihoods import Categorical
from bayesify.likelihoods.prediction import ClassificationPrediction, RegressionPrediction
from bayesify.prediction import posterior_device, predict, weight_norm

__all__ = ["Batches", "Trial", "halves", "judge"]

TINY = 1e-38  # the least probability of a draw that is told from zero


@dataclass(frozen=True)
class Trial:
    """A posterior with one width of its noise, on validation data.

    Attributes:
        factor: What the standard deviation was multiplied by.
        nll: Mean negative log-likelihood, in nats; infinite where it is not a number.
        error: 1 - accuracy, or the root of the mean squared error.
    """

    factor: float
    nll: float
    error: float


def judge(
    posterior: Posterior,
    loader: Iterable[Any],
    factor: float,
    *,
    calibrated: bool,
    progress: bool,
    options: dict[str, Any],
) -> Trial:
    """Predict the validation data, and say how well.

    Args:
        posterior: As it stands.
        loader: Batches of (inputs, targets).
        factor: For the record, and the progress bar.
        calibrated: Whether the NLL is that after calibration on the other half of the examples.
        progress: Whether to show a bar.
        options: Of `predict`.
    """
    device = posterior_device(posterior)
    seen: _Classes | _Numbers | None = None

    def predicted(batch: Any) -> tuple[Any, Tensor, bool]:
        inputs, target = posterior.split_batch(to_device(batch, device))
        labels = posterior.likelihood.labels(target)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The prediction is NaN")  # too wide a noise, which is not chosen
            found = predict(posterior, inputs, keep_samples=calibrated and labels is not None, **options)
        return found, target if labels is None else labels, labels is not None

    each = in_order(loader, predicted, norm=lambda: weight_norm(posterior))
    for found, target, classes in bar(each, f"factor {factor:.3g}", shown=progress, total=length_hint(loader) or None):
        if seen is None:
            exponent = getattr(posterior.likelihood, "exponent", 1.0)
            seen = _Classes(calibrated, exponent) if classes else _Numbers(calibrated)
        seen.add(found, target)
    if seen is None:
        raise ValueError("The validation loader gave no batch. Check its data set and sampler.")
    nll, error = seen.nll(), seen.error()
    return Trial(factor, nll if math.isfinite(nll) else math.inf, error if math.isfinite(error) else math.inf)


@dataclass
class _Classes:
    """Classes: sums, and with calibration the draws of every batch, which count as logits."""

    calibrated: bool
    exponent: float
    batches: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    log_prob: float = 0.0
    right: float = 0.0
    count: int = 0

    def add(self, found: Any, labels: Tensor) -> None:
        if not isinstance(found, ClassificationPrediction):
            raise TypeError(f"A {type(found).__name__} does not say how probable labels are, so it cannot be judged.")
        counted = found.counted(labels)
        self.count += int(counted.sum())
        self.right += float((found.correct(labels) & counted).sum())
        self.log_prob += float(found.log_prob(labels).sum())
        if self.calibrated:
            assert found.samples is not None
            self.batches.append((found.samples.clamp_min(TINY).log_().cpu(), labels.reshape(counted.shape).cpu()))

    def error(self) -> float:
        return 1 - self.right / max(self.count, 1)

    def nll(self) -> float:
        """Return the mean; with calibration of each half of the examples by what was fitted on the other."""
        if not self.calibrated or math.isnan(self.log_prob):
            return -self.log_prob / max(self.count, 1)
        total = 0.0
        for half, other in halves(self.batches):
            fitted = Categorical(class_dim=-1).to(half[0][0].dtype)
            fitted.calibrate(other, pooling=self.exponent)
            for draws, labels in half:
                part, _ = fitted.total_nll(fitted.from_samples(draws).log_prob(labels), labels)
                total += part.item()
        return total / max(self.count, 1)


@dataclass
class _Numbers:
    """Numbers: squared residuals and variances, one for each target."""

    calibrated: bool
    batches: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    noiseless: bool = False

    def add(self, found: Any, target: Tensor) -> None:
        if not isinstance(found, RegressionPrediction):
            raise TypeError(f"A {type(found).__name__} does not say how probable targets are, so it cannot be judged.")
        residuals = target.reshape(found.mean.shape).double() - found.mean.double()
        self.noiseless = self.noiseless or not bool((found.aleatoric > 0).all())
        # Rows second, as draws have them.
        self.batches.append((residuals.square()[None].cpu(), found.variance.double().cpu()))

    def error(self) -> float:
        squares = torch.cat([squares.flatten() for squares, _ in self.batches])
        return float(squares.mean().sqrt())

    def nll(self) -> float:
        """Return the mean; with calibration the variances of each half are scaled by what fits the other."""
        if self.noiseless:
            return math.nan  # a likelihood whose predictions are without noise has no density of targets
        total, count = 0.0, 0
        for half, other in halves(self.batches) if self.calibrated else [(self.batches, [])]:
            ratios = torch.cat([(squares[0] / variance).flatten() for squares, variance in other]) if other else None
            log_scale = 0.0 if ratios is None else math.log(max(float(ratios.mean()), 1e-12))
            for squares, variance in half:
                each = gaussian_log_prob(squares[0].sqrt(), torch.zeros_like(variance), variance.log() + log_scale)
                total, count = total - float(each.sum()), count + each.numel()
        return total / max(count, 1)


Batches = list[tuple[Tensor, Tensor]]


def halves(batches: Batches) -> list[tuple[Batches, Batches]]:
    """Return every second example and the others, each with the other; outputs (S, B, ...), targets (B, ...)."""
    parts: tuple[Batches, Batches] = ([], [])
    start = 0
    for outputs, targets in batches:
        for half in range(2):
            rows = slice((half - start) % 2, None, 2)
            parts[half].append((outputs[:, rows], targets[rows]))
        start += len(targets)
    if start < 2:
        raise ValueError("Calibration on other examples needs at least two. Give more, or calibrated=False.")
    return [parts, (parts[1], parts[0])]
