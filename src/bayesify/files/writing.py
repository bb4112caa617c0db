"""Predictions of rows, as they come: CSV, JSON lines or Parquet."""

from __future__ import annotations

import csv
import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from bayesify._core.optional import require
from bayesify.data.encoding import Batch
from bayesify.data.labels import Labels
from bayesify.likelihoods.prediction import Prediction

__all__ = ["ENDINGS", "RowWriter", "fields_of", "rows_of"]

ENDINGS = (".csv", ".jsonl", ".parquet")
CLASSIFICATION = ("label", "confidence", "total", "aleatoric", "epistemic")
REGRESSION = ("mean", "std", "aleatoric", "epistemic")
FIRST, LAST = "row", "error"


def fields_of(prediction: Prediction) -> tuple[str, ...]:
    """Return the names of what is written of each input."""
    return REGRESSION if hasattr(prediction, "mean") else CLASSIFICATION


def rows_of(batch: Batch, prediction: Prediction | None, labels: Labels | None = None) -> Iterator[dict[str, Any]]:
    """Give one mapping for each row of a stretch in the order of the file; one that cannot be read has an 'error'.

    Args:
        batch: The rows.
        prediction: Of those that could be read.
        labels: Gives classes their names, and numbers their units.

    Raises:
        ValueError: The network has several outputs per input.
    """
    lines: dict[int, dict[str, Any]] = {remark.row: {FIRST: remark.row, LAST: remark.text} for remark in batch.errors}
    if prediction is not None:
        fields = fields_of(prediction)
        columns = [getattr(prediction, name) for name in fields]
        if any(column.ndim > 1 and column[0].numel() != 1 for column in columns):
            raise ValueError(
                "The network has several outputs per input (pixels, tokens, several targets), which do not fit one "
                "line each. Use bayesify.predict in Python."
            )
        values = (column.reshape(len(column)).tolist() for column in columns)
        for row, found in zip(batch.rows, zip(*values, strict=True), strict=True):
            lines[row] = {FIRST: row, **_named(dict(zip(fields, found, strict=True)), labels), LAST: None}
    for row in sorted(lines):
        yield lines[row]


def _named(found: dict[str, Any], labels: Labels | None) -> dict[str, Any]:
    """Give a class its name, and numbers their units."""
    if labels is None:
        return found
    if labels.classes is not None:
        return {**found, "label": labels.classes[int(found["label"])]}
    scaled = {"mean": found["mean"] * labels.std + labels.mean, "std": found["std"] * labels.std}
    return {**found, **scaled, **{name: found[name] * labels.std**2 for name in ("aleatoric", "epistemic")}}


class RowWriter:
    """Write rows to a file that appears, whole, when all are written; in constant memory.

    Args:
        path: *.csv, *.jsonl or *.parquet.
        fields: The columns between 'row' and 'error'.
    """

    def __init__(self, path: str | Path, fields: tuple[str, ...]) -> None:
        """Begin the file."""
        self.path, self.fields, self.count = Path(path), (FIRST, *fields, LAST), 0
        if self.path.suffix not in ENDINGS:
            raise ValueError(f"{self.path}: the name must end in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}")
        self._arrow: Any = None
        if self.path.suffix == ".parquet":
            arrow = require("pyarrow", extra="files", purpose="writing Parquet")
            parquet = require("pyarrow.parquet", extra="files", purpose="writing Parquet")
            kinds = {FIRST: arrow.int64(), LAST: arrow.string(), "label": arrow.string()}
            schema = arrow.schema([(name, kinds.get(name, arrow.float64())) for name in self.fields])
            self._arrow, self._file = (arrow, schema), parquet.ParquetWriter(self.temporary, schema)
            return
        self._file = self.temporary.open("x", encoding="utf-8", newline="")
        self._csv = csv.DictWriter(self._file, self.fields, lineterminator="\n")
        if self.path.suffix == ".csv":
            self._csv.writeheader()

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows."""
        self.count += len(rows)
        if self._arrow is not None:
            arrow, schema = self._arrow
            values = [[row.get(name) for row in rows] for name in self.fields]
            as_text = [
                [None if v is None else str(v) for v in vs] if n == "label" else vs
                for n, vs in zip(self.fields, values, strict=True)
            ]
            arrays = [arrow.array(one, kind) for one, kind in zip(as_text, schema.types, strict=True)]
            self._file.write_table(arrow.Table.from_arrays(arrays, schema=schema))
        elif self.path.suffix == ".csv":
            self._csv.writerows(rows)
        else:
            for row in rows:
                whole = {name: row.get(name) for name in self.fields}
                self._file.write(json.dumps(whole, ensure_ascii=False) + "\n")

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put the file in place, or remove what was begun."""
        self._file.close()
        if kind is None:
            os.replace(self.temporary, self.path)
        else:
            self.temporary.unlink(missing_ok=True)
