"""The prior precision of least validation NLL."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from bayesify._core.maths import minimise
from bayesify._core.modes import evaluation_mode
from bayesify._core.trees import to_device
from bayesify.laws.laplace.evidence import LEAST, MOST
from bayesify.laws.laplace.laplace import LaplacePosterior
from bayesify.laws.laplace.last_layer import LastLayerLaplacePosterior
from bayesify.likelihoods.prediction import ClassificationPrediction, RegressionPrediction

__all__ = ["choose_on_validation", "prior_without_effect"]

NEGLIGIBLE = 0.01  # the largest share of a variance that the data take away where they say nothing


@torch.no_grad()
def choose_on_validation(
    posterior: LaplacePosterior, val_loader: Iterable[Any], *, num_samples: int | None = None, seed: int = 0
) -> None:
    """Set the prior precisions to those of least validation NLL, one after another; never worse than the present.

    Each is a search in log scale. A last layer is predicted in closed form, from features that are computed once; other
    posteriors by draws, the same for all candidates.

    Args:
        posterior: With a curvature; it is changed in place.
        val_loader: Batches of (inputs, targets) that were not trained on.
        num_samples: How many draws; None takes the posterior's own number.
        seed: Of the draws.
    """
    posterior.require_complete()
    exact = isinstance(posterior, LastLayerLaplacePosterior)
    with evaluation_mode(posterior):
        loss = (
            _closed_form_nll(posterior, val_loader) if exact else _sampled_nll(posterior, val_loader, num_samples, seed)
        )
        _search(posterior, loss, exact)


def prior_without_effect(posterior: LaplacePosterior) -> str | None:
    """Return a sentence where a prior precision that was chosen has left the range in which the data matter.

    That is where no variance differs from the prior's by more than a hundredth, delta > 100 times the largest
    eigenvalue of the curvature; or where the search ended at an end of its interval. With a precision for each layer it
    must be so in all of them: single layers may well be left to the prior.
    """
    chosen = posterior.prior_precision.double()
    largest = torch.tensor([float(s.values.max()) * posterior.scale for s in posterior.spectra()]).to(chosen)
    least, most = math.exp(LEAST), math.exp(MOST)
    width = (
        f"its weights have the prior's standard deviation, {float(chosen[0]) ** -0.5:.2g}. Set one that you believe "
        "in, posterior.set_prior_precision(...), or give fit more validation data."
    )
    if bool((chosen < least * 1.01).all() | (chosen > most / 1.01).all()):
        return (
            f"The search for the prior precision ended at an end of its interval, {float(chosen[0]):.3g} (of "
            f"{least:.3g} to {most:.3g}), so that there is no best one: where the data say nothing {width}"
        )
    if bool((chosen * NEGLIGIBLE > largest).all()):
        return (
            f"The prior precision was chosen as {float(chosen[0]):.3g}, and the largest eigenvalue of the curvature is "
            f"{float(largest[0]):.3g}: the data say nothing of how wide the posterior is, and {width}"
        )
    return None


def _search(posterior: LaplacePosterior, loss: Callable[[], float], exact: bool) -> None:
    precisions = posterior.prior_precision.tolist()
    for index in range(len(precisions)):

        def of(log_precision: float, index: int = index) -> float:
            tried = [*precisions]
            tried[index] = math.exp(log_precision)
            posterior.set_prior_precision(tried)
            return loss()

        options = {"points": 25, "tolerance": 1e-3} if exact else {"points": 13, "tolerance": 0.5}
        start = math.log(precisions[index])
        best, _ = minimise(of, LEAST, MOST, start=start, **options)  # type: ignore[arg-type]
        if best != start:
            precisions[index] = math.exp(best)
        posterior.set_prior_precision(precisions)


def _closed_form_nll(posterior: LaplacePosterior, loader: Iterable[Any]) -> Callable[[], float]:
    assert isinstance(posterior, LastLayerLaplacePosterior)
    device = posterior.prior_precision.device
    kept = []
    for batch in loader:
        inputs, targets = posterior.split_batch(to_device(batch, device))
        output, features = posterior.features(inputs)
        posterior.likelihood.check(output, targets)
        kept.append((output, features, targets))
    _require(kept)

    def nll() -> float:
        return _mean([_log_prob(posterior, posterior.predictive(o, f), t) for o, f, t in kept], posterior, kept)

    return nll


def _sampled_nll(
    posterior: LaplacePosterior, loader: Iterable[Any], num_samples: int | None, seed: int
) -> Callable[[], float]:
    device = posterior.prior_precision.device
    batches = [posterior.split_batch(to_device(batch, device)) for batch in loader]
    _require(batches)
    keys = posterior.keys(num_samples, seed)

    def nll() -> float:
        found = []
        for inputs, targets in batches:
            draws = [posterior.likelihood.log_prob(posterior.evaluate(inputs, [key])[0], targets) for key in keys]
            found.append(torch.stack(draws).logsumexp(0) - math.log(len(keys)))
        return _mean(found, posterior, batches)

    return nll


def _mean(log_probs: list[Tensor], posterior: LaplacePosterior, batches: list[Any]) -> float:
    """Return the mean NLL of what counts; infinite where it is not a number, so that it is never chosen."""
    weights = [posterior.likelihood.weight(batch[-1]) for batch in batches]
    total = sum(float((p if w is None else p * w).double().sum()) for p, w in zip(log_probs, weights, strict=True))
    count = sum(p.numel() if w is None else float(w.sum()) for p, w in zip(log_probs, weights, strict=True))
    value = -total / max(count, 1)
    return math.inf if math.isnan(value) else value


def _log_prob(posterior: LaplacePosterior, prediction: Any, targets: Tensor) -> Tensor:
    """Return ln p(target) of a prediction, zero where a position does not count."""
    if isinstance(prediction, RegressionPrediction):
        variance = prediction.variance
        residual = targets.reshape(prediction.mean.shape) - prediction.mean
        return -0.5 * (residual.square() / variance + variance.log() + math.log(2 * math.pi))
    assert isinstance(prediction, ClassificationPrediction)
    labels = posterior.likelihood.labels(targets)
    assert labels is not None
    labels = labels.reshape(prediction.log_probs.shape[:-1])
    counted = labels != -100
    picked = prediction.log_probs.gather(-1, labels.where(counted, 0)[..., None])[..., 0]
    return picked.where(counted, 0).reshape(targets.shape)


def _require(batches: list[Any]) -> None:
    if not batches:
        raise ValueError("The validation loader gave no batch. Check its data set and sampler.")
