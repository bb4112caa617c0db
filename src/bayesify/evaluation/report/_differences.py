"""The differences of a report's evaluations to the first of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bayesify.evaluation.differences import check_paired, compare, excludes_zero, measured, written
from bayesify.evaluation.evaluation import Evaluation

__all__ = ["Cell", "Differences", "differences"]


@dataclass(frozen=True)
class Cell:
    """A difference and its interval as text, and how it is marked: "better", "worse", "other" or not at all."""

    text: str
    span: str
    mark: str


@dataclass(frozen=True)
class Differences:
    """A table of paired differences: headings, and rows of cells by name."""

    baseline: str
    titles: list[str]
    rows: dict[str, list[Cell]]
    unpaired: list[str]


def differences(evaluations: Sequence[Evaluation], level: float) -> Differences | None:
    """Return the differences to the first evaluation; None where there is no other one of the same examples."""
    first, *others = evaluations
    paired = [other for other in others if _paired(first, other)]
    if not paired:
        return None
    comparison = compare([first, *paired], level=level)
    found = measured(comparison.evaluations)
    rows: dict[str, list[Cell]] = {}
    for name, known in comparison.differences.items():
        rows[name] = []
        for column in found:
            difference = known.get(column.name or "")
            text, span = written(column, difference)
            mark = ""
            if difference is not None and excludes_zero(difference):
                mark = "better" if (difference.value > 0) == (column.better == "higher") else "worse"
                mark = mark if column.better in ("higher", "lower") else "other"
            rows[name].append(Cell(text.rstrip("*"), span, mark))
    unpaired = [other.name for other in others if other not in paired]
    return Differences(first.name, [column.title for column in found], rows, unpaired)


def _paired(first: Evaluation, other: Evaluation) -> bool:
    try:
        check_paired(first, other)
    except ValueError:
        return False
    return True
