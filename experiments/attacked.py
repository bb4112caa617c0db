"""How well a posterior notices attacks on CIFAR-10 images: PGD, one who knows the detector, FGSM of another network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

import bayesify
from bayesify import measure
from bayesify.data import noise_in_ball
from bayesify.decide import disagreement_avoided, fgsm, pgd
from experiments.config import Setting
from experiments.data import load
from experiments.networks import cifar_inputs, pretrained

__all__ = ["Attacked"]


@dataclass(frozen=True)
class Attacked:
    """Average precision of the mutual information, and the accuracy that is left, on attacked images.

    Attributes:
        split: "val", to choose settings by, or "test".
        images: How many, the first.
        draws: Of a prediction.
        attack_draws: In each of the 20 steps of an attack.
        weights: Of the mutual information in the goal of an attacker who knows the detector.
        source: The plain network that FGSM attacks and the posterior is then shown; None attacks none.
        radius: Of FGSM; that of PGD and of the noise is the paper's, .031.
    """

    split: Literal["val", "test"] = "val"
    images: int = 200
    draws: int = 20
    attack_draws: int = 5
    weights: tuple[float, ...] = ()
    source: str | None = "resnet44"
    radius: float = 0.031

    def __call__(self, posterior: bayesify.Posterior, setting: Setting, *, seed: int, trial: bool) -> dict[str, Any]:
        """Return a figure for each kind of attack."""
        number, draws, steps = (8, 2, 2) if trial else (self.images, self.draws, 20)
        data = load("cifar10", self.split)
        images, labels = data.inputs[:number], data.targets[:number]
        options: dict[str, Any] = {"num_draws": min(draws, self.attack_draws), "preprocess": cifar_inputs}

        def predicted(x: Tensor) -> Any:
            return bayesify.predict(posterior, cifar_inputs(x), num_draws=draws, seed=seed + 1)

        def climbed(goal: Any) -> Tensor:
            starts = range(0, number, 100)
            pairs = [(images[start : start + 100], labels[start : start + 100]) for start in starts]
            return torch.cat([pgd(posterior, x, goal(y), steps=steps, **options) for x, y in pairs])

        made: dict[str, Callable[[], Tensor]] = {
            "noise in the ball": partial(noise_in_ball, images, 0.031, generator=0),
            "pgd": partial(climbed, _same),
        }
        for weight in self.weights:
            goal = partial(disagreement_avoided, posterior.likelihood, weight=weight)
            made[f"pgd that knows the detector, weight {weight:g}"] = partial(climbed, goal)
        if self.source is not None:
            other = bayesify.convert(pretrained(self.source), "map").eval()
            single: dict[str, Any] = {"radius": self.radius, "num_draws": 1, "preprocess": cifar_inputs}
            made[f"fgsm of {self.source}"] = lambda: fgsm(other, images, labels, **single)
        own = predicted(images)
        row: dict[str, Any] = {"accuracy": round(measure.accuracy(own.probs, labels), 4)}
        for name, make in made.items():
            found = predicted(make())
            row[name] = {
                "average precision": round(measure.average_precision(own.epistemic, found.epistemic), 4),
                "by total entropy": round(measure.average_precision(own.score("total"), found.score("total")), 4),
                "accuracy": round(measure.accuracy(found.probs, labels), 4),
            }
        return {f"attacked, {self.split}": row}


def _same(labels: Tensor) -> Tensor:
    return labels
