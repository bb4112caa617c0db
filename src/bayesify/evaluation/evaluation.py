"""Evaluate posteriors: quality, detection of OOD inputs and cost, and a table that compares several."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bayesify._core.deprecation import renamed, renamed_fields, warn_renamed
from bayesify._core.dividing import Noted
from bayesify._core.inputs import as_loader
from bayesify._core.maths import IGNORED
from bayesify._core.modes import evaluation_mode
from bayesify._core.trees import call, to_device
from bayesify.evaluation import measures
from bayesify.evaluation.comparison import FIT_UNITS, LEVEL, table
from bayesify.evaluation.intervals import Interval, check_level, interval
from bayesify.evaluation.measures.arguments import check_count
from bayesify.evaluation.resampling import MAX_RISK, Replicates, resample
from bayesify.laws import Posterior, require_posterior
from bayesify.likelihoods.prediction import ClassificationPrediction, Prediction, RegressionPrediction
from bayesify.methods import source_of
from bayesify.prediction import How, Views, posterior_device, predict
from bayesify.selection import Conversion

NUM_REPLICATES = 1000  # of which 25 lie beyond each end of an interval of level 0.95

__all__ = ["IGNORED", "Cost", "Evaluation", "evaluate", "measure_cost", "right_or_wrong", "table", "to_json"]


@dataclass(frozen=True)
class Cost:
    """What a posterior costs, in multiples of the plain network's own cost in the same run.

    Attributes:
        fit: Time of fitting divided by the time of what `fit_unit` names; None if it was not measured.
        predict: Time of `predict` divided by that of one plain pass over the same inputs; None if not measured.
        fit_unit: "epoch" (one epoch of plain training) or "training" (the plain network's whole training).
    """

    fit: float | None = None
    predict: float | None = None
    fit_unit: Literal["epoch", "training"] = "epoch"

    def __post_init__(self) -> None:
        """Check the numbers and the unit."""
        if any(value is not None and not value >= 0 for value in (self.fit, self.predict)):
            raise ValueError(f"Costs are multiples of at least 0, but they are {self.fit} and {self.predict}.")
        if self.fit_unit not in FIT_UNITS:
            raise ValueError(f"fit_unit must be one of {list(FIT_UNITS)}, but it is {self.fit_unit!r}.")


@renamed_fields(foreign="ood")
@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """What one posterior achieved on a test set, and on out-of-distribution (OOD) sets.

    Attributes:
        name: What tables and figures call it.
        metrics: By name. Classification: accuracy, nll, brier, ece, aurc, coverage-at-1-risk (the largest share of
            inputs that can be answered, most confident first, with at most 1 % of the answers wrong). Regression: rmse,
            nll, crps, and coverage and width of 95 % intervals. Both, for each OOD set: auroc/<set> and
            fpr-at-95-ood-recall/<set> by `score`, and auroc-epistemic/<set>. The second is the share of test inputs
            that are called OOD at the threshold that finds 95 % of the OOD inputs. Intervals: `interval(name)`.
        prediction: On the test set, in main memory.
        targets: In the order of the prediction; -100 where a position does not count.
        ood: Predictions on the OOD sets, by name.
        cost: Multiples of the plain network's; set it with `dataclasses.replace(evaluation, cost=...)`.
        conversion: What was random.
        score: The uncertainty that auroc and fpr-at-95-ood-recall rank by; aurc and coverage-at-1-risk rank by the
            maximum probability, as is usual.
    """

    name: str
    metrics: dict[str, float]
    prediction: Prediction
    targets: Tensor
    ood: dict[str, Prediction] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)
    conversion: Conversion | None = None
    score: str = "total"
    _resampled: dict[tuple[int, int], Replicates] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Let metrics be found by their old names."""
        object.__setattr__(self, "metrics", _Metrics(self.metrics))

    def __repr__(self) -> str:
        """Show the name and the metrics."""
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        return f"Evaluation({self.name!r}, {len(self.prediction)} examples: {metrics})"

    @property
    def deterministic(self) -> bool:
        """Whether nothing was random: the epistemic uncertainty is zero everywhere."""
        return not bool(self.prediction.score("epistemic").any())

    def interval(
        self, name: str, level: float = 0.95, *, num_replicates: int = NUM_REPLICATES, seed: int = 0
    ) -> Interval:
        """Return how far chance alone may have moved a measure, given the size of the test set.

        A bootstrap over examples: the measure on test sets (and OOD sets) whose examples are drawn from the given ones
        with replacement, and the quantiles of what it is there. For dense outputs the unit is the example, an image or
        a sentence, whose positions belong together. It says nothing of another training or other draws.

        The ECE of finitely many examples is above the true one, most where the true one is small; its lower end allows
        for that (see `weighted.ece_floor`), and reaches zero where the data cannot show a miscalibration.

        Args:
            name: One of `metrics`.
            level: In this share of all test sets the interval holds the truth.
            num_replicates: How many resampled sets, R.
            seed: Of the resampled sets.

        Returns:
            The measure with its interval.

        Costs R operations per example for means and the ECE, and R per position for what ranks positions (AURC,
        coverage at a risk, detection): seconds for all measures of 10,000 examples. What is found is kept.

        Example:
            >>> import bayesify
            >>> given = [(torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1, 1, 1]))]
            >>> result = evaluate(bayesify.convert(nn.Identity(), "map"), given)
            >>> str(result.interval("accuracy"))
            '0.75 [0.25, 1]'
        """
        check_level(level, num_replicates)
        found = self.replicates(num_replicates, seed=seed, names=[name])
        if name not in self.metrics or name not in found.values:
            raise ValueError(f"There is no interval of {name!r}; the metrics are {list(self.metrics)}.")
        return interval(self.metrics[name], found.values[name], level, found.floors.get(name))

    def intervals(
        self, level: float = 0.95, *, num_replicates: int = NUM_REPLICATES, seed: int = 0
    ) -> dict[str, Interval]:
        """Return the intervals of all measures, see `interval`."""
        known = self.replicates(num_replicates, seed=seed).values
        options: dict[str, Any] = {"num_replicates": num_replicates, "seed": seed}
        return {name: self.interval(name, level, **options) for name in self.metrics if name in known}

    def replicates(
        self, num_replicates: int = NUM_REPLICATES, *, seed: int = 0, names: Collection[str] | None = None
    ) -> Replicates:
        """Return measures on resampled sets, of all names or of some at least, see `interval`; they are kept."""
        key = check_count(num_replicates, "num_replicates"), seed
        found = self._resampled.setdefault(key, Replicates({}, {}))
        missing = [name for name in (self.metrics if names is None else names) if name not in found.values]
        if missing:
            options: dict[str, Any] = {"score": self.score, "num_replicates": num_replicates, "seed": seed}
            more = resample(self.prediction, self.targets, self.ood, names=missing, **options)
            found.values.update(more.values)
            found.floors.update(more.floors)
        return found

    def to_dict(self, *, intervals: float | None = None) -> dict[str, Any]:
        """Return everything but the tensors as plain values; a number that is not finite becomes None.

        Args:
            intervals: The level of intervals that are part of it; None leaves them out.
        """
        found = {} if intervals is None else self.intervals(intervals)
        more = {} if intervals is None else {"intervals": {name: one.to_dict() for name, one in found.items()}}
        return {
            "name": self.name,
            "examples": len(self.prediction),
            "ood": {name: len(prediction) for name, prediction in self.ood.items()},
            "score": self.score,
            "metrics": {name: value if math.isfinite(value) else None for name, value in self.metrics.items()},
            **more,
            "cost": asdict(self.cost),
            "conversion": None if self.conversion is None else [asdict(row) for row in self.conversion.rows],
        }


class _Metrics(dict[str, float]):
    """Metrics by name, which know an old name too."""

    def __missing__(self, name: str) -> float:
        old, _, data = name.partition("/")
        if old != "fpr95":
            raise KeyError(name)
        warn_renamed(f'metrics["{name}"]', f'metrics["fpr-at-95-ood-recall/{data}"]')
        return self[f"fpr-at-95-ood-recall/{data}"]


@renamed(num_samples="num_draws", foreign="ood")
def evaluate(
    posterior: Posterior,
    loader: Iterable[Any],
    *,
    ood: Mapping[str, Iterable[Any]] | None = None,
    num_draws: int | None = None,
    seed: int = 0,
    name: str | None = None,
    score: str = "total",
    how: How = "sampling",
    views: Views | Sequence[Any] | str | None = None,
    progress: bool = False,
) -> Evaluation:
    """Predict a test set and OOD sets, and measure the predictions.

    Args:
        posterior: Any posterior; its likelihood says whether this is classification or regression.
        loader: Batches of (inputs, targets); each is read once, so a shuffled loader is fine.
        ood: Sets that the posterior should find suspicious, by name: loaders, with or without targets, or tensors.
        num_draws: How many draws; None takes the posterior's own number.
        seed: Of the draws.
        name: What tables call it; None takes the method's name.
        score: The uncertainty that finds OOD inputs: "total", or another of `prediction.scores`.
        how: How predictions are made, see `predict`.
        views: What of the inputs the network sees, see `predict`.
        progress: Whether to show progress bars.

    Returns:
        The evaluation. A posterior without randomness has an epistemic uncertainty of zero everywhere, and therefore
        an auroc-epistemic of 0.5. A custom likelihood without noise has only an rmse where its variance is zero.

    Costs one prediction of every set; keeps the predictions, not their samples.

    Example:
        >>> import bayesify
        >>> data = torch.utils.data.TensorDataset(torch.eye(4), torch.arange(4))
        >>> loader = torch.utils.data.DataLoader(data, batch_size=2)
        >>> network = nn.Linear(4, 4)
        >>> _ = network.load_state_dict({"weight": 9 * torch.eye(4), "bias": torch.zeros(4)})
        >>> result = evaluate(bayesify.convert(network, "map"), loader, ood={"zeros": torch.zeros(3, 4)})
        >>> result.metrics["accuracy"], result.metrics["auroc/zeros"], result.metrics["auroc-epistemic/zeros"]
        (1.0, 1.0, 0.5)
    """
    require_posterior(posterior)
    if ood is not None and not isinstance(ood, Mapping):
        raise TypeError(f"ood maps names to sets, ood={{'photos': loader}}, but it is a {type(ood).__name__}.")

    def predicted(inputs: Any) -> Prediction:
        options: dict[str, Any] = {"how": how, "views": views, "num_draws": num_draws, "seed": seed}
        return predict(posterior, inputs, progress=progress, **options).cpu()

    # Targets are noted as they come, since a loader that shuffles gives another order when it is read again.
    noted = Noted(
        as_loader(loader, "evaluate"), lambda batch: torch.as_tensor(posterior.split_batch(batch)[1]).detach().cpu()
    )
    prediction = predicted(noted)
    prediction.score(score)  # a wrong name should not wait for the OOD sets
    targets = _counted(posterior, prediction, torch.cat(noted.notes))
    metrics = _metrics(prediction, targets)
    outside = {key: predicted(inputs) for key, inputs in (ood or {}).items()}
    for key, other in outside.items():
        scores = prediction.score(score), other.score(score)
        metrics[f"auroc/{key}"] = measures.auroc(*scores)
        metrics[f"fpr-at-95-ood-recall/{key}"] = measures.fpr_at_tpr(*scores, tpr=0.95)
        metrics[f"auroc-epistemic/{key}"] = measures.auroc(prediction.score("epistemic"), other.score("epistemic"))
    return Evaluation(
        name=name or source_of(posterior) or posterior.law.name,
        metrics=metrics,
        prediction=prediction,
        targets=targets,
        ood=outside,
        conversion=posterior.conversion,
        score=score,
    )


def _counted(posterior: Posterior, prediction: Prediction, targets: Tensor) -> Tensor:
    """Return targets in the shape of the prediction, with the one label that does not count."""
    labels = posterior.likelihood.labels(targets)
    targets = targets if labels is None else labels
    shape = prediction.score("total").shape
    if targets.ndim == len(shape) + 1 and targets.shape[-1] == 1:  # likelihoods drop such a dimension too
        targets = targets[..., 0]
    return targets


def right_or_wrong(prediction: ClassificationPrediction, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return what predictions are ranked by to be left to a person, and whether they are right, where it counts."""
    counts = prediction.counted(targets)
    return prediction.msp[counts], prediction.correct(targets)[counts]


def _metrics(prediction: Prediction, targets: Tensor) -> dict[str, float]:
    if isinstance(prediction, ClassificationPrediction):
        probs = prediction.probs
        metrics = {
            "accuracy": measures.accuracy(probs, targets),
            "nll": measures.nll(None, targets, log_probs=prediction.log_probs),
            "brier": measures.brier(probs, targets),
            "ece": measures.ece(probs, targets),
        }
        ranked = right_or_wrong(prediction, targets)
        metrics["aurc"] = measures.aurc(*ranked)
        metrics["coverage-at-1-risk"] = measures.coverage_at_risk(*ranked, max_risk=MAX_RISK)
        return metrics
    if isinstance(prediction, RegressionPrediction):
        mean, variance = prediction.mean, prediction.variance
        metrics = {"rmse": measures.rmse(mean, targets)}
        if prediction.discrete or bool((variance > 0).all()):  # a rate of 0 is a distribution too
            interval = prediction.interval(LEVEL)
            metrics["nll"] = -prediction.log_prob(targets).mean().item()
            if type(prediction) is RegressionPrediction:  # others are no Gaussians
                metrics["crps"] = measures.crps_gaussian(mean, variance, targets)
            metrics["coverage"] = measures.interval_coverage(*interval, targets)
            metrics["width"] = measures.interval_width(*interval)
        return metrics
    raise TypeError(
        f"A {type(prediction).__name__} cannot be evaluated: the likelihood must give a ClassificationPrediction or a "
        "RegressionPrediction."
    )


@renamed(num_samples="num_draws")
def measure_cost(
    posterior: Posterior,
    network: nn.Module,
    inputs: Any,
    *,
    num_draws: int | None = None,
    how: How = "sampling",
    views: Views | Sequence[Any] | str | None = None,
    repeats: int = 5,
) -> float:
    """Measure what a prediction costs, as a multiple of one pass of the plain network.

    The median over repeats of t(predict) / t(plain pass). The two take turns, so that what else the machine does
    reaches both; the copy of the outputs to main memory is part of both, which waits for any device.

    Args:
        posterior: The posterior.
        network: The plain network, on the same device; it runs in evaluation mode and is left as it was.
        inputs: One batch, of the size that will be predicted at once.
        num_draws: How many draws; None takes the posterior's own number.
        how: How predictions are made, see `predict`.
        views: What of the inputs the network sees, see `predict`.
        repeats: How many ratios; one more pair warms up.

    Returns:
        The ratio.

    Example:
        >>> import bayesify
        >>> network = nn.Linear(8, 2)
        >>> measure_cost(bayesify.convert(network, "map"), network, torch.randn(16, 8)) > 0
        True
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, but it is {repeats}.")
    inputs = to_device(inputs, posterior_device(posterior))

    def bayesian() -> Any:
        return predict(posterior, inputs, how=how, views=views, num_draws=num_draws, seed=0).cpu()

    def plain() -> Any:
        return posterior.read(call(network, inputs)).cpu()

    with torch.no_grad(), evaluation_mode(network):
        ratios = [_seconds(bayesian) / _seconds(plain) for _ in range(repeats + 1)]
    return statistics.median(ratios[1:])


def _seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def to_json(evaluations: Sequence[Evaluation]) -> str:
    """Return evaluations as JSON text, without their tensors.

    >>> json.loads(to_json([]))
    {'format': 1, 'evaluations': []}
    """
    values = {"format": 1, "evaluations": [evaluation.to_dict() for evaluation in evaluations]}
    return json.dumps(values, indent=2, allow_nan=False)
