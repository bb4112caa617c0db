"""The label column of a file: names of classes, or numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bayesify.data.records import Records

__all__ = ["Labels", "is_missing", "number"]

MISSING = {"", "?", "na", "n/a", "nan", "null", "none", "<na>"}
MOST = 1000  # classes


def is_missing(value: Any) -> bool:
    """Return whether a value of a table says that there is none.

    >>> [is_missing(value) for value in (None, " ", "NA", float("nan"), "0", 0)]
    [True, True, True, True, False, False]
    """
    if isinstance(value, str):
        return value.strip().lower() in MISSING
    return value is None or (isinstance(value, float) and math.isnan(value))


def number(value: Any) -> float:
    """Return a value as a finite number, or raise ValueError."""
    if isinstance(value, bool):
        raise ValueError("a truth value is no number")
    found = float(value)
    if not math.isfinite(found):
        raise ValueError("it is not finite")
    return found


def name_of(value: Any) -> str:
    """Return the name of a class: the same for 3, 3.0 and '3'.

    >>> name_of(3.0), name_of(" 3"), name_of("cat")
    ('3', '3', 'cat')
    """
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()


@dataclass(frozen=True)
class Labels:
    """Turn the label column into targets, and back.

    Attributes:
        column: Its name.
        classes: The names of the classes in the order of the network's outputs; None for regression.
        mean: What is taken from a number; 0 for classes.
        std: By what it is divided then.
        single: Whether the network has one output for two classes (a binary likelihood).

    >>> labels = Labels.fit([Records.of([{"label": "cat"}, {"label": "dog"}])], "label")
    >>> labels.encode(["dog", "cat"])[0]
    tensor([1, 0])
    """

    column: str
    classes: tuple[str, ...] | None = None
    mean: float = 0.0
    std: float = 1.0
    single: bool = False

    @classmethod
    def fit(
        cls,
        stretches: Iterable[Records],
        column: str,
        *,
        likelihood: str = "classification",
        classes: Sequence[str] | None = None,
        scaled: bool = True,
    ) -> Labels:
        """Read the labels of the training part.

        Args:
            stretches: Records of the training part.
            column: The label column.
            likelihood: "classification", "binary" or "regression".
            classes: Their names in the order of the network's outputs; None takes those that occur, sorted.
            scaled: Whether numbers are standardised.

        Raises:
            ValueError: There is no such column, or no label in it, or far too many classes.
        """
        survey = LabelSurvey(column, likelihood, classes)
        for records in stretches:
            survey.look(records)
        return survey.labels(scaled=scaled)

    @property
    def outputs(self) -> int:
        """How many outputs a network needs."""
        return 1 if self.classes is None or self.single else len(self.classes)

    def encode(self, values: Sequence[Any]) -> tuple[Tensor, dict[int, str]]:
        """Return targets, and what is wrong with some, by index."""
        wrong: dict[int, str] = {}
        found: list[float] = []
        known = {name: float(index) for index, name in enumerate(self.classes or ())}
        for index, value in enumerate(values):
            target = 0.0
            if is_missing(value) and name_of(value) not in known:
                wrong[index] = f"it has no label ({self.column!r} is empty)"
            elif self.classes is not None:
                target = known.get(name_of(value), -1.0)
                if target < 0:
                    wrong[index] = f"the training data have no label {name_of(value)!r}, only {_few(self.classes)}"
            else:
                try:
                    target = (number(value) - self.mean) / self.std
                except (TypeError, ValueError):
                    wrong[index] = f"the label {str(value)[:40]!r} is not a number"
            found.append(target)
        if self.classes is not None and not self.single:
            return torch.tensor(found, dtype=torch.int64), wrong
        return torch.tensor(found, dtype=torch.float32)[:, None], wrong

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        classes = None if self.classes is None else list(self.classes)
        return {"column": self.column, "classes": classes, "mean": self.mean, "std": self.std, "single": self.single}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Labels:
        """Return what `to_dict` described."""
        classes = values["classes"]
        found = cls(str(values["column"]), None if classes is None else tuple(map(str, classes)))
        return replace(found, mean=float(values["mean"]), std=float(values["std"]), single=bool(values["single"]))


class LabelSurvey:
    """Look at the labels of a training part, a stretch at a time."""

    def __init__(self, column: str, likelihood: str, classes: Sequence[str] | None = None) -> None:
        self.column, self.likelihood, self.given = column, likelihood, classes
        self.names: dict[str, int] = {}
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    def look(self, records: Records) -> None:
        """Take a stretch into account."""
        if self.column not in records.columns:
            if not records.rows and not records.columns:
                return
            there = ", ".join(map(repr, records.columns))
            raise ValueError(
                f"There is no column {self.column!r} for the label; there are {there}. Name it with --label."
            )
        for value in records.columns[self.column]:
            if is_missing(value):
                continue
            if self.likelihood != "regression":
                name = name_of(value)
                self.names[name] = self.names.get(name, 0) + 1
                if len(self.names) > MOST:
                    raise ValueError(
                        f"The column {self.column!r} has more than {MOST} different labels. If it holds numbers to "
                        "predict, say --likelihood regression."
                    )
                continue
            try:
                found = number(value)
            except (TypeError, ValueError):
                continue  # told when it is encoded
            self.count += 1
            change = found - self.mean
            self.mean += change / self.count
            self.squares += change * (found - self.mean)

    def labels(self, *, scaled: bool = True) -> Labels:
        """Return the labels that were seen."""
        if self.likelihood == "regression":
            if not self.count:
                raise ValueError(f"The column {self.column!r} has no number in the training part.")
            std = math.sqrt(self.squares / self.count) or 1.0
            return Labels(self.column, None, self.mean, std) if scaled else Labels(self.column)
        if not self.names:
            raise ValueError(f"The column {self.column!r} has no label in the training part.")
        names = tuple(self.given) if self.given else tuple(sorted(self.names, key=_order))
        if unknown := sorted(set(self.names) - set(names)):
            raise ValueError(f"The data have labels that are not among the given classes: {_few(unknown)}.")
        total = sum(self.names.values())
        if len(self.names) > 20 and len(self.names) > total / 2 and all(_is_number(name) for name in self.names):
            raise ValueError(
                f"The column {self.column!r} has {len(self.names)} different numbers in {total} rows. If they are to "
                "be predicted as numbers, say --likelihood regression."
            )
        if len(names) < 2:
            raise ValueError(f"All labels of the training part are {names[0]!r}: there is nothing to tell apart.")
        single = self.likelihood == "binary"
        if single and len(names) != 2:
            raise ValueError(f"A binary likelihood needs two labels, and the column {self.column!r} has {_few(names)}.")
        return Labels(self.column, names, single=single)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _order(name: str) -> tuple[bool, float, str]:
    """Sort numbers by their size, before text."""
    return (False, float(name), name) if _is_number(name) else (True, 0.0, name)


def _few(names: Sequence[str], most: int = 10) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, list(names)[:most])) + more
