"""The result of a prediction: the same fields for every method and every predictor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bayesify._core.deprecation import warn_renamed
from bayesify._core.maths import IGNORED, as_double, entropy, exact_top, gaussian_log_prob, label_log_prob
from bayesify.likelihoods.base_prediction import Prediction, average, nothing, spread, stacked
from bayesify.likelihoods.pooling import normalised

__all__ = ["ClassificationPrediction", "FeaturePrediction", "Prediction", "RegressionPrediction"]

SCORES = ("total", "aleatoric", "epistemic", "variation_ratio", "model_variance", "msp")


@dataclass(frozen=True, repr=False)
class ClassificationPrediction(Prediction):
    """A predictive distribution over classes, and why it is unsure.

    The class dimension is the last one; dense outputs keep theirs between it and the batch. All uncertainties
    are in nats.

    Attributes:
        log_probs: Logarithm of the predictive probabilities, (B, ..., C): ln (1/S) sum_s p_s, or, where calibration
            chose so, another power mean of the draws' probabilities, which label and confidence follow.
        aleatoric: Expected entropy of the draws, (1/S) sum_s H[p_s], (B, ...): what the data leave open.
        epistemic: Mutual information (BALD) H[pbar] - mean H[p_s], pbar = (1/S) sum_s p_s, (B, ...): what the model
            leaves open.
        variation_ratio: 1 - the share of draws that vote for the most frequent class, (B, ...).
        model_variance: mean_s p_s.p_s - pbar.pbar, (B, ...).
        logits_mean: Mean of the logits, centred over classes, which softmax does not see, (B, ..., C).
        logits_variance: Their variance over draws, where the predictor has it.
        samples: The draws' probabilities (S, B, ..., C), if they were asked for.
        predictor: Which one-pass predictor made it, in words; None if draws did.
        view_epistemic: The part of `epistemic` that is the views' disagreement, I(label; view); None for one view.
        averaged: ln pbar, (B, ..., C), where `log_probs` is another mean; uncertainties are always pbar's.
        normaliser: ln of what normalised that other mean, (B, ...).
        exponent: Of the power mean; 1 is the average of probabilities, 0 that of log-probabilities, normalised.
        energy: -ln sum_c exp(logit_c) of the outputs as they are, averaged over draws, (B, ...), as a score (Liu et al.
            2020); None for predictions without draws, which know centred logits alone, and other likelihoods.

    Example:
        >>> from bayesify import Categorical
        >>> prediction = Categorical().from_samples(torch.zeros(1, 3, 4))
        >>> prediction.log_prob(torch.tensor([0, 1, -100]))
        tensor([-1.3863, -1.3863,  0.0000], dtype=torch.float64)
        >>> prediction.correct(torch.tensor([0, 1, -100]))
        tensor([ True, False, False])
    """

    unit = "nats"
    answers = ("probs", "total", "aleatoric", "epistemic")
    columns = ("label", "confidence", "total", "aleatoric", "epistemic", "probs")
    details = ("variation_ratio", "model_variance", "logits_mean", "logits_variance", "energy")

    log_probs: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    variation_ratio: Tensor
    model_variance: Tensor
    logits_mean: Tensor | None = field(default_factory=nothing)
    logits_variance: Tensor | None = field(default_factory=nothing)
    samples: Tensor | None = None
    predictor: str | None = None
    view_epistemic: Tensor | None = None
    averaged: Tensor | None = None
    normaliser: Tensor | None = None
    exponent: float = 1.0
    energy: Tensor | None = field(default_factory=nothing)

    def __post_init__(self) -> None:
        """Let votes for outputs that are NaN not look unanimous."""
        broken = self.log_probs.amax(-1).isnan()
        object.__setattr__(self, "variation_ratio", self.variation_ratio.masked_fill(broken, torch.nan))

    @property
    def probs(self) -> Tensor:
        """Predictive probabilities, (B, ..., C)."""
        return self.log_probs.exp()

    @property
    def label(self) -> Tensor:
        """Most probable class, (B, ...)."""
        return self.log_probs.argmax(-1)

    @property
    def confidence(self) -> Tensor:
        """Probability of the most probable class, (B, ...)."""
        return self.log_probs.amax(-1).exp()

    @property
    def total(self) -> Tensor:
        """Entropy of the draws' average probabilities, (B, ...): aleatoric + epistemic."""
        return entropy(self.log_probs if self.averaged is None else self.averaged)

    @property
    def max_probability(self) -> Tensor:
        """The old name of `msp`."""
        warn_renamed("max_probability, one minus the maximum", "msp, and confidence for the maximum itself")
        return self.msp

    @property
    def msp(self) -> Tensor:
        """One minus the maximum softmax probability, as a score, (B, ...): 1 - `confidence`."""
        # The other classes' sum: 1 - p rounds all confident predictions to one and the same score.
        others = self.log_probs.scatter(-1, self.label[..., None], -torch.inf)
        return others.logsumexp(-1).exp()

    @property
    def scores(self) -> tuple[str, ...]:
        """Return the names of the scores."""
        return SCORES if self.energy is None else (*SCORES, "energy")

    def log_prob(self, targets: Tensor) -> Tensor:
        """Return ln p(label), (B, ...), in float64; 0 where the label is -100.

        Args:
            targets: Labels (B, ...); or soft ones: shares of the classes (B, ..., C), or of the second of two classes,
                (B, ...). Of these it is the expectation, sum_c t_c ln p_c.
        """
        targets = self._aligned(targets)
        if not targets.is_floating_point():
            return as_double(label_log_prob(self.log_probs, targets))
        each = as_double(targets) * as_double(self.log_probs)
        return each.where(as_double(targets) != 0, 0).sum(-1)  # 0 ln 0 = 0

    def correct(self, targets: Tensor) -> Tensor:
        """Return where the most probable class is the label, (B, ...); of soft labels it is the largest share's."""
        targets = self._aligned(targets)
        return self.label == (targets.argmax(-1) if targets.is_floating_point() else targets)

    def counted(self, targets: Tensor) -> Tensor:
        """Return where the label is not -100, (B, ...)."""
        targets = self._aligned(targets)
        return super().counted(targets) if targets.is_floating_point() else targets != IGNORED

    def _aligned(self, targets: Tensor) -> Tensor:
        """Return whole labels (B, ...), or shares of the classes (B, ..., C)."""
        shape, soft = self.log_probs.shape[:-1], targets.is_floating_point()
        targets = targets.to(self.log_probs.device)
        if soft and targets.shape == self.log_probs.shape:
            return targets
        if targets.shape == (*shape, 1):  # likelihoods drop such a dimension too
            targets = targets[..., 0]
        if targets.shape != shape or (soft and self.classes != 2):
            raise ValueError(
                f"Targets {targets.dtype} of shape {tuple(targets.shape)} do not fit predictions of {self.classes} "
                f"classes of shape {tuple(shape)}. Give one whole number for each, or a share of every class."
            )
        return torch.stack([1 - targets, targets], -1) if soft else targets.long()

    @property
    def classes(self) -> int:
        """Return the number of classes."""
        return self.log_probs.shape[-1]

    @property
    def output_variance(self) -> Tensor:
        """Return the variance of the centred logits, summed over classes, (B, ...)."""
        assert self.logits_variance is not None
        return self.logits_variance.sum(-1)

    def _mixed(self, parts: Sequence[Prediction], weights: Sequence[float]) -> ClassificationPrediction:
        if any(getattr(part, "exponent", None) != self.exponent for part in parts):
            raise ValueError("Predictions whose draws were pooled differently cannot be mixed. Calibrate them alike.")
        each = torch.stack([_average_of(part) for part in parts])
        known = all(getattr(part, "logits_variance", None) is not None for part in parts)
        has_energy = all("energy" in part.scores for part in parts)
        means = stacked(parts, "logits_mean") if known else each
        shares = each.new_tensor(weights).log().view(-1, *(1,) * (each.ndim - 1))
        averaged, probs = exact_top((each + shares).logsumexp(0)), each.exp()
        total, aleatoric = entropy(averaged), average(stacked(parts, "aleatoric"), weights)
        epistemic = (total - aleatoric).clamp_min(0)
        votes = average(_votes(probs, stacked(parts, "variation_ratio")), weights)
        between = spread(probs, weights).sum(-1)
        mixed = ClassificationPrediction(
            log_probs=averaged,
            aleatoric=total - epistemic,
            epistemic=epistemic,
            variation_ratio=(1 - votes.amax(-1)).clamp_min(0),
            model_variance=average(stacked(parts, "model_variance"), weights) + between,
            logits_mean=average(means, weights) if known else None,
            logits_variance=average(stacked(parts, "logits_variance"), weights) + spread(means, weights)
            if known
            else None,
            energy=average(stacked(parts, "energy"), weights) if has_energy else None,
        )
        return mixed if self.exponent == 1 else mixed._pooled(parts, weights, self.exponent)

    def _pooled(self, parts: Sequence[Prediction], weights: Sequence[float], a: float) -> ClassificationPrediction:
        """Return the average with the parts' power mean, (sum_k w_k E_k[p^a])^(1/a), in its place."""
        inside = stacked(parts, "log_probs") + stacked(parts, "normaliser")[..., None]
        if a:
            shares = inside.new_tensor(weights).log().view(-1, *(1,) * (inside.ndim - 1))
            found = (a * inside + shares).logsumexp(0) / a
        else:
            found = average(inside, weights)
        return self.repooled(*normalised(found), a)

    def repooled(self, log_probs: Tensor, normaliser: Tensor, exponent: float) -> ClassificationPrediction:
        """Return the prediction of an average of draws with another mean of them for its probabilities."""
        return dataclasses.replace(
            self, log_probs=log_probs, averaged=self.log_probs, normaliser=normaliser, exponent=exponent
        )

    def _between(self, parts: Sequence[Prediction], weights: Sequence[float]) -> Tensor:
        inner = average(torch.stack([entropy(_average_of(part)) for part in parts]), weights)
        return (self.total - inner).clamp_min(0)

    def divergence(self, other: ClassificationPrediction) -> Tensor:
        """Return sum_c p_c ln (p_c / q_c), (B, ...)."""
        return (self.probs * (self.log_probs - other.log_probs)).nan_to_num(0.0).sum(-1)  # 0 ln 0 = 0


