"""How well a posterior's scores find OOD and attacked inputs, by the protocols of published tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from bayesify._core.deprecation import renamed, renamed_fields
from bayesify.decide.attacks import fgsm, pgd
from bayesify.evaluation.measures.detection import aupr, auroc
from bayesify.laws import Posterior
from bayesify.likelihoods.prediction import Prediction
from bayesify.prediction import predict

__all__ = ["SCORES", "Separation", "anomaly_table", "attack_table", "separation"]

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

ATTACKS: dict[str, Callable[..., Tensor]] = {"FGSM": fgsm, "PGD": pgd}

Box = Literal["grey", "white"]


@renamed_fields(aupr_foreign="aupr_ood")
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


@renamed(foreign="ood")
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


@renamed(num_samples="num_draws", foreign="ood")
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


@renamed(num_samples="num_draws")
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
        if attack == "PGD":
            draws |= {"radius": radius, "step": radius / 15, "steps": 40, "random_start": False, "nearest": True}
            draws["fresh_draws"] = box == "white"
        else:
            draws |= {"radius": bounds[1] - bounds[0], "levels": 100}
        moved = torch.cat(
            [
                ATTACKS[attack](posterior, inputs[start : start + AT_ONCE], labels[start : start + AT_ONCE], **draws)
                for start in range(0, len(inputs), AT_ONCE)
            ]
        )
        table[source, box, attack] = {
            name: separation(own[name], predict(detector, moved, num_draws=num_draws, seed=seed))
            for name, detector in detectors.items()
        }
    return table


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
