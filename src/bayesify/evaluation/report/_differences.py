"""The differences of a report's evaluations to the first of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from bayesify.evaluation.comparison import Column
from bayesify.evaluation.differences import check_paired, compare, excludes_zero, measured, written
from bayesify.evaluation.evaluation import Evaluation
from bayesify.evaluation.intervals import Interval
from bayesify.evaluation.report.content import Cell, Paragraph, Section, Table

__all__ = ["difference_section"]


def difference_section(evaluations: Sequence[Evaluation], level: float | None) -> list[Section]:
    """Return the differences to the first evaluation; nothing where there is no other one of the same examples."""
    first, *others = evaluations
    paired = [other for other in others if _paired(first, other)]
    if not paired or level is None:
        return []
    comparison = compare([first, *paired], level=level)
    found = measured(comparison.evaluations)
    rows = [
        (name, [_cell(column, known.get(column.name or "")) for column in found])
        for name, known in comparison.differences.items()
    ]
    text = f"Differences to {first.name} on the same examples, with paired {100 * level:g}% bootstrap intervals."
    unpaired = [other.name for other in others if other not in paired]
    if unpaired:
        text += f" Not of the same examples in the same order, and therefore not here: {', '.join(unpaired)}."
    other = "" if first.prediction.classes else ", ≠ different"
    legend = f"✓ better, ✗ worse{other}, and the interval excludes zero."
    titles = ["method", *(column.title for column in found)]
    section = Section(
        key="differences",
        title="Is the difference more than chance?",
        findings=[Paragraph(text)],
        tables=[Table("Paired differences", titles, rows, legend)],
        reading=f"Each value minus that of {first.name}, on resampled examples that are the same for both. What makes "
        "examples hard for all cancels, so that such a difference can be clear where the intervals of the two values "
        "overlap. Of twenty measures that do not differ, one is marked at a level of 95%.",
    )
    return [section]


def _cell(column: Column, difference: Interval | None) -> Cell:
    text, span = written(column, difference)
    mark: Literal["", "better", "worse", "other"] = ""
    if difference is not None and excludes_zero(difference):
        mark = "better" if (difference.value > 0) == (column.better == "higher") else "worse"
        mark = mark if column.better in ("higher", "lower") else "other"
    return Cell(text.rstrip("*"), span, mark)


def _paired(first: Evaluation, other: Evaluation) -> bool:
    try:
        check_paired(first, other)
    except ValueError:
        return False
    return True
