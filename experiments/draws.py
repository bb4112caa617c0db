"""How many draws are worth their cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["DrawsCurve", "draws_curve"]


@dataclass(frozen=True, eq=False)
class DrawsCurve:
    """Accuracy and NLL against the number of draws (BayesAdapter, figure 4).

    Attributes:
        accuracy: Of the average of the first s draws, s = 1 ... S, (S,).
        nll: Of the same, (S,).
        single_accuracy: Of each draw alone, (S,).
        single_nll: Of each draw alone, (S,).
    """

    accuracy: Tensor
    nll: Tensor
    single_accuracy: Tensor
    single_nll: Tensor


def draws_curve(samples: Any, targets: Any) -> DrawsCurve:
    """Measure the average of the first s draws for every s, and each draw alone.

    Args:
        samples: The draws' probabilities (S, N, ..., C), as `predict(..., keep_samples=True).samples`.
        targets: Classes (N, ...).

    Returns:
        The curves; NLL is -ln of the mean of the draws' probabilities, in nats.

    >>> curve = draws_curve([[[0.2, 0.8]], [[0.6, 0.4]]], [0])
    >>> curve.accuracy, curve.nll
    (tensor([0., 0.], dtype=torch.float64), tensor([1.6094, 0.9163], dtype=torch.float64))
    """
    probs = torch.as_tensor(samples, dtype=torch.float64)
    labels = torch.as_tensor(targets, device=probs.device).long()
    if probs.ndim < 3 or probs.shape[1:-1] != labels.shape:
        raise ValueError(
            f"samples must be (S, N, ..., C) for targets (N, ...), but they are {tuple(probs.shape)} and "
            f"{tuple(labels.shape)}."
        )
    if int(labels.min()) < 0 or int(labels.max()) >= probs.shape[-1]:
        raise ValueError(f"targets must be classes from 0 to {probs.shape[-1] - 1}.")
    counts = torch.arange(1, len(probs) + 1, dtype=probs.dtype, device=probs.device)
    averages = probs.cumsum(0) / counts.view(-1, *[1] * (probs.ndim - 1))
    return DrawsCurve(*_scores(averages, labels), *_scores(probs, labels))


def _scores(probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    each = labels.expand(probs.shape[:-1])
    right = (probs.argmax(-1) == each).double().flatten(1).mean(1)
    nll = -probs.gather(-1, each[..., None])[..., 0].log().flatten(1).mean(1)
    return right, nll