@dataclass(frozen=True, repr=False)
class RegressionPrediction(Prediction):
    """A predictive mean and variance, and what the variance is made of.

    Attributes:
        mean: Predictive mean, (B, ...).
        aleatoric: Mean noise variance of the draws, (B, ...).
        epistemic: Variance of the draws' means, (B, ...).
        samples: The draws' means (S, B, ...), if they were asked for.
        predictor: Which one-pass predictor made it, in words; None if draws did.
        view_epistemic: The part of `epistemic` that is the variance of the views' means, where there are several.
    """

    unit = "std"
    answers = ("mean", "variance", "aleatoric", "epistemic")
    columns = ("mean", "std", "aleatoric", "epistemic")

    mean: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    samples: Tensor | None = None
    predictor: str | None = None
    view_epistemic: Tensor | None = None

    def __post_init__(self) -> None:
        """Let noise that is known, and so the same for every input, not hide a mean that is NaN."""
        broken = self.mean.isnan()
        for name in ("aleatoric", "epistemic"):
            object.__setattr__(self, name, getattr(self, name).where(~broken, torch.nan))

    @property
    def variance(self) -> Tensor:
        """Predictive variance: aleatoric + epistemic."""
        return self.aleatoric + self.epistemic

    @property
    def total(self) -> Tensor:
        """Return the predictive variance, as a score."""
        return self.variance

    @property
    def std(self) -> Tensor:
        """Predictive standard deviation."""
        return self.variance.sqrt()

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the central Gaussian interval mean -+ z std that holds `level` of the probability.

        >>> one = torch.ones(1)
        >>> RegressionPrediction(0 * one, one, 0 * one).interval(0.95)[1]
        tensor([1.9600])
        """
        if not 0 < level < 1:
            raise ValueError(f"level is a probability between 0 and 1, but it is {level}.")
        z = math.sqrt(2) * torch.erfinv(torch.tensor(level, dtype=torch.float64)).item()
        return self.mean - z * self.std, self.mean + z * self.std

    @property
    def scores(self) -> tuple[str, ...]:
        """Return the names of the scores."""
        return ("total", "aleatoric", "epistemic")

    def log_prob(self, targets: Tensor) -> Tensor:
        """Return ln N(target; mean, variance), (B, ...), in float64.

        Args:
            targets: Of the mean's shape, or with one more dimension of size one.

        Example:
            >>> one = torch.ones(1)
            >>> RegressionPrediction(0 * one, one, 0 * one).log_prob(torch.zeros(1, 1))
            tensor([-0.9189], dtype=torch.float64)
        """
        return gaussian_log_prob(self.aligned(targets), as_double(self.mean), as_double(self.variance).log())

    def aligned(self, targets: Tensor) -> Tensor:
        """Return targets in the mean's shape and float64; they may have one more dimension of size one."""
        targets = targets.to(self.mean.device)
        if targets.shape == (*self.mean.shape, 1):
            targets = targets[..., 0]
        if targets.shape != self.mean.shape:
            raise ValueError(
                f"Targets of shape {tuple(targets.shape)} do not fit predictions of shape {tuple(self.mean.shape)}."
            )
        return as_double(targets)

    def deviation(self, name: str) -> Tensor:
        """Return the root of a score, which is a variance."""
        return self.score(name).sqrt()

    def _mixed(self, parts: Sequence[Prediction], weights: Sequence[float]) -> RegressionPrediction:
        means, aleatoric, own = (stacked(parts, name) for name in ("mean", "aleatoric", "epistemic"))
        return dataclasses.replace(
            self,
            mean=average(means, weights),
            aleatoric=average(aleatoric, weights),
            epistemic=average(own, weights) + spread(means, weights),
            samples=None,
            predictor=None,
            view_epistemic=None,
        )

    def _between(self, parts: Sequence[Prediction], weights: Sequence[float]) -> Tensor:
        return spread(stacked(parts, "mean"), weights)

    def divergence(self, other: RegressionPrediction) -> Tensor:
        """Return KL(N(mean, variance) || the other's), (B, ...)."""
        ratio = self.variance / other.variance
        return 0.5 * (ratio + (self.mean - other.mean).square() / other.variance - 1 - ratio.log())


