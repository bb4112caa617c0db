"""`bayesify predict`: a line for each input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import OmitArgPrefixes, arg

from bayesify import storage
from bayesify._core.files import write_atomically
from bayesify.cli._options import LearningJob, Opened, SplitOptions
from bayesify.cli._output import JobError, Output, UsageError
from bayesify.data import Batch
from bayesify.files import Fitted
from bayesify.files.writing import CLASSIFICATION, ENDINGS, REGRESSION, RowWriter, rows_of
from bayesify.laws import Posterior
from bayesify.prediction import predict

__all__ = ["Predict"]


@dataclass(frozen=True, kw_only=True)
class Predict(LearningJob):
    r"""Write label, confidence and uncertainties of every input.

    Examples:
      bayesify predict --posterior posterior --data new-customers.csv --out predictions.csv
      bayesify predict --posterior posterior --model my_project.models:make_network \
          --weights network.safetensors --data my_project.data:load --out predictions.csv
      bayesify predict --method map --model nets:cnn --weights cnn.safetensors --data digits --out predictions.jsonl

    Classification: index, label, confidence, total, aleatoric, epistemic (uncertainties in nats).
    Regression: index, mean, std, aleatoric, epistemic (variances). Lines are in the order of the data.
    Of a file, every row has a line, in constant memory: 'row' instead of index (the first is 1), the label by
    its name, numbers in their own units, and 'error' for what could not be read.

    Attributes:
        posterior: A folder that 'bayesify fit' wrote; or give --method.
        out: A file *.csv, *.jsonl or, of a file, *.parquet; without it, CSV (or --json) goes to stdout.
    """

    posterior: Annotated[Path | None, arg(metavar="DIR")] = None
    out: Annotated[Path | None, arg(metavar="FILE")] = None
    data: OmitArgPrefixes[SplitOptions]

    def run(self) -> Output:
        """Predict a split or a file, and write it."""
        endings = ENDINGS if self.data.by_path else ENDINGS[:2]
        if self.out is not None and self.out.suffix not in endings:
            raise UsageError(f"--out {self.out}: the name must end in {' or '.join(endings)}")
        if self.data.by_path:
            return self._of_file()
        _, task, (posterior, _) = self.one_posterior(self.posterior, self.data.split)
        if task.calibrates and task.val is not None:
            task.calibrate(posterior, task.val)
        found = predict(posterior, task.test, seed=task.seed, progress=task.progress, **task.predicting)
        numbered = rows_of(Batch(list(range(len(found))), None), found)
        rows = [{"index": row.pop("row"), **row} for row in map(_without_error, numbered)]
        if self.out is None:
            return Output(_csv(rows), {"predictions": rows})
        text = _csv(rows) if self.out.suffix == ".csv" else "\n".join(map(json.dumps, rows))
        write_atomically(self.out, f"{text}\n".encode())
        return self._written(len(rows))

    def _of_file(self) -> Output:
        opened, posterior = self._opened()
        files = opened.files
        assert files is not None
        fields = REGRESSION if opened.likelihood == "regression" else CLASSIFICATION
        fitted = Fitted(posterior, files.encoding, opened.network, files.settings)
        records = files.records(
            self.data.split or "all", size=self.data.batch_size, label=f"predicting {files.path.name}"
        )

        def rows() -> Iterator[list[dict[str, Any]]]:
            for batch, found in fitted.predict(records, seed=self.prediction.seed, **self.prediction.options):
                files.note(batch)
                yield list(rows_of(batch, found, files.encoding.labels))

        if self.out is None:
            whole = [{name: row.get(name) for name in ("row", *fields, "error")} for some in rows() for row in some]
            return self.finish(opened, Output(_csv(whole), {"predictions": whole}))
        with RowWriter(self.out, fields) as writer:
            for some in rows():
                writer.write(some)
        return self.finish(opened, self._written(writer.count))

    def _opened(self) -> tuple[Opened, Posterior]:
        if self.posterior is None:  # made now, from the training part
            opened, task, (posterior, _) = self.one_posterior(None, "train")
        else:
            if self.methods:
                raise UsageError("give either --posterior DIR, or --method NAME to make one now")
            opened = self.open_data([self.posterior])
            posterior = storage.load(self.posterior, opened.network)
            task = None
        if self.learning.calibrate:
            task = task or self.task(opened, "val", [], self.learning)
            if task.val is None:
                raise JobError("--calibrate needs a 'val' part.")
            task.calibrate(posterior, task.val)
        return opened, posterior

    def _written(self, count: int) -> Output:
        return Output(f"{count} predictions are in {self.out}.", {"examples": count, "out": str(self.out)})


def _without_error(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "error"}


def _csv(rows: list[dict[str, Any]]) -> str:
    lines = [rows[0], *(row.values() for row in rows)]
    return "\n".join(",".join("" if value is None else _quoted(str(value)) for value in line) for line in lines)


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"' if any(mark in text for mark in ',"\n\r') else text
