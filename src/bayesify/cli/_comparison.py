"""Several posteriors of one network on the same data: make, fit, calibrate, evaluate; one failure stops no other."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

from torch import nn
from torch.utils.data import DataLoader

from bayesify._core.trees import split_batch
from bayesify.conversion import convert
from bayesify.evaluation import differences as paired
from bayesify.evaluation.evaluation import Cost, Evaluation, evaluate, measure_cost, table
from bayesify.fitting import fit
from bayesify.laws import Posterior, Refusal
from bayesify.methods import MAP, Method
from bayesify.prediction.calibration import calibrate
from bayesify.prediction.widening import widen

__all__ = ["Comparison", "Made", "Task", "compare", "evaluate_posterior", "first_line", "fit_method", "train"]

# A posterior, and the seconds that its fit took; None where it was fitted elsewhere.
Made: TypeAlias = tuple[Posterior, float | None]
PATIENCE = 10  # epochs
PLAIN_BATCHES = 20  # enough to time an epoch by


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every posterior of a comparison is made from and measured on.

    Attributes:
        network: The plain network, already trained.
        test: Batches for the table, and for nothing else.
        train: Batches to fit on, for methods that learn.
        val: Batches to calibrate on, and on which a method may choose settings of its own, as Laplace its prior.
        widens: Whether the width of every method's noise is found on `val`.
        calibrates: Whether every posterior is calibrated and measured once more.
        ood: Loaders of OOD inputs, by name.
        plain_seconds: What the cost of fitting is divided by; None measures one epoch of plain training instead.
        likelihood: What the outputs mean.
        checkpoint: A folder that gets one for each method.
        predicting: How predictions are made: arguments of `predict`.
        score: The uncertainty that detects.
        seed: Of everything random.
        progress: Whether the library shows its own bars.
    """

    network: nn.Module
    test: DataLoader[Any]
    train: DataLoader[Any] | None = None
    val: DataLoader[Any] | None = None
    widens: bool = False
    calibrates: bool = False
    ood: Mapping[str, DataLoader[Any]] = field(default_factory=dict)
    plain_seconds: float | None = None
    likelihood: str = "classification"
    checkpoint: Path | None = None
    predicting: Mapping[str, Any] = field(default_factory=dict)
    score: str = "total"
    seed: int = 0
    progress: bool = False

    def calibrate(self, posterior: Posterior, loader: DataLoader[Any]) -> None:
        """Calibrate a posterior for the predictions that are made here."""
        options: dict[str, Any] = {name: self.predicting.get(name) for name in ("num_draws", "views")}
        calibrate(posterior, loader, seed=self.seed, **options)


