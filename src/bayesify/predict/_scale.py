"""One number that multiplies the variances of a predictor without draws, fitted on validation data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from bayesify._math import minimise
from bayesify._modes import evaluation_mode
from bayesify._tree import split_batch, to_device
from bayesify.likelihoods import Likelihood
from bayesify.posteriors import Posterior, require_posterior
from bayesify.predict import ONE_PASS
from bayesify.predict._one_pass import one_pass_of
from bayesify.predict._outputs import OutputMoments, prediction_of
from bayesify.prediction import ClassificationPrediction, Prediction, RegressionPrediction

__all__ = ["fit_variance_scale", "prediction_nll"]

LOWEST, HIGHEST = math.log(1e-4), math.log(1e4)


def fit_variance_scale(
    posterior: Posterior,
    val_loader: Iterable[Any],
    *,
    how: str = "streamlined",
    num_samples: int | None = None,
    seed: int = 0,
) -> float:
    """Find the scale of the outputs' variances with the least negative log-likelihood.

    The network runs once over the data; a search in the logarithm of the scale follows, between 1e-4 and 1e4. The
    result is never worse on these data than a scale of 1.

    Args:
        posterior: Any posterior that `predict(how=...)` takes.
        val_loader: Batches of (inputs, targets) that were not trained on.
        how: The predictor.
        num_samples: As in `predict`.
        seed: As in `predict`.

    Returns:
        The scale, for `predict(..., variance_scale=scale)`.

    Example:
        >>> from torch import nn
        >>> from bayesify import MCDropout, convert
        >>> posterior = convert(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)), MCDropout())
        >>> loader = [(torch.randn(32, 4), torch.randint(3, (32,)))]
        >>> scale = fit_variance_scale(posterior, loader)
        >>> 0.99e-4 < scale < 1.01e4
        True
    """
    require_posterior(posterior)
    if how not in ONE_PASS:
        raise ValueError(f"how must be one of {list(ONE_PASS)}, but it is {how!r}; for draws there is calibrate.")
    found: list[tuple[list[OutputMoments], Tensor]] = []
    device = next((p.device for p in posterior.parameters()), torch.device("cpu"))
    with torch.inference_mode(False), torch.no_grad(), posterior.noise.lock, evaluation_mode(posterior):
        for batch in val_loader:
            inputs, targets = split_batch(to_device(batch, device))
            moments = one_pass_of(posterior, how, inputs).moments(inputs)
            posterior.likelihood.check(moments[0].mean, targets)
            found.append((moments, targets))
        if not found:
            raise ValueError("The validation loader gave no batch. Check its data set and sampler.")

        def loss(log_scale: float) -> float:
            return _nll(posterior.likelihood, found, math.exp(log_scale), num_samples, seed)

        best, value = minimise(loss, LOWEST, HIGHEST, start=0.0)
    if not math.isfinite(value):
        raise ValueError("The predictions or the targets are not finite, so there is no scale to fit.")
    return math.exp(best)


def _nll(
    likelihood: Likelihood,
    found: Sequence[tuple[list[OutputMoments], Tensor]],
    scale: float,
    num_samples: int | None,
    seed: int,
) -> float:
    total, count = 0.0, 0.0
    for moments, targets in found:
        scaled = [OutputMoments(one.mean, one.variance * scale, one.predictor) for one in moments]
        prediction = prediction_of(likelihood, scaled, num_samples=num_samples, seed=seed)
        part, number = prediction_nll(likelihood, prediction, targets)
        total, count = total + part, count + number
    return total / max(count, 1.0)


def prediction_nll(likelihood: Likelihood, prediction: Prediction, targets: Tensor) -> tuple[float, float]:
    """Return the sum of -ln p(target) over the positions that count, and their number."""
    if isinstance(prediction, ClassificationPrediction):
        weight = likelihood.weight(targets)
        labels = targets.long() if targets.dtype != torch.bool and not targets.is_floating_point() else targets > 0.5
        labels = labels.long().reshape(prediction.log_probs.shape[:-1])
        counted = torch.ones_like(labels, dtype=torch.bool) if weight is None else weight.reshape(labels.shape) > 0
        picked = prediction.log_probs.gather(-1, labels.where(counted, 0)[..., None])[..., 0]
        return float(-picked[counted].double().sum()), float(counted.sum())
    if not isinstance(prediction, RegressionPrediction):
        raise ValueError(f"There is no likelihood of a {type(prediction).__name__}.")
    variance = prediction.variance.double()
    residual = targets.double().reshape(variance.shape) - prediction.mean.double()
    each = 0.5 * (residual.square() / variance + variance.log() + math.log(2 * math.pi))
    return float(each.sum()), float(each.numel())
