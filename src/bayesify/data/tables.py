"""Tables of numbers and categories, as the inputs of a network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from bayesify.data.encoding import Encoding
from bayesify.data.labels import Labels, LabelSurvey, is_missing, name_of, number
from bayesify.data.records import Records, Remark
from bayesify.data.split import Split

__all__ = ["Category", "Number", "TableEncoding"]

MOST_LEVELS = 50  # a column with more different texts is left out
FAR = 20  # standard deviations from the mean, beyond which a number is odd
NUMERIC = 0.95  # the share of values that must be numbers in a column of numbers


@dataclass(frozen=True)
class Number:
    """Standardise a column of numbers, (x - mean) / std; a missing one becomes 0.

    Attributes:
        name: Of the column.
        mean: Of the training part.
        std: Of the training part.
        missing: Whether there is a second input that is 1 where the number is missing.
    """

    name: str
    mean: float
    std: float
    missing: bool = False

    @property
    def width(self) -> int:
        """How many inputs it makes."""
        return 1 + self.missing

    def encode(self, values: Sequence[Any], wrong: dict[int, str], odd: dict[int, str]) -> Tensor:
        """Return inputs (n, width)."""
        found, absent, bad = parse_numbers(values)
        for i in bad:
            wrong[i] = f"{str(values[i])[:40]!r} in the column {self.name!r} is not a number"
        if not self.missing:
            odd.update(
                dict.fromkeys(
                    absent, f"{self.name!r} is missing, which it never was in training: it counts as the mean"
                )
            )
        column = (torch.from_numpy(found) - self.mean) / self.std
        if (self.mean, self.std) != (0.0, 1.0):  # which says nothing of numbers that were left as they are
            for i in sorted(set((column.abs() > FAR).nonzero()[:, 0].tolist()) - set(absent)):
                far = f"{float(column[i]):+.0f} standard deviations from training's mean"
                odd[i] = f"{self.name!r} is {found[i]:.4g}, {far}"
        gone = torch.zeros(len(values), dtype=torch.bool)
        gone[absent] = True
        column = column.masked_fill(gone, 0.0)
        return torch.stack([column, gone.double()] if self.missing else [column], 1)


@dataclass(frozen=True)
class Category:
    """Encode a column of categories as one input per level, 1 where it is the one; an unknown one is all zeros.

    Attributes:
        name: Of the column.
        levels: Of the training part.
        missing: Whether there is one more input, that is 1 where the value is missing.
    """

    name: str
    levels: tuple[str, ...]
    missing: bool = False

    @property
    def width(self) -> int:
        """How many inputs it makes."""
        return len(self.levels) + self.missing

    def encode(self, values: Sequence[Any], wrong: dict[int, str], odd: dict[int, str]) -> Tensor:
        """Return inputs (n, width)."""
        del wrong
        place = {level: index for index, level in enumerate(self.levels)}
        found = torch.zeros(len(values), self.width, dtype=torch.float64)
        for i, value in enumerate(values):
            absent = is_missing(value)
            index = len(self.levels) if absent and self.missing else place.get(name_of(value), -1)
            if index >= 0:
                found[i, index] = 1
            else:
                what = "is missing" if absent else f"is {name_of(value)[:40]!r}"
                odd[i] = f"{self.name!r} {what}, which it never was in training: it counts as none of the known"
        return found


@dataclass(frozen=True)
class TableEncoding(Encoding):
    """Turn records into rows of numbers: standardised numbers, categories one-hot, missing values told.

    Attributes:
        columns: How each column is encoded; what is not here is left out.
        labels: How the label column is read.
        notes: What was done with which columns, as sentences.

    >>> table = [Records.of([{"age": 30, "city": "Lyon", "label": 0}, {"age": 40, "city": "Oslo", "label": 1}])]
    >>> encoding = TableEncoding.fit(table, "label")
    >>> encoding.encode(Records.of([{"age": 45, "city": "Oslo"}])).inputs
    tensor([[2., 0., 1.]])
    """

    kind: ClassVar[str] = "table"

    columns: tuple[Number | Category, ...]
    labels: Labels | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def fit(
        cls,
        stretches: Iterable[Records],
        label: str,
        *,
        likelihood: str = "classification",
        classes: Sequence[str] | None = None,
        ignore: Sequence[str] = (),
        scaled: bool = True,
    ) -> TableEncoding:
        """Look at the training part once, in constant memory, and decide how its columns are encoded.

        A column is one of numbers if 95 % of what is not missing are; with other values up to 50 levels it is one of
        categories, beyond it is left out; so is one with a single value.

        Args:
            stretches: Records of the training part.
            label: The label column.
            likelihood: "classification", "binary" or "regression".
            classes: The names of classes in the order of the network's outputs; None takes those that occur, sorted.
            ignore: Columns that are left out.
            scaled: Whether numbers, labels too, are standardised; otherwise they stay, and a missing one is 0.
        """
        survey = LabelSurvey(label, likelihood, classes)
        seen: dict[str, _Column] = {}
        rows = 0
        for records in stretches:
            survey.look(records)
            rows += len(records)
            for name, values in records.columns.items():
                if name != label and name not in ignore:
                    seen.setdefault(name, _Column()).look(values)
        if not rows:
            raise ValueError("The training part has no row that can be read.")
        labels = survey.labels(scaled=scaled)
        decided = {name: column.decide(name, rows, scaled) for name, column in seen.items()}
        columns = tuple(made for made, _ in decided.values() if made is not None)
        if not columns:
            there = "; ".join(note for _, note in decided.values()) or "there is no other column"
            raise ValueError(f"No column beside the label {label!r} can be an input: {there}.")
        return cls(columns, labels, tuple(note for _, note in decided.values()))

    @property
    def width(self) -> int:
        """How many inputs a network gets."""
        return sum(column.width for column in self.columns)

    def features(self, records: Records) -> tuple[Tensor, dict[int, str], list[Remark]]:
        """Return inputs (n, width), what is wrong with some rows, and what is odd about others."""
        absent = [column.name for column in self.columns if column.name not in records.columns]
        if absent and records.rows:
            there = ", ".join(map(repr, records.columns))
            raise ValueError(
                f"The training data had the column(s) {', '.join(map(repr, absent))}, which are missing here; here are "
                f"{there}."
            )
        wrong: dict[int, str] = {}
        found, remarks = [torch.zeros(len(records), 0, dtype=torch.float64)], []
        for column in self.columns:
            odd: dict[int, str] = {}
            found.append(column.encode(records.columns.get(column.name, []), wrong, odd))
            remarks += [Remark(records.rows[i], text) for i, text in odd.items()]
        return torch.cat(found, 1).float(), wrong, sorted(remarks, key=lambda remark: remark.row)

    def inputs(self, features: Tensor) -> Tensor:
        """Return the features as they are."""
        return features

    def dataset(self, features: list[Tensor], targets: Tensor) -> Split:
        """Make one tensor of all."""
        return Split(torch.cat(features), targets)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        columns = [{"kind": type(column).__name__.lower(), **asdict(column)} for column in self.columns]
        labels = None if self.labels is None else self.labels.to_dict()
        return {"kind": self.kind, "columns": columns, "labels": labels, "notes": list(self.notes)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TableEncoding:
        """Return what `to_dict` described."""
        labels = None if values["labels"] is None else Labels.from_dict(values["labels"])
        return cls(tuple(_column(one) for one in values["columns"]), labels, tuple(values["notes"]))


def _column(values: dict[str, Any]) -> Number | Category:
    name, missing = str(values["name"]), bool(values["missing"])
    if values["kind"] == "number":
        return Number(name, float(values["mean"]), float(values["std"]), missing)
    return Category(name, tuple(map(str, values["levels"])), missing)


def parse_numbers(values: Sequence[Any]) -> tuple[np.ndarray[Any, np.dtype[np.float64]], list[int], list[int]]:
    """Return numbers, and the indices of those that are missing, and of those that are none.

    >>> parse_numbers(["1.5", "", "two"])
    (array([1.5, 0. , 0. ]), [1], [2])
    """
    try:
        if not any(isinstance(value, bool) for value in values):
            found = np.array(values).astype(np.float64) if values else np.zeros(0)
            if np.isfinite(found).all():
                return found, [], []
    except (TypeError, ValueError):
        pass
    found, absent, bad = np.zeros(len(values)), [], []
    for i, value in enumerate(values):
        if is_missing(value):
            absent.append(i)
            continue
        try:
            found[i] = number(value)
        except (TypeError, ValueError):
            bad.append(i)
    return found, absent, bad


class _Column:
    """What was seen of a column so far."""

    def __init__(self) -> None:
        self.levels: dict[str, None] = {}
        self.rows = self.absent = self.numbers = 0
        self.mean = self.squares = 0.0
        self.low, self.high = math.inf, -math.inf

    def look(self, values: Sequence[Any]) -> None:
        found, absent, bad = parse_numbers(values)
        self.rows += len(values)
        self.absent += len(absent)
        if len(self.levels) <= MOST_LEVELS:
            gone = set(absent)
            for i, value in enumerate(values):
                if i not in gone:
                    self.levels.setdefault(name_of(value))
                    if len(self.levels) > MOST_LEVELS:
                        break
        found = np.delete(found, [*absent, *bad])
        if found.size:  # means and squared deviations of two sets, joined (Chan et al. 1979)
            change, total = found.mean() - self.mean, self.numbers + found.size
            self.squares += float(((found - found.mean()) ** 2).sum() + change**2 * self.numbers * found.size / total)
            self.mean += float(change * found.size / total)
            self.numbers = total
            self.low, self.high = min(self.low, float(found.min())), max(self.high, float(found.max()))

    def decide(self, name: str, rows: int, scaled: bool) -> tuple[Number | Category | None, str]:
        """Return how the column is encoded, and a sentence about it."""
        there, missing = self.rows - self.absent, rows - (self.rows - self.absent)
        also = f", {missing} missing" if missing else ""
        if not there:
            return None, f"{name!r} is left out: it is empty"
        if len(self.levels) == 1 and not missing:
            return None, f"{name!r} is left out: it is always {next(iter(self.levels))!r}"
        if self.numbers >= NUMERIC * there and self.low < self.high:
            std = math.sqrt(self.squares / self.numbers)
            note = f"{name!r} is numbers, mean {self.mean:.4g} and standard deviation {std:.4g}{also}"
            return Number(name, self.mean, std, missing > 0) if scaled else Number(name, 0.0, 1.0, missing > 0), note
        if len(self.levels) > MOST_LEVELS:
            return None, f"{name!r} is left out: it has more than {MOST_LEVELS} different texts"
        levels = tuple(sorted(self.levels))
        return Category(name, levels, missing > 0), f"{name!r} is one of {len(levels)} categories{also}"
