"""What each test example adds to the figures of a row: figures are made of it, and intervals, of rows and between rows.

A row of the scoreboard keeps columns of one number for each example (and pixel) in a file beside the checkpoints, found
by the hash of the row's configuration and its seed. Examples are drawn anew with replacement, the same ones for both
rows of a pair; the pixels of a scene stay together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify import ClassificationPrediction, Prediction, RegressionPrediction, measure

__all__ = ["columns_of", "figures", "intervals", "load_columns", "save_columns"]

Columns = Mapping[str, Tensor]
Interval = tuple[float, float]
BINS, RISK, LEVEL = 15, 0.01, 0.95


def columns_of(prediction: Prediction, targets: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
    """Return the columns of a prediction, (N, ...) each.

    Classification: ln p of the label, whether the answer is right, one minus the largest probability, the Brier score.
    Regression, in units of `scale`: the error, ln p, the CRPS, and whether the 95 % interval holds the target.

    Args:
        prediction: Of the test set.
        targets: All of which count.
        scale: The standard deviation of the targets, if they were divided by it.
    """
    if isinstance(prediction, ClassificationPrediction):
        if not bool(prediction.counted(targets).all()):
            raise ValueError("Every position of the test set must have a label: some are marked as not counting.")
        one_hot = torch.nn.functional.one_hot(targets, prediction.probs.shape[-1])
        return {
            "log_prob": prediction.log_prob(targets),
            "correct": prediction.correct(targets),
            "msp": prediction.msp,
            "brier": (prediction.probs.double() - one_hot).square().sum(-1),
        }
    assert isinstance(prediction, RegressionPrediction)
    mean, std = prediction.mean.double(), prediction.variance.double().sqrt()
    targets = targets.reshape(mean.shape).double()
    low, high = prediction.interval(LEVEL)
    score = (targets - mean) / std
    density = torch.exp(-0.5 * score.square()) / math.sqrt(2 * math.pi)
    crps = std * (score * torch.erf(score / math.sqrt(2)) + 2 * density - 1 / math.sqrt(math.pi))
    return {
        "error": scale * (mean - targets),
        "log_prob": -0.5 * score.square() - 0.5 * math.log(2 * math.pi) - (scale * std).log(),
        "crps": scale * crps,
        "covered": (low.double() <= targets) & (targets <= high.double()),
    }


def figures(columns: Columns) -> dict[str, float]:
    """Return what the columns amount to, by name.

    >>> found = figures(
    ...     {
    ...         "log_prob": torch.tensor([-0.1, -2.0]),
    ...         "correct": torch.tensor([True, False]),
    ...         "msp": torch.tensor([0.1, 0.3]),
    ...         "brier": torch.tensor([0.02, 1.2]),
    ...     }
    ... )
    >>> round(found["error"], 4), round(found["nll"], 4), round(found["ece"], 4), round(found["aurc"], 4)
    (0.5, 1.05, 0.4, 0.25)
    """
    if "error" in columns:
        return {
            "rmse": float(columns["error"].square().mean().sqrt()),
            "nll": -float(columns["log_prob"].mean()),
            "crps": float(columns["crps"].mean()),
            "coverage": float(columns["covered"].double().mean()),
        }
    correct, doubt = columns["correct"].double().flatten(), columns["msp"].double().flatten()
    places = ((1 - doubt) * BINS).ceil().long().clamp(1, BINS) - 1
    gaps = torch.bincount(places, 1 - doubt - correct, BINS)
    return {
        "error": 1 - float(correct.mean()),
        "nll": -float(columns["log_prob"].double().mean()),
        "brier": float(columns["brier"].double().mean()),
        "ece": float(gaps.abs().sum() / len(doubt)),
        "aurc": measure.aurc(doubt, correct),
        "coverage at 1 % risk": measure.coverage_at_risk(doubt, correct, max_risk=RISK),
    }


def intervals(columns: Columns, other: Columns | None = None, *, resamples: int = 1000) -> dict[str, Interval]:
    """Return the middle 95 % of each figure over examples drawn anew, or of its difference from another row's.

    Args:
        columns: Of one row.
        other: Of a row on the same examples in the same order; the difference is the first minus this.
        resamples: How often examples are drawn.

    Costs so many times the figures: four milliseconds each for 8,000 examples.
    """
    count = len(next(iter(columns.values())))
    if other is not None and len(next(iter(other.values()))) != count:
        raise ValueError("Rows are compared on the same examples, and these have different numbers of them.")
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(resamples):
        chosen = torch.randint(count, (count,), generator=generator)
        values = figures({name: column[chosen] for name, column in columns.items()})
        if other is not None:
            theirs = figures({name: column[chosen] for name, column in other.items()})
            values = {name: value - theirs[name] for name, value in values.items()}
        found.append(list(values.values()))
    ends = torch.tensor(found, dtype=torch.float64).quantile(
        torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64), dim=0
    )
    return {name: (float(low), float(high)) for name, low, high in zip(values, *ends, strict=True)}


def save_columns(path: Path, columns: Columns) -> None:
    """Write columns, in single precision, which no figure's fifth digit sees."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {
        name: (column.float() if column.is_floating_point() else column).cpu().numpy()
        for name, column in columns.items()
    }
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)


def load_columns(path: Path) -> dict[str, Tensor]:
    """Read what `save_columns` wrote; nothing is unpickled."""
    with np.load(path, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
