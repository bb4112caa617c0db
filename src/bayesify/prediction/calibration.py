"""Calibration after any method: one number, fitted on validation data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bayesify._core.deprecation import renamed
from bayesify._core.inputs import as_loader
from bayesify._core.modes import evaluation_mode
from bayesify._core.trees import to_device
from bayesify.laws import Posterior, require_posterior, warn_unless_learned
from bayesify.likelihoods import Stream
from bayesify.likelihoods.prediction import Prediction
from bayesify.prediction import add_draws, posterior_device

__all__ = ["calibrate"]


@renamed(num_samples="num_draws")
def calibrate(
    posterior: Posterior,
    val_loader: Iterable[Any],
    *,
    num_draws: int | None = None,
    seed: int = 0,
) -> Posterior:
    """Fit the temperature, or for regression the variance's scale, on validation data.

    Classification: p = (1/S) sum_s softmax(logits_s / T) with the T of least NLL; regression: the predictive variance
    times the c of least NLL. On the data given, the result is never worse than before. It acts on predictions, not on
    the loss, and is saved with the posterior.

    Args:
        posterior: Any posterior; it is changed in place.
        val_loader: Batches of (inputs, targets) that were not trained on.
        num_draws: How many draws; None takes the posterior's own number.
        seed: Of the draws.

    Returns:
        The same posterior. `posterior.likelihood.temperature` (or `variance_scale`) holds the number.

    Memory is that of the draws' outputs on the validation data, S x N x C numbers.
    """
    require_posterior(posterior)
    warn_unless_learned(posterior)
    batches = []
    device = posterior_device(posterior)
    with torch.no_grad(), evaluation_mode(posterior):
        keys = posterior.keys(num_draws, seed)
        for batch in as_loader(val_loader, "calibrate"):
            inputs, target = posterior.split_batch(to_device(batch, device))
            kept = _Keep()
            add_draws(posterior, inputs, keys, kept)
            posterior.likelihood.check(kept.outputs[0][0], target)
            batches.append((torch.cat(kept.outputs), target))
    if not batches:
        raise ValueError("The validation loader gave no batch. Check its data set and sampler.")
    posterior.likelihood.calibrate(batches)
    return posterior


class _Keep(Stream):
    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def add(self, outputs: Tensor) -> None:
        self.outputs.append(outputs)

    def result(self) -> Prediction:
        raise TypeError("Kept outputs are not a prediction.")
