"""Which of several evaluations is better, and whether that is more than chance: paired differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bayesify.evaluation.comparison import Column, aligned, check_comparable, columns, direction
from bayesify.evaluation.evaluation import NUM_REPLICATES, Evaluation
from bayesify.evaluation.intervals import Interval, check_level, interval

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """The differences of evaluations to one of them, the baseline, on the same examples.

    Attributes:
        evaluations: All of them, the baseline included.
        baseline: Its name.
        level: Of the intervals.
        differences: By the name of the evaluation and that of the measure: the evaluation's value minus the baseline's,
            with its paired interval. The baseline itself is not there.
    """

    evaluations: tuple[Evaluation, ...]
    baseline: str
    level: float
    differences: dict[str, dict[str, Interval]]

    def __getitem__(self, name: str) -> dict[str, Interval]:
        """Return the differences of one evaluation, by measure."""
        if name not in self.differences:
            raise KeyError(
                f"There is no evaluation {name!r} beside {self.baseline!r}; there are {[*self.differences]}."
            )
        return self.differences[name]

    def __repr__(self) -> str:
        """Show the table."""
        return str(self)

    def __str__(self) -> str:
        """Return the table: the baseline's values, and below them differences with `*` where zero is excluded."""
        found = measured(self.evaluations)
        lines = [["", *(column.title for column in found)]]
        first = next(i for i, evaluation in enumerate(self.evaluations) if evaluation.name == self.baseline)
        lines.append([self.baseline, *(column.texts[first] for column in found)])
        for name, known in self.differences.items():
            cells = [written(column, known.get(column.name or "")) for column in found]
            lines += [[name, *(cell[0] for cell in cells)], ["", *(cell[1] for cell in cells)]]
        notes = [
            f"Differences to {self.baseline}, with paired {100 * self.level:g}% bootstrap intervals. "
            "* the interval excludes zero.",
            direction(found),
        ]
        return "\n".join([aligned(lines), *notes])

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the tensors as plain values; a number that is not finite becomes None."""
        return {
            "baseline": self.baseline,
            "level": self.level,
            "differences": {
                name: {
                    measure: {**found.to_dict(), "excludes_zero": excludes_zero(found)}
                    for measure, found in each.items()
                }
                for name, each in self.differences.items()
            },
        }


def compare(
    evaluations: Sequence[Evaluation],
    baseline: str | None = None,
    *,
    level: float = 0.95,
    num_replicates: int = NUM_REPLICATES,
    seed: int = 0,
) -> Comparison:
    """Say how evaluations of the same examples differ from one of them, and whether that is more than chance.

    Bootstrap intervals of differences, d = measure - baseline's measure, over resampled examples, of the test set and
    of OOD sets, that are the same for both. What makes some examples harder for all is in both, and cancels: such
    intervals are narrower than those of the values suggest. A difference is marked where its interval excludes zero; of
    twenty measures that do not differ, one is marked at a level of 0.95.

    Args:
        evaluations: From `evaluate`, with the same loaders in the same order (no shuffling).
        baseline: The name of the one that others are compared with; None takes the first.
        level: In this share of all test sets an interval holds the true difference.
        num_replicates: How many resampled sets.
        seed: Of the resampled sets.

    Returns:
        The comparison; print it, or ask it for `comparison["name"]["nll"]`.

    Costs what `Evaluation.interval` costs for each evaluation that has not been asked yet.

    Example:
        >>> from bayesify import convert, evaluate
        >>> targets = torch.arange(200) % 4
        >>> logits = torch.nn.functional.one_hot(targets, 4) * torch.linspace(-1, 3, 200)[:, None]
        >>> posterior = convert(torch.nn.Identity(), "map")
        >>> pairs = {"plain": 1.0, "sharper": 1.5}
        >>> both = [evaluate(posterior, [(k * logits, targets)], name=name) for name, k in pairs.items()]
        >>> found = compare(both)
        >>> 0 in found["sharper"]["nll"], found["sharper"]["accuracy"].value
        (False, 0.0)
    """
    evaluations = tuple(evaluations)
    check_comparable(evaluations)
    check_level(level, num_replicates)
    names = [evaluation.name for evaluation in evaluations]
    baseline = names[0] if baseline is None else baseline
    if baseline not in names:
        raise ValueError(f"There is no evaluation {baseline!r} to compare with; there are {names}.")
    first = evaluations[names.index(baseline)]
    others = [evaluation for evaluation in evaluations if evaluation is not first]
    for other in others:
        check_paired(first, other)
    theirs = first.replicates(num_replicates, seed=seed).values
    differences: dict[str, dict[str, Interval]] = {}
    for other in others:
        ours = other.replicates(num_replicates, seed=seed).values
        differences[other.name] = {
            name: interval(value - first.metrics[name], ours[name] - theirs[name], level)
            for name, value in other.metrics.items()
            if name in first.metrics and name in ours and name in theirs
        }
    return Comparison(evaluations, baseline, level, differences)


def check_paired(first: Evaluation, other: Evaluation) -> None:
    """Raise where two evaluations are not of the same examples in the same order, as far as can be seen."""
    ours, theirs = first.targets, other.targets
    if ours.shape != theirs.shape or not torch.equal(ours.double(), theirs.double()):
        raise ValueError(
            f"{first.name!r} and {other.name!r} have different targets: they were not evaluated on the same examples "
            "in the same order, and differences cannot be paired. Evaluate both with one loader that does not shuffle."
        )
    for name in first.ood.keys() & other.ood.keys():
        sizes = len(first.ood[name]), len(other.ood[name])
        if len(set(sizes)) > 1:
            raise ValueError(
                f"The OOD set {name!r} has {sizes[0]} examples in {first.name!r} and {sizes[1]} in {other.name!r}. "
                "Evaluate both with the same sets, or give different ones different names."
            )


def measured(evaluations: Sequence[Evaluation]) -> list[Column]:
    """Return the columns of measures that differences are shown of."""
    return [column for column in columns(evaluations, selective=True) if column.name is not None]


def excludes_zero(difference: Interval) -> bool:
    """Whether an interval is known, and zero is not in it.

    >>> excludes_zero(Interval(0.2, 0.1, 0.3, 0.95)), excludes_zero(Interval(0.2, -0.1, 0.3, 0.95))
    (True, False)
    """
    return not math.isnan(difference.low + difference.high) and 0 not in difference


def written(column: Column, difference: Interval | None) -> tuple[str, str]:
    """Return a difference and its interval as they are written in a column, with one digit more than the values.

    >>> written(Column("NLL", (), "lower"), Interval(-0.2, -0.3, -0.1, 0.95))
    ('-0.2000*', '[-0.3000, -0.1000]')
    """
    if difference is None:
        return "-", ""
    digits = int(column.pattern[3])
    pattern = f"{{:+.{digits + column.pattern.endswith('f}')}{column.pattern[4]}}}"
    text = pattern.format(difference.value) + "*" * excludes_zero(difference)
    return text, column.span(difference.low, difference.high, pattern)
