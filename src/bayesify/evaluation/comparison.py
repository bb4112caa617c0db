"""Evaluations side by side: which columns a comparison has, what is best in each, and the table as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from bayesify.evaluation.evaluation import Evaluation

__all__ = ["FIT_UNITS", "LEVEL", "Column", "aligned", "check_comparable", "columns", "direction", "ood_names", "table"]

LEVEL = 0.95  # of the intervals that `coverage` and `width` are about
FIT_UNITS = {"epoch": "one epoch of plain training", "training": "the plain network's whole training"}


@dataclass(frozen=True)
class Column:
    """One column of a comparison.

    Attributes:
        title: Its heading.
        values: One for each evaluation; None where it was not measured.
        better: "higher", "lower", a number to be near to, or None where neither end is good in itself.
        pattern: How a value is written.
        name: Of the measure in `Evaluation.metrics`; None where it is none of these.
    """

    title: str
    values: tuple[float | None, ...]
    better: Literal["higher", "lower"] | float | None
    pattern: str = "{:.3f}"
    name: str | None = None

    @property
    def texts(self) -> list[str]:
        """Return the values as they are written."""
        return ["-" if value is None else self.pattern.format(value) for value in self.values]

    @property
    def best(self) -> list[bool]:
        """Return which values are the best as they are written; none where all are alike.

        >>> Column("NLL", (0.1, 0.1000001, 0.2, None), "lower").best
        [True, True, False, False]
        """
        known = [value for value in self.values if value is not None]
        texts = self.texts
        if self.better is None or len({text for text, v in zip(texts, self.values, strict=True) if v is not None}) < 2:
            return [False] * len(self.values)
        if self.better == "higher":
            best = max(known)
        elif self.better == "lower":
            best = min(known)
        else:
            best = min(known, key=lambda value: abs(value - float(self.better or 0)))
        return [text == self.pattern.format(best) for text in texts]

    def ranges(self, evaluations: Sequence[Evaluation], level: float) -> list[str]:
        """Return the intervals of the values as they are written, empty where there is none."""
        if self.name is None:
            return [""] * len(self.values)
        known = [None if self.name not in e.metrics else e.interval(self.name, level) for e in evaluations]
        return ["" if one is None else self.span(one.low, one.high) for one in known]

    def span(self, low: float, high: float, pattern: str | None = None) -> str:
        """Return an interval as it is written.

        >>> Column("NLL", (), "lower").span(0.1, 0.25)
        '[0.100, 0.250]'
        """
        pattern = pattern or self.pattern
        return f"[{pattern.format(low)}, {pattern.format(high)}]"


def check_comparable(evaluations: Sequence[Evaluation]) -> None:
    """Raise where evaluations cannot stand in one table."""
    if not evaluations:
        raise ValueError("There is nothing to compare: the list of evaluations is empty.")
    names = [evaluation.name for evaluation in evaluations]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"Several evaluations are called {twice}. Give each its own: evaluate(..., name='...').")
    kinds = [(evaluation.prediction.classes is None, evaluation.prediction.discrete) for evaluation in evaluations]
    if len({numbers for numbers, _ in kinds}) > 1:
        raise ValueError("Classification and regression cannot stand in one comparison. Make one for each.")
    if len(set(kinds)) > 1:
        raise ValueError(
            "Counts have probabilities and other numbers have densities, so that their NLL cannot be compared. Make a "
            "comparison for each."
        )
    if len({evaluation.cost.fit_unit for evaluation in evaluations if evaluation.cost.fit is not None}) > 1:
        raise ValueError("The costs of fitting have different units. Give all of them one fit_unit.")


def columns(evaluations: Sequence[Evaluation], *, selective: bool = False) -> list[Column]:
    """Return the columns of a comparison: quality, detection by each OOD set, cost.

    Args:
        evaluations: The rows.
        selective: Whether there are columns of what is gained by leaving inputs to a person, too.
    """
    check_comparable(evaluations)
    regression = not evaluations[0].prediction.classes
    if regression:
        plan: list[tuple[str, str, Any]] = [
            ("rmse", "RMSE", "lower"),
            ("nll", "NLL", "lower"),
            ("crps", "CRPS", "lower"),
            ("coverage", "coverage", LEVEL),
            ("width", "width", None),
        ]
    else:
        plan = [
            ("accuracy", "accuracy", "higher"),
            ("nll", "NLL", "lower"),
            ("brier", "Brier", "lower"),
            ("ece", "ECE", "lower"),
        ]
        if selective:
            plan += [("aurc", "AURC", "lower"), ("coverage-at-1-risk", "coverage at 1% risk", "higher")]
    plan += [(f"auroc/{name}", f"AUROC {name}", "higher") for name in ood_names(evaluations)]
    found = [
        Column(
            title,
            tuple(evaluation.metrics.get(key) for evaluation in evaluations),
            better,
            "{:.4g}" if regression and not key.startswith("auroc") else "{:.4f}" if key == "aurc" else "{:.3f}",
            key,
        )
        for key, title, better in plan
    ]
    found.append(Column("fit", tuple(evaluation.cost.fit for evaluation in evaluations), "lower", "{:.1f}×"))
    found.append(Column("predict", tuple(evaluation.cost.predict for evaluation in evaluations), "lower", "{:.1f}×"))
    return [column for column in found if any(value is not None for value in column.values)]


def ood_names(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return the names of all OOD sets, in the order of their first use."""
    return list(dict.fromkeys(name for evaluation in evaluations for name in evaluation.ood))


