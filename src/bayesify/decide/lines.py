"""Verdicts of rows as plain values, a mapping for each row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from bayesify.data.encoding import Batch
from bayesify.data.labels import Labels
from bayesify.decide.verdicts import Verdicts
from bayesify.likelihoods.prediction import RegressionPrediction

__all__ = ["UNREADABLE", "in_units", "lines_of", "named"]

UNREADABLE = "unreadable"


def lines_of(batch: Batch, verdicts: Verdicts | None, labels: Labels | None = None) -> Iterator[dict[str, Any]]:
    """Give one mapping for each row of a stretch in the order of the file.

    The verdict of a row that cannot be read is "unreadable", and `error` says why; what is odd about a row that can be
    is its `remark`.

    Args:
        batch: The rows.
        verdicts: Of those that could be read.
        labels: Gives numbers their units; classes have the guard's names.
    """
    lines: dict[int, dict[str, Any]] = {
        one.row: {"row": one.row, "verdict": UNREADABLE, "error": one.text} for one in batch.errors
    }
    if verdicts is not None:
        if labels is not None and labels.classes is None:
            verdicts = in_units(verdicts, labels.mean, labels.std)
        for row, found in zip(batch.rows, named(verdicts), strict=True):
            lines[row] = {"row": row, **found}
    for remark in batch.remarks:
        before = lines[remark.row].get("remark")
        lines[remark.row]["remark"] = remark.text if before is None else f"{before}; {remark.text}"
    for row in sorted(lines):
        yield lines[row]


def in_units(verdicts: Verdicts, mean: float, std: float) -> Verdicts:
    """Return the verdicts of standardised numbers in the numbers' own units: y = mean + std z.

    Args:
        verdicts: Of numbers z.
        mean: What was taken from each number.
        std: By what it was divided.
    """
    found = verdicts.prediction
    assert isinstance(found, RegressionPrediction)
    assert verdicts.low is not None
    assert verdicts.high is not None
    variance = std**2
    prediction = replace(
        found, mean=found.mean * std + mean, aleatoric=found.aleatoric * variance, epistemic=found.epistemic * variance
    )
    # A score of its own name is a variance; several that are combined have no unit.
    factor = variance if verdicts.rules.score in found.scores else 1.0
    return replace(
        verdicts,
        prediction=prediction,
        score=verdicts.score * factor,
        uncertainty=verdicts.uncertainty * variance,
        low=verdicts.low * std + mean,
        high=verdicts.high * std + mean,
        rules=verdicts.rules.scaled(std),
    )


def named(verdicts: Verdicts) -> Iterator[Mapping[str, Any]]:
    """Give plain values, with the classes by the guard's names."""
    names, plain = verdicts.rules.classes, [str(i) for i in range(len(verdicts.rules.classes))]
    for found in verdicts.to_records():
        if verdicts.in_set is not None and list(names) != plain:
            found["label"] = names[found["label"]]
            found["prediction_set"] = [names[index] for index in found["prediction_set"]]
        yield found
