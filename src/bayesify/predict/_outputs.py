"""From means and variances of a network's outputs to predictions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesify._math import entropy
from bayesify.likelihoods import Categorical, Likelihood
from bayesify.prediction import ClassificationPrediction, Prediction, RegressionPrediction

__all__ = ["OutputMoments", "independent_variances", "prediction_of"]

DRAWS_AT_ONCE = 2**22  # numbers


@dataclass(frozen=True)
class OutputMoments:
    """Outputs of one component of a posterior, as independent Gaussians.

    Attributes:
        mean: (B, ...), as the network returns them.
        variance: The same shape.
        predictor: Where they come from, in words.
    """

    mean: Tensor
    variance: Tensor
    predictor: str


def independent_variances(centred: Tensor) -> Tensor:
    """Return variances of independent logits whose centred logits have the given variances, (..., C).

    Logits with variances v, after their mean over classes is taken off, have u_c = v_c (1 - 2/C) + sum v / C^2. This is
    solved for v. Where no v >= 0 does it, the sum of u is kept.

    >>> independent_variances(torch.tensor([1.0, 1.0]))
    tensor([2., 2.])
    """
    classes = centred.shape[-1]
    total = centred.sum(-1, keepdim=True) / (1 - 1 / classes)
    if classes == 2:
        return (total / 2).expand_as(centred).clone()
    found = ((centred - total / classes**2) / (1 - 2 / classes)).clamp_min(0)
    kept = found.sum(-1, keepdim=True)
    return torch.where(kept > 0, found * (total / kept.clamp_min(torch.finfo(kept.dtype).tiny)), found)


def prediction_of(
    likelihood: Likelihood, components: Sequence[OutputMoments], *, num_samples: int | None, seed: int
) -> Prediction:
    """Return the prediction of a mixture of Gaussian outputs with equal weights.

    Args:
        likelihood: What the outputs mean.
        components: The components' moments.
        num_samples: None for closed forms: for classes the probit approximation on centred logits. Else how many draws
            of the outputs, which are the same standard normals, in pairs of opposite sign, for every example.
        seed: Of the draws.
    """
    if num_samples is not None:
        made = _sampled(likelihood, components, num_samples, seed)
    else:
        made = _mixture([likelihood.from_moments(one.mean, one.variance) for one in components])
    return dataclasses.replace(made, predictor=components[0].predictor)  # type: ignore[call-arg]


def _sampled(likelihood: Likelihood, components: Sequence[OutputMoments], number: int, seed: int) -> Prediction:
    stream = likelihood.stream()
    event = components[0].mean.shape[1:]
    generator = torch.Generator().manual_seed(seed)
    half = torch.randn((number + 1) // 2, *event, generator=generator, dtype=torch.float64)
    normals = torch.stack([half, -half], 1).flatten(0, 1)[:number]
    at_once = max(1, DRAWS_AT_ONCE // max(1, components[0].mean.numel()))
    for one in components:
        mean, std = one.mean, one.variance.clamp_min(0).sqrt()
        for part in torch.split(normals.to(mean), at_once):
            stream.add(mean + std * part[:, None])
    return stream.result()


def _mixture(parts: Sequence[Prediction]) -> Prediction:
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, RegressionPrediction) for part in parts):
        mean = _stacked(parts, "mean").mean(0)
        spread = _stacked(parts, "epistemic").mean(0) + _stacked(parts, "mean").var(0, correction=0)
        return RegressionPrediction(mean=mean, aleatoric=_stacked(parts, "aleatoric").mean(0), epistemic=spread)
    if not all(isinstance(part, ClassificationPrediction) for part in parts):
        raise TypeError(f"There is no mixture of {[type(part).__name__ for part in parts]}.")
    log_probs = _stacked(parts, "log_probs").logsumexp(0) - math.log(len(parts))
    aleatoric = _stacked(parts, "aleatoric").mean(0)
    probs = _stacked(parts, "log_probs").exp()
    within, between = _stacked(parts, "model_variance").mean(0), probs.var(0, correction=0).sum(-1)
    winners = probs.argmax(-1)
    votes = torch.stack([(winners == one).sum(0) for one in winners]).amax(0)
    means = _stacked(parts, "logits_mean")
    return ClassificationPrediction(
        log_probs=log_probs,
        aleatoric=aleatoric,
        epistemic=(entropy(log_probs) - aleatoric).clamp_min(0),
        variation_ratio=1 - votes.to(log_probs.dtype) / len(parts),
        model_variance=within + between,
        logits_mean=means.mean(0),
        logits_variance=_stacked(parts, "logits_variance").mean(0) + means.var(0, correction=0),
    )


def _stacked(parts: Sequence[Any], name: str) -> Tensor:
    return torch.stack([getattr(part, name) for part in parts])


def class_position(likelihood: Likelihood, outputs: Tensor) -> int | None:
    """Return the dimension of the classes, or None for outputs that are no classes."""
    return likelihood.position(outputs.ndim) if isinstance(likelihood, Categorical) else None
