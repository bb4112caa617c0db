"""What the scoreboard measures of a posterior and of a way to predict with it, in one row."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import bayesify
from bayesify import Posterior, Prediction, measure
from experiments.config import Setting
from experiments.cost import now, seconds
from experiments.examples import columns_of, figures, intervals
from experiments.measures import targets_of
from experiments.shift import Shift

__all__ = ["Board", "Way", "passes_of"]

IGNORED = -100
WIDENED_ON = 1000, 100_000  # so many validation examples, or labels in them, are enough for the width of noise
SCORES = ("total", "epistemic")


@dataclass(frozen=True)
class Way:
    """How predictions are made with a posterior, and what is fitted on validation data for it.

    Attributes:
        calibrate: Whether the temperature, and the pooling if it says so, are fitted.
        pooling: How draws and views are averaged; None is the library's own.
        temperatures: "one" for all members, "each" its own, or "auto"; None is the library's own.
        views: Names of what each input is seen as; none is the input itself.
        widened: Whether the scale of the noise is found first.
        num_draws: Draws; None takes the posterior's own number.
        how: The predictor.
        passes: Let the library choose a posterior of the plain network within so many passes, instead of the row's.
    """

    calibrate: bool = True
    pooling: str | None = None
    temperatures: str | None = None
    views: tuple[str, ...] = ()
    widened: bool = False
    num_draws: int | None = None
    how: str = "sampling"
    passes: int | None = None

    def ready(self, posterior: Posterior, setting: Setting, *, seed: int, trial: bool) -> Posterior:
        """Return a copy of the posterior, or the one that was chosen, made ready on the validation data."""
        if self.passes is not None:
            classes = setting.likelihood == "classification"
            told: dict[str, Any] = {} if classes else {"likelihood": copy.deepcopy(setting.likelihood)}
            chosen: Posterior = bayesify.choose(setting.network, setting.val, passes=self.passes, **told)
            return chosen
        made = copy.deepcopy(posterior)
        number = self.drawn(trial)
        if self.widened:
            bayesify.widen(made, _enough(made, setting.val), num_draws=number, views=self._views())
        if self.calibrate:
            wanted = {"pooling": self.pooling, "temperatures": self.temperatures, "views": self._views()}
            options: dict[str, Any] = {key: value for key, value in wanted.items() if value is not None}
            bayesify.calibrate(made, setting.val, num_draws=number, seed=seed, **options)
        return made

    def options(self, *, seed: int, trial: bool) -> dict[str, Any]:
        """Return the options of `predict`; calibration has left its views with the posterior."""
        options: dict[str, Any] = {"how": self.how, "num_draws": self.drawn(trial), "seed": seed}
        views = self._views()
        return options if views is None or self.calibrate else {**options, "views": views}

    def drawn(self, trial: bool) -> int | None:
        """Return the number of draws."""
        return self.num_draws if self.num_draws is None or not trial else min(4, self.num_draws)

    def _views(self) -> Any:
        return bayesify.Views(*self.views) if self.views else None


def _enough(posterior: Posterior, loader: Iterable[Any]) -> list[Any]:
    """Return the first batches, as many as a width needs."""
    taken, examples, labels = [], 0, 0
    for batch in loader:
        target = posterior.split_batch(batch)[1]
        taken.append(batch)
        examples, labels = examples + len(target), labels + target.numel()
        if examples >= WIDENED_ON[0] or labels >= WIDENED_ON[1]:
            break
    return taken


def passes_of(posterior: Posterior, options: Mapping[str, Any]) -> int | None:
    """Return how many passes a prediction makes, or None for predictors without draws.

    Each of finitely many functions sees every view; else views take turns among the draws. Draws that differ in the
    last layer alone share what lies before it, a pass for each view.
    """
    if options["how"] != "sampling":
        return None
    views = options.get("views") or getattr(posterior, "views", None)
    number = 1 if views is None else len(views)
    draws = len(posterior.keys(options["num_draws"], 0))
    if posterior.law.functions is not None:
        return draws * number
    return min(draws, number) if posterior.law.sites() == {_last(posterior.network)} else draws


def _last(network: nn.Module) -> nn.Module | None:
    """Return the last module that has parameters of its own."""
    owners = [module for module in network.modules() if next(module.parameters(recurse=False), None) is not None]
    return owners[-1] if owners else None


@dataclass(frozen=True)
class Board:
    """One row: what prediction costs, its quality with intervals, OOD inputs told apart, and the same under shift.

    Everything is measured with what was fitted on clean validation data. Columns of the single examples are returned
    too, as "examples", which the runner keeps aside.

    Attributes:
        way: How predictions are made.
        near: Which OOD sets are near ones; the others are far.
        resamples: Of the intervals.
        repeats: Of the ratio of times.
    """

    way: Way = field(default_factory=Way)
    near: tuple[str, ...] = ("mixed", "shuffled")
    resamples: int = 1000
    repeats: int = 5

    def __call__(self, posterior: Posterior, setting: Setting, *, seed: int, trial: bool) -> dict[str, Any]:
        """Return the row."""
        plain = bayesify.convert(setting.network, "map", likelihood=copy.deepcopy(setting.likelihood))
        once = seconds(lambda: bayesify.predict(plain, setting.val, how="mean"))
        began = now()
        ready = self.way.ready(posterior, setting, seed=seed, trial=trial)
        row: dict[str, Any] = {"made ready in predictions of the validation set": round((now() - began) / once, 1)}
        options = self.way.options(seed=seed, trial=trial)
        row["passes"] = passes_of(ready, options)
        if ready.choice is not None:
            row["chosen"] = ready.choice.chosen
        inputs = next(iter(setting.test))
        repeats = 1 if trial else self.repeats
        row["cost in plain passes"] = round(_cost(plain, ready, inputs, options, repeats), 2)
        row["fitted"] = _fitted(ready)
        own = bayesify.predict(ready, setting.test, **options)
        columns = columns_of(own, targets_of(ready, setting.test), scale=setting.scale)
        row["test"] = _rounded(figures(columns))
        made = intervals(columns, resamples=20 if trial else self.resamples)
        row["intervals"] = {name: [round(end, 5) for end in ends] for name, ends in made.items()}
        examples = dict(columns)
        row["ood"] = {}
        for name, loader in setting.ood.items():
            scores = _scores(ready, own, loader, options)
            row["ood"][name] = _rounded(_told_apart(scores))
            if own.score("total").ndim == 1:
                examples |= {f"{score}/{name}": other for score, (_, other) in scores.items()}
                examples |= {score: mine for score, (mine, _) in scores.items()}
        for kind, names in _kinds(setting.ood, self.near).items():
            row[kind] = _mean([row["ood"][name] for name in names])
        if setting.shifted is not None:
            row |= _under_shift(ready, setting.shifted(), options)
        return {**row, "examples": examples}


def _scores(
    posterior: Posterior, own: Prediction, loader: DataLoader[Any], options: Mapping[str, Any]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return each score of own and of OOD inputs, or of pixels with and without a class in the same scenes."""
    other = bayesify.predict(posterior, loader, **options)
    dense = own.score("total").ndim > 1
    anomaly = targets_of(posterior, loader) == IGNORED if dense else None
    found = {}
    for score in SCORES:
        values = other.score(score)
        pair = (own.score(score), values) if anomaly is None else (values[~anomaly], values[anomaly])
        if score == "total" or bool(pair[0].any()):  # of a single function nothing is epistemic
            found[score] = pair
    return found


