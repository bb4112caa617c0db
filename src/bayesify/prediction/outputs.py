"""From means and variances of a network's outputs to predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bayesify._core.maths import entropy
from bayesify.likelihoods import Categorical, Likelihood
from bayesify.likelihoods.categorical import independent_variances
from bayesify.likelihoods.gaussian_draws import gaussian_draws
from bayesify.likelihoods.prediction import ClassificationPrediction, Prediction, RegressionPrediction

__all__ = ["OutputMoments", "class_position", "independent_variances", "prediction_of"]


@dataclass(frozen=True)
class OutputMoments:
    """Gaussian outputs of one component of a posterior.

    Attributes:
        mean: (B, ...), as the network returns them.
        variance: The same shape, where outputs count as independent; else None.
        predictor: Where they come from, in words.
        covariance: (B, ..., F, F) of the last dimension's outputs, where it is known; else None.
        weight: The component's share of the posterior.
    """

    mean: Tensor
    variance: Tensor | None
    predictor: str
    covariance: Tensor | None = None
    weight: float = 1.0

    def times(self, scale: float) -> OutputMoments:
        """Multiply variances and covariances by a number."""
        if scale == 1:
            return self
        variance = None if self.variance is None else self.variance * scale
        return replace(self, variance=variance, covariance=None if self.covariance is None else self.covariance * scale)


def prediction_of(
    likelihood: Likelihood, components: Sequence[OutputMoments], *, num_samples: int | None, seed: int
) -> Prediction:
    """Return the prediction of a mixture of Gaussian outputs.

    Args:
        likelihood: What the outputs mean.
        components: The components' moments.
        num_samples: As in `Likelihood.from_gaussian`, of each component, or in proportion to unequal weights.
        seed: Of the draws.
    """
    total = sum(one.weight for one in components)
    weights = [one.weight / total for one in components]
    if num_samples is None:
        made = _mixture(
            [likelihood.from_gaussian(one.mean, one.variance, covariance=one.covariance) for one in components], weights
        )
    else:
        stream = likelihood.stream()
        for one, weight in zip(components, weights, strict=True):
            number = max(1, round(num_samples * len(components) * weight)) if num_samples > 0 else num_samples
            for draws in gaussian_draws(one.mean, one.variance, one.covariance, num_samples=number, seed=seed):
                stream.add(draws)
        made = stream.result()
    return replace(made, predictor=components[0].predictor)  # type: ignore[call-arg]


def _mixture(parts: Sequence[Prediction], weights: Sequence[float]) -> Prediction:
    if len(parts) == 1:
        return parts[0]

    def average(values: Tensor) -> Tensor:
        found: Tensor = torch.tensordot(values.new_tensor(weights), values, 1)
        return found

    def spread(values: Tensor) -> Tensor:
        return average((values - average(values)).square())

    if all(isinstance(part, RegressionPrediction) for part in parts):
        means, aleatoric, own = (_stacked(parts, name) for name in ("mean", "aleatoric", "epistemic"))
        return RegressionPrediction(average(means), average(aleatoric), epistemic=average(own) + spread(means))
    if not all(isinstance(part, ClassificationPrediction) for part in parts):
        raise TypeError(f"There is no mixture of {[type(part).__name__ for part in parts]}.")
    each, means = _stacked(parts, "log_probs"), _stacked(parts, "logits_mean")
    shares = each.new_tensor(weights).log().view(-1, *(1,) * (each.ndim - 1))
    log_probs, probs = (each + shares).logsumexp(0), each.exp()
    total, aleatoric = entropy(log_probs), average(_stacked(parts, "aleatoric"))
    epistemic = (total - aleatoric).clamp_min(0)
    return ClassificationPrediction(
        log_probs=log_probs,
        aleatoric=total - epistemic,
        epistemic=epistemic,
        variation_ratio=(1 - average(_votes(probs, _stacked(parts, "variation_ratio"))).amax(-1)).clamp_min(0),
        model_variance=average(_stacked(parts, "model_variance")) + spread(probs).sum(-1),
        logits_mean=average(means),
        logits_variance=average(_stacked(parts, "logits_variance")) + spread(means),
    )


def _votes(probs: Tensor, ratio: Tensor) -> Tensor:
    """Return how draws vote: all but the ratio for the most probable class, the others as the probabilities are."""
    best = torch.zeros_like(probs).scatter(-1, probs.argmax(-1, keepdim=True), 1.0)
    others = probs * (1 - best)
    others = others / others.sum(-1, keepdim=True).clamp_min(torch.finfo(probs.dtype).tiny)
    return best * (1 - ratio[..., None]) + others * ratio[..., None]


def _stacked(parts: Sequence[Any], name: str) -> Tensor:
    return torch.stack([getattr(part, name) for part in parts])


def class_position(likelihood: Likelihood, outputs: Tensor) -> int | None:
    """Return the dimension of the classes, or None for outputs that are no classes."""
    return likelihood.position(outputs.ndim) if isinstance(likelihood, Categorical) else None
