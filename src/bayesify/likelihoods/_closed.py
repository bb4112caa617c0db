"""Predictions from Gaussian outputs, at the cost of a formula or of draws of a few numbers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from bayesify._math import entropy
from bayesify.likelihoods._base import Likelihood
from bayesify.likelihoods._categorical import Categorical
from bayesify.prediction import ClassificationPrediction, Prediction

__all__ = ["from_centred_moments", "from_covariance"]

TOGETHER = 16  # draws


def from_centred_moments(likelihood: Categorical, logits: Tensor, variance: Tensor) -> ClassificationPrediction:
    """Return the probit approximation from the variances of centred logits.

    p = softmax(m_c / sqrt(1 + pi v_c / 8)), with m and v of the logits minus their mean over classes, which softmax
    does not see (MacKay 1992). The epistemic part is what that adds to the entropy at the mean. `model_variance` is of
    first order, with centred logits taken as independent.

    Args:
        likelihood: Gives the temperature.
        logits: Means (B, ..., C), classes last, centred or not.
        variance: Of the centred logits.
    """
    centred = (logits - logits.mean(-1, keepdim=True)) / likelihood.temperature
    variance = variance / likelihood.temperature**2
    log_probs = functional.log_softmax(centred / (1 + torch.pi / 8 * variance).sqrt(), dim=-1)
    total, aleatoric = entropy(log_probs), entropy(functional.log_softmax(centred, dim=-1))
    probs = log_probs.exp()
    shared = (probs**2 * variance).sum(-1, keepdim=True)
    spread = (probs**2 * (variance * (1 - 2 * probs) + shared)).sum(-1)
    return ClassificationPrediction(
        log_probs=log_probs,
        aleatoric=torch.minimum(aleatoric, total),
        epistemic=(total - aleatoric).clamp_min(0),
        variation_ratio=torch.zeros_like(total),
        model_variance=torch.minimum(spread, 1 - (probs**2).sum(-1)),
        logits_mean=centred,
        logits_variance=variance,
    )


def from_covariance(
    likelihood: Likelihood, mean: Tensor, covariance: Tensor, *, num_samples: int, seed: int
) -> Prediction:
    """Average draws m + R z of Gaussian outputs, R R' their covariance.

    The draws z are shared by all examples, so that a prediction does not depend on what it is made together with.

    Args:
        likelihood: What the outputs mean.
        mean: (B, ..., F), in the order in which the likelihood reads outputs, classes last.
        covariance: (B, ..., F, F).
        num_samples: How many draws.
        seed: Of the draws.
    """
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, but it is {num_samples}.")
    values, vectors = torch.linalg.eigh(covariance)  # a covariance may be singular
    root = vectors * values.clamp_min(0).sqrt()[..., None, :]
    generator = torch.Generator(device=mean.device).manual_seed(seed)
    stream = likelihood.stream()
    for start in range(0, num_samples, TOGETHER):
        count = min(TOGETHER, num_samples - start)
        noise = torch.empty(count, mean.shape[-1], dtype=mean.dtype, device=mean.device).normal_(generator=generator)
        stream.add(mean + (root @ noise.T).movedim(-1, 0))
    return stream.result()
