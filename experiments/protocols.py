"""How well a posterior's scores find OOD and attacked inputs, by the protocols of published tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from bayesify import ClassificationPrediction, Posterior, Prediction, predict
from bayesify.decide import fgsm, pgd
from bayesify.evaluation.measures import aupr, auroc

__all__ = ["SCORES", "Separation", "anomaly_table", "attack_table", "separation", "shortest_fgsm", "shortest_pgd"]

SCORES = {
    "entropy": "total",
    "BALD": "epistemic",
    "variation ratio": "variation_ratio",
    "max probability": "msp",
    "model variance": "model_variance",
}
"""The scores of Wang et al. 2018, section 3.1, and the fields that hold them. What its tables call "VR" is the maximum
probability."""

FAR = 4.0  # half widths of the scale beyond which values of a set are not on it
AT_ONCE = 500  # inputs that are attacked together

EVERYWHERE = (-float("inf"), float("inf"))
ATTACKS = ("FGSM", "PGD")

Box = Literal["grey", "white"]


@dataclass(frozen=True)
class Separation:
    """How well a score tells two sets apart.

    Attributes:
        auroc: The probability that an OOD input has the higher score.
        aupr_ood: Area under the precision-recall curve with OOD inputs to be found ("AUPR+").
        aupr_own: The same with the own inputs to be found, by the negated score ("AUPR-").
    """

    auroc: float
    aupr_ood: float
    aupr_own: float


def separation(own: Prediction, ood: Prediction, scores: Mapping[str, str] | None = None) -> dict[str, Separation]:
    """Return how well each score of two predictions tells them apart.

    Example:
        >>> from bayesify import MAP, convert, predict
        >>> posterior = convert(torch.nn.Identity(), MAP())
        >>> sure, unsure = (predict(posterior, torch.tensor([[top, 0.0]])) for top in (9.0, 1.0))
        >>> separation(sure, unsure)["entropy"].auroc
        1.0
    """
    found = {}
    for name, field in (scores or SCORES).items():
        pair = own.score(field), ood.score(field)
        found[name] = Separation(auroc(*pair), aupr(*pair), aupr(*pair, positive="id"))
    return found


def anomaly_table(
    posterior: Posterior,
    inputs: Tensor,
    ood: Mapping[str, Tensor],
    *,
    factor: float = 1.0,
    bounds: tuple[float, float] = (0.0, 1.0),
    scores: Mapping[str, str] | None = None,
    num_draws: int | None = None,
    repeats: int = 1,
    seed: int = 0,
) -> dict[str, dict[str, Separation]]:
    """Return how well a posterior's scores find OOD inputs that are multiplied by a factor.

    Multiplying is a stress test: a network that extrapolates is surer of larger inputs, a posterior should not be (Wang
    et al. 2018, section 5.2.3). All sets must be on one scale before, or the factor compares scales.

    Args:
        posterior: Of a classifier.
        inputs: Own inputs, (N, ...).
        ood: OOD inputs by name, on the same scale: `bayesify.data.to_scale` puts them there.
        factor: What the OOD inputs, and they alone, are multiplied by.
        bounds: The scale.
        scores: Fields of a prediction by name; None takes `SCORES`.
        num_draws: Draws; None takes the posterior's own number.
        repeats: How often to draw anew; the figures are means.
        seed: Of the draws.

    Returns:
        By set and score.

    Example:
        >>> from bayesify import MCDropout, convert
        >>> posterior = convert(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.5)), MCDropout())
        >>> table = anomaly_table(posterior, torch.rand(9, 4), {"noise": torch.rand(9, 4)}, factor=5.0)
        >>> list(table), sorted(table["noise"])[:2]
        (['noise'], ['BALD', 'entropy'])
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, but it is {repeats}.")
    for name, values in {"the own inputs": inputs, **ood}.items():
        _check_scale(name, values, bounds)
    tables: list[dict[str, dict[str, Separation]]] = []
    for repeat in range(repeats):
        draws: dict[str, Any] = {"num_draws": num_draws, "seed": seed + repeat}
        own = predict(posterior, inputs, **draws)
        tables.append(
            {name: separation(own, predict(posterior, factor * x, **draws), scores) for name, x in ood.items()}
        )
    return {name: {score: _mean([table[name][score] for table in tables]) for score in tables[0][name]} for name in ood}