@dataclass(frozen=True, repr=False)
class FeaturePrediction(Prediction):
    """What the draws compute before their last layer.

    Attributes:
        features: Mean over the draws, (B, ..., D).
        variance: Variance over the draws, (B, ..., D).
        samples: The draws' features (S, B, ..., D), if they were asked for.
    """

    columns = ("epistemic", "features", "variance")

    features: Tensor
    variance: Tensor
    samples: Tensor | None = None

    @property
    def epistemic(self) -> Tensor:
        """How much the draws disagree: the variances' sum over features, (B, ...)."""
        return self.variance.sum(-1)

    @property
    def scores(self) -> tuple[str, ...]:
        """Return the names of the scores."""
        return ("epistemic",)


def _average_of(part: Any) -> Tensor:
    """Return ln of the average of a part's draws."""
    found: Tensor = part.log_probs if part.averaged is None else part.averaged
    return found


def _votes(probs: Tensor, ratio: Tensor) -> Tensor:
    """Return how draws vote: all but the ratio for the most probable class, the others as the probabilities are."""
    best = torch.zeros_like(probs).scatter(-1, probs.argmax(-1, keepdim=True), 1.0)
    others = probs * (1 - best)
    others = others / others.sum(-1, keepdim=True).clamp_min(torch.finfo(probs.dtype).tiny)
    return best * (1 - ratio[..., None]) + others * ratio[..., None]
