"""Several posteriors of one network on the same data: make, fit, calibrate, evaluate; one failure stops no other."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.utils.data import DataLoader

from bayesify._core.trees import split_batch
from bayesify.conversion import convert
from bayesify.evaluation.evaluation import Cost, Evaluation, evaluate, measure_cost, table
from bayesify.fitting import fit
from bayesify.laws import Posterior
from bayesify.methods import MAP, Method
from bayesify.prediction.calibration import calibrate

__all__ = [
    "Comparison",
    "Failure",
    "Made",
    "Task",
    "compare",
    "evaluate_posterior",
    "first_line",
    "fit_method",
]

PLAIN_BATCHES = 20  # enough to time an epoch by


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every posterior of a comparison is made from and measured on.

    Attributes:
        network: The plain network, already trained.
        test: Batches for the table, and for nothing else.
        train: Batches to fit on, for methods that learn.
        val: Batches to calibrate on; None calibrates nothing.
        chosen_on: Batches on which a method may choose settings of its own, as Laplace its prior; None takes `val`.
        ood: Loaders of OOD inputs, by name.
        plain_seconds: What the cost of fitting is divided by; None measures one epoch of plain training instead.
        likelihood: What the outputs mean.
        epochs: Of every method; None takes the method's own.
        checkpoint: A folder that gets one for each method.
        predicting: `num_draws` and `how` of the predictions.
        score: The uncertainty that detects.
        seed: Of everything random.
        progress: Whether the library shows its own bars.
    """

    network: nn.Module
    test: DataLoader[Any]
    train: DataLoader[Any] | None = None
    val: DataLoader[Any] | None = None
    chosen_on: DataLoader[Any] | None = None
    ood: Mapping[str, DataLoader[Any]] = field(default_factory=dict)
    plain_seconds: float | None = None
    likelihood: str = "classification"
    epochs: int | None = None
    checkpoint: Path | None = None
    predicting: Mapping[str, Any] = field(default_factory=dict)
    score: str = "total"
    seed: int = 0
    progress: bool = False


@dataclass(frozen=True)
class Made:
    """A posterior, and the seconds that its fit took; None where it was fitted elsewhere."""

    posterior: Posterior
    seconds: float | None


@dataclass(frozen=True)
class Failure:
    """A posterior that did not get through, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Comparison:
    """The rows of a comparison, what failed, and what was warned of."""

    evaluations: list[Evaluation]
    failures: list[Failure]
    notes: list[str]

    def __str__(self) -> str:
        """Return the table, with a line for each failure and warning below."""
        lines = [table(self.evaluations)] if self.evaluations else []
        lines += [f"{failure.name} failed: {failure.reason}" for failure in self.failures]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the tensors as plain values."""
        return {
            "evaluations": [evaluation.to_dict() for evaluation in self.evaluations],
            "failures": [{"name": failure.name, "reason": failure.reason} for failure in self.failures],
            "notes": self.notes,
        }


def fit_method(task: Task, method: Method) -> Made:
    """Convert the network, and fit the posterior where its method learns."""
    posterior = convert(task.network, method, likelihood=task.likelihood)
    epochs = method.epochs if task.epochs is None else task.epochs
    if not replace(method, epochs=epochs).learns:
        return Made(posterior, 0.0)
    if task.train is None:
        raise ValueError("There is no training data to fit on.")
    folder = None if task.checkpoint is None else task.checkpoint / method.name
    # A pass after the epochs may choose its settings on validation data; epochs would only measure on them.
    val = (task.chosen_on or task.val) if method.surveys else None
    start = time.perf_counter()
    fit(posterior, task.train, epochs=epochs, val_loader=val, checkpoint=folder, seed=task.seed, progress=task.progress)
    return Made(posterior, time.perf_counter() - start)


def compare(
    task: Task,
    makers: Mapping[str, Callable[[], Made]],
    *,
    each: Callable[[str], None] = lambda name: None,
) -> Comparison:
    """Make and evaluate posteriors one after another.

    Args:
        task: What they share.
        makers: How each is made, by the name of its row.
        each: Told the name of a row before the work on it begins.

    Returns:
        Two evaluations for each posterior, as made and calibrated, where the task has validation data; else one.
    """
    evaluations: list[Evaluation] = []
    failures: list[Failure] = []
    notes: list[str] = []
    plain = _PlainTraining(task)
    for name, make in makers.items():
        each(name)
        with _collected_warnings() as warned:
            try:
                made = make()
                cost = Cost(
                    fit=None if made.seconds is None else plain.multiple(made.seconds),
                    predict=_predict_cost(task, made.posterior),
                    fit_unit=plain.unit,
                )
                evaluations += evaluate_posterior(task, made.posterior, name, cost)
            except Exception as error:
                failures.append(Failure(name, first_line(error)))
        notes += [f"{name}: {text}" for text in dict.fromkeys(warned)]
    return Comparison(evaluations, failures, notes)


def evaluate_posterior(task: Task, posterior: Posterior, name: str, cost: Cost | None = None) -> list[Evaluation]:
    """Evaluate a posterior, and where the task has validation data once more after calibration."""

    def row(label: str) -> Evaluation:
        found = evaluate(
            posterior,
            task.test,
            ood=task.ood,
            name=label,
            score=task.score,
            seed=task.seed,
            progress=task.progress,
            **task.predicting,
        )
        return replace(found, cost=cost or Cost())

    rows = [row(name)]
    if task.val is not None:
        calibrate(posterior, task.val, num_draws=task.predicting.get("num_draws"), seed=task.seed)
        how = "temperature" if hasattr(posterior.likelihood, "temperature") else "variance scale"
        rows.append(row(f"{name} + {how}"))
    return rows


@contextmanager
def _collected_warnings() -> Iterator[list[str]]:
    """Collect the texts of warnings that are meant for users."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            yield texts
        finally:
            texts += [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, with its type where that is no sentence of this library.

    >>> first_line(ValueError("Labels must be 0 to 9.")), first_line(KeyError("a"))
    ('Labels must be 0 to 9.', "KeyError: 'a'")
    """
    line = str(error).strip().partition("\n")[0]
    return line if line and isinstance(error, ValueError | OSError | ImportError) else f"{type(error).__name__}: {line}"


class _PlainTraining:
    """The unit of the cost of fitting: the plain network's training if its time is known, else one epoch of it."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.seconds = task.plain_seconds
        self.unit: Literal["training", "epoch"] = "epoch" if task.plain_seconds is None else "training"
        if self.seconds is None and task.train is not None:
            # Before anything else is timed, and twice: what is loaded at first use must not count as training.
            _epoch_seconds(task, task.train)
            self.seconds = _epoch_seconds(task, task.train)

    def multiple(self, seconds: float) -> float:
        if seconds == 0:
            return 0.0
        assert self.seconds is not None  # something was fitted
        return seconds / self.seconds


def _epoch_seconds(task: Task, loader: DataLoader[Any]) -> float:
    """Time plain training on some batches, and scale to an epoch."""
    batches = list(islice(loader, PLAIN_BATCHES))
    num_data = len(loader) * (loader.batch_size or 1)
    posterior = convert(task.network, MAP(), likelihood=task.likelihood)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # nobody uses this posterior's accuracy
        history = fit(posterior, batches, epochs=1, num_data=num_data, progress=False)
    return history.seconds * len(loader) / len(batches)


def _predict_cost(task: Task, posterior: Posterior) -> float:
    inputs, _ = split_batch(next(iter(task.test)))
    return measure_cost(posterior, task.network, inputs, **task.predicting)