def table(evaluations: Sequence[Evaluation], *, intervals: float | None = None) -> str:
    """Return evaluations side by side as text, with `*` at the best of each column.

    Args:
        evaluations: The rows.
        intervals: The level of bootstrap intervals to show below the values, such as 0.95; None shows none. Rows that
            saw the same examples differ more clearly than their intervals look: see `bayesify.compare`.

    Example:
        >>> import torch
        >>> from bayesify import convert
        >>> from bayesify.evaluation.evaluation import evaluate
        >>> posterior = convert(torch.nn.Identity(), "map")
        >>> unsure = evaluate(posterior, [(torch.eye(3), torch.arange(3))], name="unsure")
        >>> sure = evaluate(posterior, [(9 * torch.eye(3), torch.arange(3))], name="sure")
        >>> print(table([unsure, sure]))
                accuracy  NLL     Brier   ECE
        unsure  1.000     0.551   0.270   0.424
        sure    1.000     0.000*  0.000*  0.000*
        * best of its column. Accuracy: higher is better; NLL, Brier, ECE: lower.
    """
    found = columns(evaluations)
    lines = [["", *(column.title for column in found)]]
    for row, evaluation in enumerate(evaluations):
        lines.append([evaluation.name, *(column.texts[row] + "*" * column.best[row] for column in found)])
        if intervals is not None:
            evaluation.replicates(names=[column.name for column in found if column.name in evaluation.metrics])
            lines.append(["", *(column.ranges([evaluation], intervals)[0] for column in found)])
    notes = _legend(evaluations, found)
    if intervals is not None:
        size = len(evaluations[0].prediction)
        notes.append(f"[low, high]: {100 * intervals:g}% bootstrap intervals over {size:,} examples.")
    return "\n".join([aligned(lines), *notes])


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as text with columns of one width.

    >>> print(aligned([["", "NLL"], ["map", "0.1"]]))
         NLL
    map  0.1
    """
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def direction(found: Sequence[Column]) -> str:
    """Say in which columns higher is better, and in which lower."""
    up = [column.title for column in found if column.better == "higher"]
    down = [column.title for column in found if column.better == "lower"]
    near = [f"{column.title}: near {column.better}" for column in found if isinstance(column.better, float)]
    parts = [f"{', '.join(up)}: higher is better"] * bool(up) + [
        f"{', '.join(down)}: lower{'' if up else ' is better'}"
    ]
    sentence = "; ".join([*parts, *near])
    return f"{sentence[0].upper()}{sentence[1:]}."


def _legend(evaluations: Sequence[Evaluation], found: Sequence[Column]) -> list[str]:
    lines = [f"* best of its column. {direction(found)}"]
    titles = {column.title for column in found}
    if "fit" in titles:
        unit = next(evaluation.cost.fit_unit for evaluation in evaluations if evaluation.cost.fit is not None)
        lines.append(f"fit: in multiples of {FIT_UNITS[unit]}.")
    if "predict" in titles:
        lines.append("predict: in multiples of one plain pass.")
    return lines
