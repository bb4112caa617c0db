"""The bootstrap of an evaluation: every measure on many resampled test sets and OOD sets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from bayesify._core.maths import as_double, gaussian_crps
from bayesify._core.random import Key, generator_for
from bayesify.evaluation import weighted
from bayesify.evaluation.comparison import LEVEL
from bayesify.likelihoods.prediction import ClassificationPrediction, Prediction, RegressionPrediction

__all__ = ["MAX_RISK", "Replicates", "draw_weights", "resample"]

MAX_RISK = 0.01  # of `coverage-at-1-risk`
NUMBERS = 2**18  # in a part of the weights: 2 MB, and several times that for what is computed from it
TEST = "test"
Weights: TypeAlias = Mapping[str, Tensor]
Statistic: TypeAlias = Callable[[Weights], Tensor]


@dataclass(frozen=True, eq=False)
class Replicates:
    """What each measure is on each resampled set.

    Attributes:
        values: By measure, (R,).
        floors: By measure, (R,): numbers whose low quantiles are lower ends, for measures that resampling makes larger.
    """

    values: dict[str, Tensor]
    floors: dict[str, Tensor]


def resample(
    prediction: Prediction,
    targets: Tensor,
    ood: Mapping[str, Prediction],
    *,
    names: Collection[str],
    score: str,
    num_replicates: int,
    seed: int,
) -> Replicates:
    """Measure predictions on test sets and OOD sets whose examples are drawn from the given ones with replacement.

    The examples of a set depend on the seed, the name of the set and its size alone, so that two evaluations with one
    seed see the same: their differences are paired. Nothing is copied: a resampled set is how often each example is in
    it, and measures take these numbers as weights, for many sets at once.

    Args:
        prediction: On the test set (N, ...).
        targets: (N, ...).
        ood: Predictions on OOD sets, by name.
        names: Which measures; one that there is not is left out.
        score: The uncertainty that finds OOD inputs.
        num_replicates: How many resampled sets, R.
        seed: Of the resampled sets.

    Returns:
        The measures.

    Costs R operations per example for means and the ECE, and R per position for what ranks positions; memory for a few
    parts of the weights, of a quarter of a million numbers each, or of one number per position where that is more.

    Example:
        >>> one = torch.ones(4)
        >>> given = RegressionPrediction(0 * one, one, 0 * one)
        >>> options = {"names": ["rmse"], "score": "total", "num_replicates": 2, "seed": 0}
        >>> found = resample(given, torch.arange(4.0), {}, **options)
        >>> found.values["rmse"]
        tensor([1.7321, 1.5000], dtype=torch.float64)
    """
    statistics, floors = _of_test(prediction, targets)
    statistics |= _of_ood(prediction, ood, score)
    sets = {TEST: prediction, **{f"ood/{name}": other for name, other in ood.items()}}
    sizes = {name: len(found) for name, found in sets.items()}
    positions = max(found.score(score).numel() for found in sets.values())
    parts = [
        [{name: group[name](weights) for name in group if name in names} for group in (statistics, floors)]
        for weights in draw_weights(sizes, num_replicates, seed, positions)
    ]
    return Replicates(
        *({name: torch.cat([part[name] for part in group]) for name in group[0]} for group in zip(*parts, strict=True))
    )


def draw_weights(
    sizes: Mapping[str, int], num_replicates: int, seed: int, positions: int
) -> Iterator[dict[str, Tensor]]:
    """Draw how often each example is in each resampled set: (R', N) for each set, in parts that add up to R.

    Args:
        sizes: Number of examples of each set, by name.
        num_replicates: How many resampled sets, R.
        seed: Of the sets.
        positions: How many numbers a measure needs at once for one resampled set; it decides how large parts are, and
            nothing else.

    Yields:
        Parts: weights by the name of the set, whose rows add up to the size of the set.

    Example:
        >>> [part["a"].tolist() for part in draw_weights({"a": 3}, 2, seed=0, positions=3)]
        [[[0.0, 2.0, 1.0], [0.0, 3.0, 0.0]]]
    """
    for name, size in sizes.items():
        if size < 2:
            raise ValueError(f"The set {name!r} has {size} example; an interval needs at least two to resample.")
    generators = {name: generator_for(Key(seed), f"bootstrap/{name}") for name in sizes}
    step = max(1, NUMBERS // positions)
    for start in range(0, num_replicates, step):
        rows = min(step, num_replicates - start)
        yield {name: _counts(size, rows, generators[name]) for name, size in sizes.items()}


def _counts(size: int, rows: int, generator: torch.Generator) -> Tensor:
    drawn = torch.randint(size, (rows, size), generator=generator)
    places = drawn + size * torch.arange(rows)[:, None]
    return torch.bincount(places.flatten(), minlength=rows * size).reshape(rows, size).double()


def _of_test(prediction: Prediction, targets: Tensor) -> tuple[dict[str, Statistic], dict[str, Statistic]]:
    """Return the measures of an evaluation on its test set, and the floors of those that have one."""
    floors: dict[str, weighted.Weighted] = {}
    if isinstance(prediction, ClassificationPrediction):
        measures, floors = _of_classes(prediction, targets)
    elif isinstance(prediction, RegressionPrediction):
        measures = _of_numbers(prediction, targets)
    else:
        raise TypeError(f"There are no measures of a {type(prediction).__name__} to resample.")
    found, lower = ({name: _on_test(measure) for name, measure in group.items()} for group in (measures, floors))
    return found, lower


def _on_test(measure: weighted.Weighted) -> Statistic:
    return lambda weights: measure(weights[TEST])


def _of_classes(
    prediction: ClassificationPrediction, targets: Tensor
) -> tuple[dict[str, weighted.Weighted], dict[str, weighted.Weighted]]:
    counted = prediction.counted(targets)
    probs = as_double(prediction.probs)
    confidence, label = probs.max(-1)
    right = label == targets
    wanted = torch.nn.functional.one_hot(targets.long().where(counted, 0), probs.shape[-1])
    binned = confidence, right, counted
    ranked = prediction.msp, prediction.correct(targets), counted
    measures = {
        "accuracy": weighted.mean(right, counted),
        "nll": weighted.mean(-prediction.log_prob(targets), counted),
        "brier": weighted.mean((probs - wanted).square().sum(-1), counted),
        "ece": weighted.ece(*binned),
        "aurc": weighted.aurc(*ranked),
        "coverage-at-1-risk": weighted.coverage_at_risk(*ranked, max_risk=MAX_RISK),
    }
    return measures, {"ece": weighted.ece_floor(*binned)}


def _of_numbers(prediction: RegressionPrediction, targets: Tensor) -> dict[str, weighted.Weighted]:
    targets, mean, variance = as_double(targets), as_double(prediction.mean), as_double(prediction.variance)
    squares = weighted.mean((mean - targets).square())
    measures: dict[str, weighted.Weighted] = {"rmse": lambda weights: squares(weights).sqrt()}
    if prediction.discrete or bool((variance > 0).all()):
        low, high = map(as_double, prediction.interval(LEVEL))
        measures["nll"] = weighted.mean(-prediction.log_prob(targets))
        measures["crps"] = weighted.mean(gaussian_crps(targets, mean, variance))
        measures["coverage"] = weighted.mean((low <= targets) & (targets <= high))
        measures["width"] = weighted.mean(high - low)
    return measures


def _of_ood(prediction: Prediction, ood: Mapping[str, Prediction], score: str) -> dict[str, Statistic]:
    """Return the measures of detection."""
    measures: dict[str, Statistic] = {}
    for key, other in ood.items():
        scores = prediction.score(score), other.score(score)
        epistemic = prediction.score("epistemic"), other.score("epistemic")
        measures[f"auroc/{key}"] = _on_both(key, weighted.auroc(*scores))
        measures[f"fpr-at-95-ood-recall/{key}"] = _on_both(key, weighted.fpr_at_tpr(*scores, tpr=0.95))
        measures[f"auroc-epistemic/{key}"] = _on_both(key, weighted.auroc(*epistemic))
    return measures


def _on_both(key: str, measure: weighted.Detecting) -> Statistic:
    return lambda weights: measure(weights[TEST], weights[f"ood/{key}"])
