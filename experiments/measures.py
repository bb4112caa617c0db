"""What experiments measure, each as a frozen dataclass that is called with a posterior and its setting."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import bayesify
from bayesify import Categorical, ClassificationPrediction, Posterior, RegressionPrediction, measure
from experiments.config import Setting

__all__ = ["Pixels", "Predictor", "Predictors", "Scored", "Widened", "calibrated", "labels_of", "quality", "targets_of"]

IGNORED = -100


@dataclass(frozen=True)
class Scored:
    """Quality before and after temperature scaling, and detection of OOD inputs, at the cost of one prediction.

    Every set is predicted once: the draws' ln p differ from their logits by a constant, which tempering does not see.

    Attributes:
        num_draws: Draws; None takes the posterior's own number.
        how: The predictor.
        test: Whether the test set is looked at; settings are compared on the validation set alone.
    """

    num_draws: int | None = None
    how: str = "sampling"
    test: bool = True

    def __call__(self, posterior: Posterior, setting: Setting, *, seed: int, trial: bool) -> dict[str, Any]:
        """Return the temperature, and measures on the validation and the test set, as it is and with it."""
        drawn = self.how == "sampling"

        def logits(loader: DataLoader[Any]) -> tuple[Tensor, Tensor]:
            """Return ln p of the draws (S, N, C), or of a prediction without draws (1, N, C), and what is epistemic."""
            number = self.num_draws if self.num_draws is None or not trial else min(3, self.num_draws)
            options: dict[str, Any] = {"how": self.how, "num_draws": number, "keep_samples": drawn}
            found = bayesify.predict(posterior, loader, seed=seed, **options)
            assert isinstance(found, ClassificationPrediction)
            if not drawn:
                return found.log_probs[None], found.epistemic
            assert found.samples is not None
            made = found.samples.clamp_min(torch.finfo(torch.float32).tiny).log()
            if made.ndim == 3:
                return made, found.epistemic
            counted = targets_of(posterior, loader) != IGNORED  # tokens are examples
            return made[:, counted], found.epistemic[counted]

        val = logits(setting.val)[0], labels_of(posterior, setting.val)
        if not self.test:
            return calibrated(val, None)
        own, epistemic = logits(setting.test)
        others = {name: logits(loader) for name, loader in setting.ood.items()}
        row = calibrated(val, (own, labels_of(posterior, setting.test)), {name: one[0] for name, one in others.items()})
        if not drawn:  # one prediction has no draws that disagree: its own epistemic part counts
            for part in ("test", "test, calibrated"):
                row[part] = {key: value for key, value in row[part].items() if "-epistemic/" not in key}
            for name, (_, other) in others.items():
                row["test"][f"auroc-epistemic/{name}"] = round(measure.auroc(epistemic, other), 5)
        return row


@dataclass(frozen=True)
class Widened(Scored):
    """The same after the width of the noise was found on the validation set."""

    def __call__(self, posterior: Posterior, setting: Setting, *, seed: int, trial: bool) -> dict[str, Any]:
        """Return the measures, and by how much the noise is wider."""
        made = copy.deepcopy(posterior)
        number = self.num_draws if self.num_draws is None or not trial else min(3, self.num_draws)
        bayesify.widen(made, setting.val, num_draws=number, seed=seed)
        row = super().__call__(made, setting, seed=seed, trial=trial)
        return {**row, "factor": round(made.widening.factor if made.widening else 1.0, 4)}


def labels_of(posterior: Posterior, loader: DataLoader[Any]) -> Tensor:
    """Return all targets of a loader that count, of tokens or pixels too, as one list."""
    targets = targets_of(posterior, loader)
    return targets if targets.ndim == 1 else targets[targets != IGNORED]


def targets_of(posterior: Posterior, loader: DataLoader[Any]) -> Tensor:
    """Return all targets of a loader."""
    return torch.cat([torch.as_tensor(posterior.split_batch(batch)[1]) for batch in loader])


def calibrated(
    val: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor] | None, ood: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """Return measures of logits (S, N, C) with labels (N,), as they are and with the temperature of the first."""
    plain, tempered = Categorical(), Categorical()
    tempered.calibrate([val])
    row: dict[str, Any] = {"temperature": round(float(tempered.temperature), 4)}
    for likelihood, suffix in ((plain, ""), (tempered, ", calibrated")):
        row["validation" + suffix] = _detection(likelihood, *val, {})
        if test is not None:
            row["test" + suffix] = _detection(likelihood, *test, ood or {})
    return row


def quality(prediction: ClassificationPrediction, labels: Tensor) -> dict[str, float]:
    """Return what a prediction is worth on labelled examples."""
    right = (prediction.label == labels).double()
    return {
        "accuracy": measure.accuracy(prediction.probs, labels),
        "nll": measure.nll(prediction.probs, labels),
        "brier": measure.brier(prediction.probs, labels),
        "ece": measure.ece(prediction.probs, labels),
        "aurc": measure.aurc(prediction.score("msp"), right),
    }


def _detection(
    likelihood: Categorical, logits: Tensor, labels: Tensor, others: Mapping[str, Tensor]
) -> dict[str, float]:
    own = _prediction(likelihood, logits)
    found = quality(own, labels)
    for name, other in others.items():
        ood = _prediction(likelihood, other)
        for score in ("total", "epistemic"):
            found |= _told_apart(own.score(score), ood.score(score), f"{score}/{name}")
    return _rounded(found)


def _told_apart(own: Tensor, ood: Tensor, label: str) -> dict[str, float]:
    return {
        f"auroc-{label}": measure.auroc(own, ood),
        f"aupr-{label}": measure.average_precision(own, ood),
        f"fpr95-{label}": measure.fpr_at_tpr(own, ood, tpr=0.95),
    }


def _prediction(likelihood: Categorical, logits: Tensor) -> ClassificationPrediction:
    stream = likelihood.stream()
    stream.add(logits)
    prediction = stream.result()
    assert isinstance(prediction, ClassificationPrediction)
    return prediction


def _rounded(figures: Mapping[str, Any]) -> dict[str, float]:
    return {name: round(float(value), 5) for name, value in figures.items()}


@dataclass(frozen=True)
class Predictor:
    """A way to predict: what the table calls it, how, and by how many draws."""

    name: str
    how: str
    num_draws: int | None = None


@dataclass(frozen=True)
class Predictors:
    """Predictors side by side; those without draws also with the variance scale of the validation set.

    The cost is in passes of the plain network over the test set, timed in the same run.

    Attributes:
        predictors: Which.
        scaled: Whether variance scales are fitted on the validation set.
    """

    predictors: tuple[Predictor, ...]
    scaled: bool = True

    def __call__(self, posterior: Posterior, setting: Setting, *, seed: int, trial: bool) -> dict[str, Any]:
        """Return measures by predictor, {"test": ..., "test, scaled": ..., "variance scale": ...} each."""
        return {one.name: self._measured(one, posterior, setting, seed, trial) for one in self.predictors}

    def _measured(
        self, one: Predictor, posterior: Posterior, setting: Setting, seed: int, trial: bool
    ) -> dict[str, Any]:
        number = None if one.num_draws is None else min(one.num_draws, 3 if trial else one.num_draws)
        found: dict[str, Any] = {}
        scales = {"": 1.0}
        if self.scaled and one.how not in ("sampling", "mean"):
            scales[", scaled"] = bayesify.fit_variance_scale(posterior, setting.val, how=one.how)
            found["variance scale"] = round(scales[", scaled"], 5)
        targets = targets_of(posterior, setting.test)
        plain = bayesify.convert(setting.network, "map", likelihood=setting.likelihood)
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        for suffix, scale in scales.items():
            options: dict[str, Any] = {"how": one.how, "num_draws": number, "seed": seed, "variance_scale": scale}
            began = clock()
            bayesify.predict(plain, setting.test, how="mean")
            middle = clock()
            own = bayesify.predict(posterior, setting.test, **options)
            cost = (clock() - middle) / (middle - began)
            found["predictor"] = getattr(own, "predictor", None)
            if isinstance(own, RegressionPrediction):
                figures: dict[str, Any] = _regression(own, targets, setting.scale)
            else:
                assert isinstance(own, ClassificationPrediction)
                figures = {**quality(own, targets), "epistemic": own.epistemic.mean()}
            for name, loader in setting.ood.items():
                other = bayesify.predict(posterior, loader, **options)
                for score in ("total", "epistemic"):
                    figures[f"auroc-{score}/{name}"] = measure.auroc(own.score(score), other.score(score))
            found["test" + suffix] = _rounded({**figures, "cost in plain passes": cost})
        return found


def _regression(prediction: RegressionPrediction, targets: Tensor, scale: float) -> dict[str, Any]:
    targets = targets.reshape(prediction.mean.shape)
    return {
        "rmse": measure.rmse(prediction.mean, targets) * scale,
        "nll": measure.gaussian_nll(prediction.mean, prediction.variance, targets) + math.log(scale),
        "coverage": measure.interval_coverage(*prediction.interval(0.95), targets),
        "epistemic share": (prediction.epistemic / prediction.variance).mean(),
    }


@dataclass(frozen=True)
class Pixels:
    """Segmentation: quality over pixels, and how well pixels without a class are told from the others of their scenes.

    Attributes:
        classes: How many classes there are.
        ignored: The label of pixels that no class describes.
    """

    classes: int
    ignored: int = -100

    def __call__(self, posterior: Posterior, setting: Setting, *, seed: int, trial: bool) -> dict[str, Any]:
        """Return measures on the validation and the test scenes, as it is and calibrated."""
        row: dict[str, Any] = {}
        tempered = copy.deepcopy(posterior)
        bayesify.calibrate(tempered, setting.val)
        for kind, one in (("", posterior), (", calibrated", tempered)):
            row["validation" + kind] = self._measured(one, setting.val, {}, seed)
            row["test" + kind] = self._measured(one, setting.test, setting.ood, seed)
        return row

    def _measured(
        self, posterior: Posterior, own: DataLoader[Any], ood: Mapping[str, DataLoader[Any]], seed: int
    ) -> dict[str, float]:
        labels = targets_of(posterior, own)
        prediction = bayesify.predict(posterior, own, seed=seed)
        assert isinstance(prediction, ClassificationPrediction)
        found = {
            "miou": miou(labels, prediction.label, self.classes, self.ignored),
            "accuracy": measure.accuracy(prediction.probs, labels),
            "nll": measure.nll(prediction.probs, labels),
            "ece": measure.ece(prediction.probs, labels),
        }
        for name, loader in ood.items():
            anomaly = targets_of(posterior, loader) == self.ignored
            prediction = bayesify.predict(posterior, loader, seed=seed)
            for score in ("total", "epistemic"):
                values = prediction.score(score)
                found |= _told_apart(values[~anomaly], values[anomaly], f"{score}/{name}")
        return _rounded(found)


def miou(labels: Tensor, predicted: Tensor, classes: int, ignored: int = -100) -> float:
    """Return the mean over classes of intersection over union, where labels count.

    >>> miou(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), 2)
    0.5
    """
    counted = labels != ignored
    labels, predicted = labels[counted], predicted[counted]
    found = []
    for label in range(classes):
        union = ((labels == label) | (predicted == label)).sum()
        if union:
            found.append((((labels == label) & (predicted == label)).sum() / union).item())
    return sum(found) / len(found)
