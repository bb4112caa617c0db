"""Measure a classifier before and after temperature scaling at the cost of one prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import bayesify
from bayesify import measure
from bayesify._core.trees import split_batch
from bayesify.evaluation.evaluation import right_or_wrong
from bayesify.likelihoods import Categorical
from bayesify.likelihoods.prediction import ClassificationPrediction

__all__ = ["calibrated", "measures", "quality", "scored"]


def scored(
    posterior: bayesify.Posterior,
    val: DataLoader,
    test: DataLoader | None,
    ood: Mapping[str, DataLoader] | None = None,
    *,
    num_draws: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Return measures on the validation and the test set, as it is and with the temperature of the validation set.

    Every set is predicted once: the draws' ln p differ from their logits by a constant, which tempering does not see.
    """

    def draws(loader: DataLoader) -> Tensor:
        prediction = bayesify.predict(posterior, loader, num_draws=num_draws, seed=seed, keep_samples=True)
        assert isinstance(prediction, ClassificationPrediction)
        assert prediction.samples is not None
        return prediction.samples.clamp_min(torch.finfo(torch.float32).tiny).log()

    def targets(loader: DataLoader) -> Tensor:
        return torch.cat([torch.as_tensor(split_batch(batch)[1]) for batch in loader])

    own = (draws(val), targets(val))
    other = None if test is None else (draws(test), targets(test))
    return calibrated(own, other, {name: draws(loader) for name, loader in (ood or {}).items()})


def calibrated(
    val: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor] | None, ood: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """Return measures of logits (S, N, C) with labels (N,), as they are and with the temperature of the first."""
    plain, tempered = Categorical(), Categorical()
    tempered.calibrate([val])
    row: dict[str, Any] = {"temperature": round(float(tempered.temperature), 4)}
    for likelihood, suffix in ((plain, ""), (tempered, ", calibrated")):
        row["validation" + suffix] = measures(likelihood, *val, {})
        if test is not None:
            row["test" + suffix] = measures(likelihood, *test, ood or {})
    return row


def measures(likelihood: Categorical, logits: Tensor, labels: Tensor, others: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the quality of the average over draws (S, N, C), and how well it tells other sets from this one."""
    own = _prediction(likelihood, logits)
    found = quality(own, labels)
    for name, other in others.items():
        ood = _prediction(likelihood, other)
        for score in ("total", "epistemic"):
            pair = own.score(score), ood.score(score)
            found[f"auroc-{score}/{name}"] = measure.auroc(*pair)
            found[f"aupr-{score}/{name}"] = measure.average_precision(*pair)
            found[f"fpr95-{score}/{name}"] = measure.fpr_at_tpr(*pair, tpr=0.95)
    return {name: round(float(value), 5) for name, value in found.items()}


def quality(prediction: ClassificationPrediction, labels: Tensor) -> dict[str, float]:
    """Return what a prediction is worth on labelled examples."""
    return {
        "accuracy": measure.accuracy(prediction.probs, labels),
        "nll": measure.nll(prediction.probs, labels),
        "brier": measure.brier(prediction.probs, labels),
        "ece": measure.ece(prediction.probs, labels),
        "aurc": measure.aurc(*right_or_wrong(prediction, labels)),
    }


def _prediction(likelihood: Categorical, logits: Tensor) -> ClassificationPrediction:
    stream = likelihood.stream()
    stream.add(logits)
    prediction = stream.result()
    assert isinstance(prediction, ClassificationPrediction)
    return prediction
