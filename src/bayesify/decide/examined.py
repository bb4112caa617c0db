"""Predictions of labelled examples, as a guard makes them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesify._core.trees import to_device
from bayesify.decide.scores import Score
from bayesify.laws import Posterior
from bayesify.likelihoods.prediction import FeaturePrediction, Prediction, RegressionPrediction
from bayesify.prediction import Predictor, as_predictor, posterior_device, predict

__all__ = ["Examined", "Settings", "check_kind", "examine"]


@dataclass(frozen=True)
class Settings:
    """How a guard predicts; its views are the posterior's.

    Attributes:
        predictor: The way to make a prediction.
        num_draws: How many draws; None takes the posterior's own number.
        seed: Of the draws.
    """

    predictor: Predictor
    num_draws: int | None = None
    seed: int = 0

    @property
    def described(self) -> str:
        """The predictor and its draws, in words."""
        draws = f" of {self.num_draws} draws" if self.num_draws else ""
        return f"{self.predictor!r}{draws}"

    def predicted(self, posterior: Posterior, inputs: Any, *, features: bool) -> tuple[Prediction, Tensor | None]:
        """Return the prediction of a batch, and its features (B, D) if they are wanted."""
        options: dict[str, Any] = {"num_draws": self.num_draws, "seed": self.seed}
        prediction = predict(posterior, inputs, how=self.predictor, **options)
        if not features:
            return prediction, None
        how = self.predictor if not self.predictor.variances else as_predictor("mean")
        found = predict(posterior, inputs, how=how, output="features", **options)
        assert isinstance(found, FeaturePrediction)
        return prediction, found.features.flatten(1)


@dataclass(frozen=True, eq=False)
class Examined:
    """Predictions of labelled examples.

    Attributes:
        prediction: Of all of them.
        targets: Their targets, (N,).
        features: Their features, (N, D), if they were asked for.
        inputs: The first batch of inputs.
    """

    prediction: Prediction
    targets: Tensor
    features: Tensor | None
    inputs: Any

    def scores(self, score: Score) -> Tensor:
        """Return a score of each example, (N,); raise where one is NaN."""
        found = score(self.prediction, self.features)
        if bool(found.isnan().any()):
            raise ValueError(
                f"The {score.label} of {int(found.isnan().sum())} of {len(found)} validation examples is NaN. Find the "
                "inputs that produce it (torch.isnan) and repair or remove them first."
            )
        return found

    def uncertainty(self, name: str) -> Tensor:
        """Return an uncertainty of each example, (N,)."""
        return self.scores(Score((name,)))

    def correct(self, tolerance: float | None) -> Tensor:
        """Return whether each answer is right, (N,)."""
        if isinstance(self.prediction, RegressionPrediction):
            error = (self.prediction.aligned(self.targets) - self.prediction.mean.double()).abs()
            assert tolerance is not None
            return error <= tolerance
        found = self.prediction.correct(self.targets)
        assert found is not None
        return found


def examine(posterior: Posterior, loader: Iterable[Any], settings: Settings, *, features: bool = False) -> Examined:
    """Predict all batches of (inputs, targets); examples whose label is -100 are left out."""
    predictions: list[Prediction] = []
    found: list[Tensor] = []
    targets: list[Tensor] = []
    example: Any = None
    device = posterior_device(posterior)
    for batch in loader:
        inputs, target = posterior.split_batch(to_device(batch, device))
        prediction, own = settings.predicted(posterior, inputs, features=features)
        check_kind(prediction)
        counted = prediction.counted(target).cpu()
        prediction, target = prediction.cpu(), target.detach().cpu()
        if not bool(counted.all()):
            prediction, target = prediction[counted], target[counted]
        predictions.append(prediction)
        targets.append(target)
        if own is not None:
            found.append(own.cpu()[counted])
        example = inputs if example is None else example
    if not predictions:
        raise ValueError("The validation loader gave no examples. Check its data set and sampler.")
    return Examined(Prediction.join(predictions), torch.cat(targets), torch.cat(found) if found else None, example)


def check_kind(prediction: Prediction) -> None:
    """Refuse what a guard cannot decide on."""
    if isinstance(prediction, FeaturePrediction) or prediction.score("epistemic").ndim != 1:
        shape = tuple(prediction.score("epistemic").shape)
        raise ValueError(
            f"The network gives {type(prediction).__name__} of shape {shape}, and a guard decides on one answer for "
            "each input: the positions of a map or the outputs of several questions are not independent, so that "
            "nothing could be promised. Fit PredictionSets or a Detector on scores that are averaged over them."
        )
    if prediction.classes is None and not isinstance(prediction, RegressionPrediction):
        raise ValueError(f"A guard decides on classes and numbers, and not on {type(prediction).__name__}.")
