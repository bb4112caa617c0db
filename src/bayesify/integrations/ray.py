"""Ray Data: verdicts of any number of rows, on any number of machines.

Ray cuts the rows into blocks, hands them to workers, and runs a block again whose worker died: no row is lost, and none
is there twice. Each worker holds the guard once. What a row is told does not depend on its worker, since draws are
functions of their key alone; the size of batches changes numbers by rounding only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bayesify._core.optional import require
from bayesify.data import Batch, Encoding, Records
from bayesify.decide import Guard
from bayesify.decide.lines import lines_of

if TYPE_CHECKING:
    from ray.data import Dataset

__all__ = ["score"]

Columns = Mapping[str, np.ndarray[Any, Any]]
Inputs = str | Sequence[str] | Encoding | Callable[[Columns], Any]


def score(
    dataset: Dataset,
    guard: Guard,
    inputs: Inputs,
    *,
    workers: int = 2,
    batch_size: int = 1024,
    keep: Sequence[str] | None = None,
    num_cpus: float = 1,
    num_gpus: float = 0,
) -> Dataset:
    """Return a data set with a verdict for each row; it is computed when it is read or written.

    Args:
        dataset: Of Ray: `ray.data.read_parquet(...)`, `from_numpy`, ...
        guard: The guard; each worker gets a copy, and must be able to import the classes of its network.
        inputs: What the network takes: the name of a column whose values are arrays; the names of columns of numbers,
            in the order of the network's inputs; an `Encoding` of rows (that of `bayesify.files.load_guard(folder)`),
            with which rows that cannot be encoded get the verdict "unreadable" and an error; or a function of the
            columns as arrays.
        workers: How many processes hold the guard.
        batch_size: How many rows a worker decides at once.
        keep: Columns of the rows that are kept beside the verdicts; None keeps all but those of arrays.
        num_cpus: Cores of each worker, which torch uses.
        num_gpus: Graphics cards of each worker, or parts of one; the guard is moved to the first.

    Returns:
        A data set of Ray with the columns kept and those of `Verdicts`: verdict, label, confidence, prediction_set
        (mean, std, low, high for numbers), total, aleatoric, epistemic, p_value, reason; with an encoding also remark
        and error.

    Example:
        >>> rows = ray.data.read_parquet("s3://bucket/rows/")  # doctest: +SKIP
        >>> score(rows, guard, ["age", "income"], workers=64).write_parquet("s3://bucket/verdicts/")  # doctest: +SKIP
    """
    ray = require("ray", extra="ray", purpose="Scoring on Ray")
    data = require("ray.data", extra="ray", purpose="Scoring on Ray")
    if workers < 1 or batch_size < 1:
        raise ValueError(f"workers and batch_size are at least 1, not {workers} and {batch_size}.")
    return dataset.map_batches(
        Scorer,
        batch_size=batch_size,
        batch_format="numpy",
        compute=data.ActorPoolStrategy(size=workers),
        fn_constructor_args=(ray.put(guard), inputs, None if keep is None else tuple(keep)),
        num_cpus=num_cpus,
        num_gpus=num_gpus or None,
    )


class Scorer:
    """Hold a guard in a worker, and turn columns of rows into columns of verdicts."""

    def __init__(self, guard: Any, inputs: Inputs, keep: tuple[str, ...] | None) -> None:
        """Fetch the guard."""
        ray = require("ray", extra="ray", purpose="Scoring on Ray")
        self.guard: Guard = ray.get(guard) if isinstance(guard, ray.ObjectRef) else guard
        if torch.cuda.is_available() and ray.get_gpu_ids():
            self.guard.posterior.to("cuda")
        self.inputs, self.keep = inputs, keep

    def __call__(self, columns: Columns) -> Any:
        """Decide a batch: columns of arrays become a table of Arrow."""
        arrow = require("pyarrow", extra="ray", purpose="Scoring on Ray")
        rows = len(next(iter(columns.values())))
        if isinstance(self.inputs, Encoding):
            records = Records(
                list(range(rows)), {name: values.tolist() for name, values in columns.items() if values.ndim == 1}
            )
            batch = self.inputs.encode(records)
        else:
            batch = Batch(list(range(rows)), self._of_columns(columns))
        verdicts = self.guard(batch.inputs) if len(batch) else None
        labels = self.inputs.labels if isinstance(self.inputs, Encoding) else None
        lines = list(lines_of(batch, verdicts, labels))
        kept = [name for name, values in columns.items() if values.ndim == 1] if self.keep is None else self.keep
        found = {name: arrow.array(columns[name]) for name in kept}
        for name, kind in self._types(arrow).items():
            found[name] = arrow.array([line.get(name) for line in lines], kind)
        return arrow.table(found)

    def _of_columns(self, columns: Columns) -> Any:
        if callable(self.inputs):
            return self.inputs(columns)
        if isinstance(self.inputs, str):
            return torch.as_tensor(np.array(columns[self.inputs]))
        assert not isinstance(self.inputs, Encoding)
        return torch.as_tensor(np.stack([columns[name] for name in self.inputs], 1)).float()

    def _types(self, arrow: Any) -> dict[str, Any]:
        """Return the types of the columns: the same for every block, whatever it holds."""
        text, number = arrow.string(), arrow.float64()
        label = arrow.int64() if self.guard.class_names is None else text
        own: dict[str, Any] = {"label": label, "confidence": number, "prediction_set": arrow.list_(label)}
        if self.guard.posterior_classes is None:
            own = dict.fromkeys(("mean", "std", "low", "high"), number)
        found = {"verdict": text, **own, **dict.fromkeys(("total", "aleatoric", "epistemic", "p_value"), number)}
        told = ("reason", "remark", "error") if isinstance(self.inputs, Encoding) else ("reason",)
        return {**found, **dict.fromkeys(told, text)}