def attack_table(
    sources: Mapping[str, Posterior],
    detectors: Mapping[str, Posterior],
    inputs: Tensor,
    labels: Tensor,
    clean: Tensor,
    *,
    boxes: Sequence[Box] = ("grey", "white"),
    radius: float = 0.3,
    bounds: tuple[float, float] = (0.0, 1.0),
    attack_samples: int = 10,
    num_draws: int | None = None,
    seed: int = 0,
) -> dict[tuple[str, Box, str], dict[str, dict[str, Separation]]]:
    """Return how well detectors tell inputs that were attacked through a source from clean ones.

    Attacks are FGSM with a search for the shortest step that is enough, up to the whole width of the bounds, and PGD of
    40 steps in a ball; both leave inputs where they first are wrong (Wang et al. 2018, section 5.4). A grey box is one
    draw of the source, the same in every step; a white box is its average over `attack_samples` draws.

    Args:
        sources: Posteriors that are attacked, by name.
        detectors: Posteriors whose scores are asked, by name.
        inputs: What is attacked, (N, ...).
        labels: Its labels, (N,).
        clean: Other inputs, which are not attacked.
        boxes: What the attacker knows.
        radius: Of PGD's ball.
        bounds: What values inputs can have.
        attack_samples: Draws in each step of a white-box attack.
        num_draws: Draws of a detector; None takes its own number.
        seed: Of all draws.

    Returns:
        By (source, box, attack), then by detector and score.
    """
    own = {name: predict(detector, clean, num_draws=num_draws, seed=seed) for name, detector in detectors.items()}
    table = {}
    for (source, posterior), box, attack in product(sources.items(), boxes, ATTACKS):
        draws: dict[str, Any] = {"num_draws": 1 if box == "grey" else attack_samples, "bounds": bounds, "seed": seed}
        parts = list(zip(torch.split(inputs, AT_ONCE), torch.split(labels, AT_ONCE), strict=True))
        if attack == "PGD":
            steps: dict[str, Any] = {"radius": radius, "step": radius / 15, "steps": 40, "fresh_draws": box == "white"}
            moved = torch.cat([shortest_pgd(posterior, x, y, **steps, **draws) for x, y in parts])
        else:
            width = bounds[1] - bounds[0]
            moved = torch.cat([shortest_fgsm(posterior, x, y, radius=width, levels=100, **draws) for x, y in parts])
        table[source, box, attack] = {
            name: separation(own[name], predict(detector, moved, num_draws=num_draws, seed=seed))
            for name, detector in detectors.items()
        }
    return table


def shortest_fgsm(
    posterior: Posterior, inputs: Tensor, labels: Tensor, *, radius: float, levels: int, bounds: tuple[float, float],
    num_draws: int | None = None, seed: int = 0,
) -> Tensor:  # fmt: skip
    """Go along the signed gradient to the first of so many equal parts of the radius at which the label is wrong.

    Gradient and labels are of the same draws. What is wrong already stays where it is, and what is right all the way
    goes to the border.
    """
    ahead = fgsm(posterior, inputs, labels, radius=1.0, bounds=EVERYWHERE, num_draws=num_draws, seed=seed) - inputs
    x, direction = inputs.detach().clone(), ahead.sign()
    for level in range(1, levels + 1):
        left = _right(posterior, x, labels, num_draws, seed + 1)
        if not left.any():
            break
        x[left] = (inputs[left] + radius * level / levels * direction[left]).clamp(*bounds)
    return x


def shortest_pgd(
    posterior: Posterior, inputs: Tensor, labels: Tensor, *, radius: float, step: float, steps: int,
    bounds: tuple[float, float], fresh_draws: bool = True, num_draws: int | None = None, seed: int = 0,
) -> Tensor:  # fmt: skip
    """Take steps of `pgd` from the inputs themselves, and leave each input where its label is first wrong."""
    x, moving = inputs.detach(), torch.ones(len(inputs), dtype=torch.bool)
    for index in range(steps):
        draws = seed + index * fresh_draws
        moving = moving & _right(posterior, x, labels, num_draws, draws + 1)
        moved = pgd(
            posterior, x, labels, radius=step, step=step, steps=1, bounds=bounds, num_draws=num_draws, seed=draws,
            random_start=False,
        ).clamp(inputs - radius, inputs + radius)  # fmt: skip
        x = torch.where(moving.view(-1, *(1,) * (x.ndim - 1)), moved, x)
    return x


def _right(posterior: Posterior, x: Tensor, labels: Tensor, num_draws: int | None, seed: int) -> Tensor:
    prediction = predict(posterior, x, num_draws=num_draws, seed=seed)
    assert isinstance(prediction, ClassificationPrediction)
    return prediction.label == labels


def _check_scale(name: str, values: Tensor, bounds: tuple[float, float]) -> None:
    low, high = bounds
    if not low < high:
        raise ValueError(f"bounds are the smallest and the largest value, but they are {bounds}.")
    beyond = ((values - (low + high) / 2).abs() > FAR * (high - low) / 2).float().mean()
    if float(beyond) > 0.01:
        raise ValueError(
            f"{name!r} has values from {float(values.min()):.4g} to {float(values.max()):.4g}, and the scale is "
            f"{bounds}. Put every set on one scale first: bayesify.data.to_scale(x, *bounds)."
        )


def _mean(found: list[Separation]) -> Separation:
    means = {field.name: sum(getattr(one, field.name) for one in found) / len(found) for field in fields(Separation)}
    return Separation(**means)
