"""From records of a file to what a network takes: batch by batch in constant memory, or as data sets for training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from bayesify.data.labels import Labels
from bayesify.data.records import Records, Remark, read_records

__all__ = ["Batch", "Encoding", "load_records", "stream"]


@dataclass(frozen=True, eq=False)
class Batch:
    """Hold what could be encoded of a stretch of a file.

    Attributes:
        rows: The numbers of its B rows.
        inputs: What the network takes, B examples.
        targets: Their targets, where they were asked for.
        errors: What is wrong with the rows that are not in the batch.
        remarks: What is odd about rows that are, as a category that training did not see.
    """

    rows: list[int]
    inputs: Any
    targets: Tensor | None = None
    errors: tuple[Remark, ...] = ()
    remarks: tuple[Remark, ...] = ()

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.rows)


class Encoding(ABC):
    """Say how records become inputs and targets: `TableEncoding`, `TextEncoding` or `ImageEncoding`.

    Attributes:
        kind: What it is called in files.
        labels: How the label column is read; None where there is none.
    """

    kind: ClassVar[str]
    labels: Labels | None

    @abstractmethod
    def features(self, records: Records) -> tuple[Sequence[Any] | Tensor, dict[int, str], list[Remark]]:
        """Return a feature for each record, what is wrong with some by index, and remarks about others."""

    @abstractmethod
    def inputs(self, features: Any) -> Any:
        """Put features together to what the network takes."""

    @abstractmethod
    def dataset(self, features: list[Any], targets: Tensor) -> Dataset[Any]:
        """Make the data set of a part from the stretches of its features."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""

    def kept(self, features: Any, before: int) -> Any:
        """Return features as a data set keeps them that has `before` examples already."""
        del before
        return features

    def encode(self, records: Records, *, labels: bool = False) -> Batch:
        """Encode records; those that cannot be are left out, and among the errors.

        Args:
            records: Of a file, or `Records.of` mappings.
            labels: Whether targets are wanted; a row without a label that is known is an error then.
        """
        features, targets, keep, errors, remarks = self._encode(records, labels)
        some = features[keep] if isinstance(features, Tensor) else [features[i] for i in keep]
        rows = [records.rows[i] for i in keep]
        chosen = None if targets is None else targets[keep]
        return Batch(rows, self.inputs(some) if rows else None, chosen, errors, remarks)

    def _encode(
        self, records: Records, labels: bool
    ) -> tuple[Any, Tensor | None, list[int], tuple[Remark, ...], tuple[Remark, ...]]:
        features, wrong, remarks = self.features(records)
        targets = None
        if labels:
            targets, unknown = self._targets(records)
            wrong = {**unknown, **wrong}
        keep = [i for i in range(len(records)) if i not in wrong]
        new = [Remark(records.rows[i], text) for i, text in wrong.items()]
        errors = tuple(sorted((*records.errors, *new), key=lambda remark: remark.row))
        bad = {remark.row for remark in new}
        return features, targets, keep, errors, tuple(remark for remark in remarks if remark.row not in bad)

    def _targets(self, records: Records) -> tuple[Tensor, dict[int, str]]:
        if self.labels is None:
            raise ValueError("This encoding has no labels.")
        column = self.labels.column
        if column not in records.columns and records.rows:
            there = ", ".join(map(repr, records.columns))
            raise ValueError(f"There is no column {column!r} for the label; there are {there}.")
        return self.labels.encode(records.columns.get(column, []))


def stream(
    source: str | Path | Iterable[Records], encoding: Encoding, *, size: int = 256, labels: bool = False
) -> Iterator[Batch]:
    """Encode a file in constant memory, at most `size` rows at a time.

    Args:
        source: A path for `read_records`, or records.
        encoding: How they become inputs.
        size: How many rows of a file are read at once.
        labels: Whether targets are wanted.

    >>> from bayesify.data import TableEncoding
    >>> table = [Records.of([{"age": 31, "label": "a"}, {"age": 33, "label": "b"}])]
    >>> encoding = TableEncoding.fit(table, "label")
    >>> [(batch.rows, batch.inputs.tolist()) for batch in stream(table, encoding)]
    [([1, 2], [[-1.0], [1.0]])]
    """
    for records in read_records(source, size=size) if isinstance(source, str | Path) else source:
        yield encoding.encode(records, labels=labels)


def load_records(
    stretches: Iterable[Records],
    encoding: Encoding,
    *,
    labels: bool = True,
    each: Callable[[Batch], None] = lambda batch: None,
) -> Dataset[Any]:
    """Encode records with their labels as a data set for training; `Parts.select` gives those of a part.

    Args:
        stretches: Records of a file, or of a part of it.
        encoding: How they become inputs.
        labels: Whether targets are wanted; without, they are all 0.
        each: Told the rows, errors and remarks of each stretch; the batch has no inputs.

    Returns:
        A data set of (input, target); of texts, it has a function `collate` that makes batches.

    Raises:
        ValueError: Not one row can be used.

    >>> from bayesify.data import Parts, TableEncoding
    >>> table = [Records.of([{"age": age, "label": age % 2} for age in range(40)])]
    >>> encoding = TableEncoding.fit(table, "label")
    >>> len(load_records(Parts().select(table, "train"), encoding))
    28
    """
    features: list[Any] = []
    targets: list[Tensor] = []
    count, first = 0, None
    for records in stretches:
        found, wanted, keep, errors, remarks = encoding._encode(records, labels)
        each(Batch([records.rows[i] for i in keep], None, None, errors, remarks))
        first = first or next(iter(errors), None)
        if keep:
            some = found[keep] if isinstance(found, Tensor) else [found[i] for i in keep]
            features.append(encoding.kept(some, count))
            targets.append(torch.zeros(len(keep), dtype=torch.int64) if wanted is None else wanted[keep])
            count += len(keep)
    if not count:
        raise ValueError(f"Not one row can be used{f'; row {first.row}: {first.text}' if first else ''}.")
    return encoding.dataset(features, torch.cat(targets))