def _told_apart(scores: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
    found = {}
    for score, pair in scores.items():
        found[f"auroc-{score}"] = measure.auroc(*pair)
        found[f"fpr95-{score}"] = measure.fpr_at_tpr(*pair, tpr=0.95)
    return found


def _kinds(names: Iterable[str], near: tuple[str, ...]) -> dict[str, list[str]]:
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault("near" if name in near else "far", []).append(name)
    return kinds


def _under_shift(posterior: Posterior, shifts: Iterable[Shift], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the means of error, NLL and ECE over all sets, and over those of each strength and of each corruption."""
    found = []
    for shift in shifts:
        prediction = bayesify.predict(posterior, shift.loader, **options)
        all_of_them = figures(columns_of(prediction, targets_of(posterior, shift.loader)))
        found.append((shift, {name: all_of_them[name] for name in ("error", "nll", "ece")}))
    return {
        "shift": _mean([one for _, one in found]),
        "shift by strength": {
            str(strength): _mean([one for shift, one in found if shift.strength == strength])
            for strength in dict.fromkeys(shift.strength for shift, _ in found)
        },
        "shift by corruption": {
            name: _mean([one for shift, one in found if shift.name == name])
            for name in dict.fromkeys(shift.name for shift, _ in found)
        },
    }


def _mean(rows: list[dict[str, float]]) -> dict[str, float]:
    shared = [name for name in rows[0] if all(name in row for row in rows)]
    return _rounded({name: statistics.mean(row[name] for row in rows) for name in shared})


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(float(value), 5) for name, value in values.items()}


def _fitted(posterior: Posterior) -> dict[str, list[float]]:
    """Return what calibration and the search for a scale of the noise may have changed."""
    found = {name: getattr(posterior.likelihood, name, None) for name in ("temperature", "exponent", "variance_scale")}
    found["noise scale"] = getattr(posterior.law, "noise_scale", None)
    return {
        name: [round(float(one), 4) for one in torch.as_tensor(value).flatten()]
        for name, value in found.items()
        if value is not None
    }


def _cost(plain: Posterior, ready: Posterior, batch: Any, options: Mapping[str, Any], repeats: int) -> float:
    """Return the median of the ratio of times, which take turns, after one pair that warms up."""
    inputs = ready.split_batch(batch)[0]
    ratios = []
    for _ in range(repeats + 1):
        ours = seconds(lambda: bayesify.predict(ready, inputs, **options))
        ratios.append(ours / seconds(lambda: bayesify.predict(plain, inputs, how="mean")))
    return statistics.median(ratios[1:])
