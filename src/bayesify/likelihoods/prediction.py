"""The result of a prediction: the same fields for every method and every predictor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesify._core.maths import entropy

__all__ = ["ClassificationPrediction", "FeaturePrediction", "Prediction", "RegressionPrediction"]

SCORES = ("total", "aleatoric", "epistemic", "variation_ratio", "model_variance", "max_probability")


@dataclass(frozen=True, repr=False)
class Prediction:
    """What every prediction can do: be counted, indexed, joined, moved, and give scores.

    Where the outputs are NaN, every score is.
    """

    def __repr__(self) -> str:
        """Show the fields and their shapes, not their values."""
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in self._fields())
        return f"{type(self).__name__}({shapes})"

    def __len__(self) -> int:
        """Return the number of examples."""
        return self._fields()[0][1].shape[0]

    def __getitem__(self, rows: Any) -> Prediction:
        """Take some of the examples, by a slice, a mask or a tensor of positions."""
        if isinstance(rows, int):
            if not -len(self) <= rows < len(self):  # also what ends a loop over the examples
                raise IndexError(f"There is no example {rows}: there are {len(self)}.")
            rows = slice(rows, rows + 1 or None)
        return self._map(lambda name, t: t[:, rows] if name == "samples" else t[rows])

    def cpu(self) -> Prediction:
        """Return the prediction in main memory."""
        return self._map(lambda _, t: t.cpu())

    @classmethod
    def join(cls, parts: Sequence[Prediction]) -> Prediction:
        """Put predictions of successive batches together."""
        if not parts:
            raise ValueError("There is no prediction to join: the list is empty.")
        first = parts[0]
        if len(parts) == 1:
            return first
        joined = {
            name: torch.cat([getattr(part, name) for part in parts], dim=1 if name == "samples" else 0)
            for name, _ in first._fields()
        }
        return dataclasses.replace(first, **joined)

    def score(self, name: str = "epistemic") -> Tensor:
        """Return a score per example, higher = more suspicious."""
        if name not in self.scores:
            raise ValueError(f"There is no score {name!r} here; there are {list(self.scores)}.")
        return torch.as_tensor(getattr(self, name))

    @property
    def scores(self) -> tuple[str, ...]:
        """Return the names of the scores that this prediction has; each kind of prediction says its own."""
        raise NotImplementedError

    def _fields(self) -> list[tuple[str, Tensor]]:
        pairs = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return [(name, value) for name, value in pairs if isinstance(value, Tensor)]

    def _map(self, function: Any) -> Prediction:
        return dataclasses.replace(self, **{name: function(name, t) for name, t in self._fields()})


@dataclass(frozen=True, repr=False)
class ClassificationPrediction(Prediction):
    """A predictive distribution over classes, and why it is unsure.

    The class dimension is the last one; dense outputs keep theirs between it and the batch. All uncertainties
    are in nats.

    Attributes:
        log_probs: Logarithm of the predictive probabilities, ln (1/S) sum_s p_s, (B, ..., C).
        aleatoric: Mean entropy of the draws, (1/S) sum_s H[p_s], (B, ...): what the data leave open.
        epistemic: Mutual information H[pbar] - mean H[p_s], (B, ...): what the model leaves open.
        variation_ratio: 1 - the share of draws that vote for the most frequent class, (B, ...).
        model_variance: mean_s p_s.p_s - pbar.pbar, (B, ...).
        logits_mean: Mean of the logits, centred over classes, which softmax does not see, (B, ..., C).
        logits_variance: Their variance over draws, where the predictor has it.
        samples: The draws' probabilities (S, B, ..., C), if they were asked for.
        predictor: Which one-pass predictor made it, in words; None if draws did.
    """

    log_probs: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    variation_ratio: Tensor
    model_variance: Tensor
    logits_mean: Tensor | None = None
    logits_variance: Tensor | None = None
    samples: Tensor | None = None
    predictor: str | None = None

    def __post_init__(self) -> None:
        """Let votes for outputs that are NaN not look unanimous."""
        broken = self.log_probs.amax(-1).isnan()
        object.__setattr__(self, "variation_ratio", self.variation_ratio.where(~broken, torch.nan))

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
        """Entropy of the predictive probabilities, (B, ...): aleatoric + epistemic."""
        return entropy(self.log_probs)

    @property
    def max_probability(self) -> Tensor:
        """One minus the confidence, as a score, (B, ...)."""
        # The other classes' sum: 1 - p rounds all confident predictions to one and the same score.
        others = self.log_probs.scatter(-1, self.label[..., None], -torch.inf)
        return others.logsumexp(-1).exp()

    @property
    def scores(self) -> tuple[str, ...]:
        """Return the names of the scores."""
        return SCORES


@dataclass(frozen=True, repr=False)
class RegressionPrediction(Prediction):
    """A predictive mean and variance, and what the variance is made of.

    Attributes:
        mean: Predictive mean, (B, ...).
        aleatoric: Mean noise variance of the draws, (B, ...).
        epistemic: Variance of the draws' means, (B, ...).
        samples: The draws' means (S, B, ...), if they were asked for.
        predictor: Which one-pass predictor made it, in words; None if draws did.
    """

    mean: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    samples: Tensor | None = None
    predictor: str | None = None

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


@dataclass(frozen=True, repr=False)
class FeaturePrediction(Prediction):
    """What the draws compute before their last layer.

    Attributes:
        features: Mean over the draws, (B, ..., D).
        variance: Variance over the draws, (B, ..., D).
        samples: The draws' features (S, B, ..., D), if they were asked for.
    """

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