@dataclass(frozen=True)
class Comparison:
    """The rows of a comparison, why others failed, by name, what was warned of, and the level of intervals."""

    evaluations: list[Evaluation]
    failures: dict[str, str]
    notes: list[str]
    intervals: float | None = None

    def with_intervals(self, level: float | None) -> Comparison:
        """Show intervals of a level; a failure to compute them joins the others, since the table is worth having."""
        if level is None or not self.evaluations:
            return self
        try:
            for evaluation in self.evaluations:
                evaluation.intervals(level)
            return replace(self, intervals=level)
        except Exception as error:
            return replace(self, failures={**self.failures, "intervals": first_line(error)})

    @property
    def differences(self) -> paired.Comparison | None:
        """The paired differences to the first row, where intervals are shown and there are more rows."""
        if self.intervals is None or len(self.evaluations) < 2:
            return None
        return paired.compare(self.evaluations, level=self.intervals)

    @property
    def failed(self) -> list[str]:
        """A line for each failure."""
        return [f"{name} failed: {reason}" for name, reason in self.failures.items()]

    def __str__(self) -> str:
        """Return the table, with a line for each failure and warning below."""
        rows = [table(self.evaluations, intervals=self.intervals)] if self.evaluations else []
        if self.differences is not None:
            rows += ["", str(self.differences), ""]
        return "\n".join([*rows, *self.failed, *(f"note: {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the tensors as plain values."""
        return {
            "evaluations": [evaluation.to_dict(intervals=self.intervals) for evaluation in self.evaluations],
            **({} if self.differences is None else {"comparison": self.differences.to_dict()}),
            "failures": [{"name": name, "reason": reason} for name, reason in self.failures.items()],
            "notes": self.notes,
        }

    def with_report(self, path: Path, **content: Any) -> tuple[Comparison, Path | None]:
        """Write the report; a failure to do so joins the others, since the table is worth having."""
        if not self.evaluations:
            return self, None
        try:
            from bayesify.evaluation.report import write_report

            notes = [*content.pop("notes", []), *self.failed, *self.notes]
            return self, write_report(self.evaluations, path, notes=notes, **content)
        except Exception as error:
            return replace(self, failures={**self.failures, "report": first_line(error)}), None


def fit_method(task: Task, method: Method) -> Made:
    """Convert the network, fit the posterior where its method learns, and widen it where that is asked for."""
    start = time.perf_counter()
    posterior = convert(task.network, method, likelihood=task.likelihood)
    if method.learns:
        _fit(task, method, posterior)
    if task.widens and task.val is not None and not isinstance(method, MAP):
        if isinstance(reason := posterior.law.rescaling(), Refusal):
            warnings.warn(f"It is not widened: {reason}", stacklevel=2)
        else:
            options: dict[str, Any] = {name: task.predicting.get(name) for name in ("num_draws", "views")}
            widen(posterior, task.val, seed=task.seed, **options)
    return posterior, time.perf_counter() - start if method.learns or task.widens else 0.0


def _fit(task: Task, method: Method, posterior: Posterior) -> None:
    if task.train is None:
        raise ValueError("There is no training data to fit on.")
    folder = None if task.checkpoint is None else task.checkpoint / method.name
    # A pass after the epochs may choose its settings on validation data; epochs would only measure on them.
    val = task.val if method.surveys else None
    fit(posterior, task.train, val_loader=val, checkpoint=folder, seed=task.seed, progress=task.progress)


def train(
    network: nn.Module,
    loader: DataLoader[Any],
    val_loader: DataLoader[Any] | None,
    method: MAP,
    *,
    likelihood: str,
    **options: Any,
) -> nn.Module:
    """Train a network as it is, until its validation NLL no longer falls, and return it in evaluation mode."""
    posterior = convert(network, method, likelihood=likelihood)
    patience = None if val_loader is None else PATIENCE
    fit(posterior, loader, val_loader=val_loader, patience=patience, **options)
    return posterior.plain_network().eval()


def compare(
    task: Task, makers: Mapping[str, Callable[[], Made]], *, each: Callable[[str], None] = lambda name: None
) -> Comparison:
    """Make and evaluate posteriors one after another.

    Args:
        task: What they share.
        makers: How each is made, by the name of its row.
        each: Told the name of a row before the work on it begins.

    Returns:
        Two evaluations for each posterior, as made and calibrated, where the task calibrates; else one.
    """
    found = Comparison([], {}, [])
    unit: Literal["training", "epoch"] = "epoch" if task.plain_seconds is None else "training"
    plain = task.plain_seconds
    if plain is None and task.train is not None:
        # Before anything else is timed, and twice: what is loaded at first use must not count as training.
        _epoch_seconds(task, task.train)
        plain = _epoch_seconds(task, task.train)
    for name, make in makers.items():
        each(name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            try:
                posterior, seconds = make()
                inputs, _ = split_batch(next(iter(task.test)))
                cost = Cost(
                    fit=seconds and plain and seconds / plain,
                    predict=measure_cost(posterior, task.network, inputs, **task.predicting),
                    fit_unit=unit,
                )
                found.evaluations.extend(evaluate_posterior(task, posterior, name, cost))
            except Exception as error:
                found.failures[name] = first_line(error)
        texts = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
        found.notes.extend(f"{name}: {text}" for text in dict.fromkeys(texts))
    return found


def evaluate_posterior(task: Task, posterior: Posterior, name: str, cost: Cost | None = None) -> list[Evaluation]:
    """Evaluate a posterior, and where the task calibrates once more afterwards."""

    def row(label: str) -> Evaluation:
        more: dict[str, Any] = {"ood": task.ood, "score": task.score, "seed": task.seed, "progress": task.progress}
        found = evaluate(posterior, task.test, name=label, **more, **task.predicting)
        return replace(found, cost=cost or Cost())

    rows = [row(name)]
    if task.calibrates and task.val is not None:
        task.calibrate(posterior, task.val)
        rows.append(row(f"{name} + calibration"))
    return rows


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, with its type where that is no sentence of this library.

    >>> first_line(ValueError("Labels must be 0 to 9.")), first_line(KeyError("a"))
    ('Labels must be 0 to 9.', "KeyError: 'a'")
    """
    line = str(error).strip().partition("\n")[0]
    return line if line and isinstance(error, ValueError | OSError | ImportError) else f"{type(error).__name__}: {line}"


def _epoch_seconds(task: Task, loader: DataLoader[Any]) -> float:
    """Time plain training on some batches, and scale to an epoch."""
    batches = list(islice(loader, PLAIN_BATCHES))
    num_data = len(loader) * (loader.batch_size or 1)
    posterior = convert(task.network, MAP(), likelihood=task.likelihood)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # nobody uses this posterior's accuracy
        history = fit(posterior, batches, epochs=1, num_data=num_data, progress=False)
    return history.seconds * len(loader) / len(batches)
