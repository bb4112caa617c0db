"""Whether two inputs are of one kind, decided by their features: open-set verification."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Verification", "cosine_scores", "verification_accuracy"]


def cosine_scores(first: Any, second: Any) -> Tensor:
    """Score pairs by the cosine of their features, a.b / (|a| |b|), higher = more alike.

    Args:
        first: Features (N, D).
        second: Features (N, D), of the pairs' other inputs.

    Returns:
        Cosines (N,).

    >>> cosine_scores([[1.0, 0.0], [1.0, 1.0]], [[2.0, 0.0], [-1.0, 1.0]])
    tensor([1., 0.], dtype=torch.float64)
    """
    a, b = (torch.as_tensor(features, dtype=torch.float64) for features in (first, second))
    _check_same_shape(first=a, second=b)
    if a.ndim != 2:
        raise ValueError(f"Features must be (N, D), but they are {tuple(a.shape)}.")
    lengths = a.norm(dim=1) * b.norm(dim=1)
    if bool((lengths == 0).any()):
        raise ValueError("Some features are all zero and have no direction; remove those pairs.")
    cosines: Tensor = (a * b).sum(1) / lengths
    return cosines


@dataclass(frozen=True)
class Verification:
    """The result of a k-fold verification.

    Attributes:
        accuracy: Mean over folds of the share of right decisions.
        std: Standard deviation of the folds' accuracies.
        thresholds: Of each fold; pairs that score at least this are called the same.
    """

    accuracy: float
    std: float
    thresholds: tuple[float, ...]


def verification_accuracy(scores: Any, same: Any, *, folds: Any = 10) -> Verification:
    """Decide by a threshold that is chosen on the other folds.

    For each fold the threshold is the one of highest accuracy on all other folds, half-way between two neighbouring
    scores (the lowest, if several are best), and the accuracy is that on the fold itself.

    Args:
        scores: (N,), higher = more alike.
        same: (N,), whether the pairs are of one kind.
        folds: Their number k, with pair i in fold i mod k; or the fold of each pair (N,).

    Returns:
        Accuracy, its spread, and the thresholds.

    >>> verification_accuracy([0.9, 0.8, 0.1, 0.2], [1, 1, 0, 0], folds=2).accuracy
    1.0
    """
    values = torch.as_tensor(scores, dtype=torch.float64, device="cpu")
    labels = torch.as_tensor(same, device="cpu").bool()
    _check_same_shape(scores=values, same=labels)
    if values.ndim != 1:
        raise ValueError(f"scores must be (N,), but they are {tuple(values.shape)}.")
    if isinstance(folds, int):
        fold_of = torch.arange(len(values)) % folds
    else:
        fold_of = torch.as_tensor(folds, device="cpu")
        _check_same_shape(scores=values, folds=fold_of)
    numbers = torch.unique(fold_of)
    if len(numbers) < 2:
        raise ValueError("A threshold is chosen on other folds, so there must be at least two, each with a pair.")
    thresholds, accuracies = [], []
    for number in numbers:
        own = fold_of == number
        threshold = _best_threshold(values[~own], labels[~own])
        thresholds.append(threshold)
        accuracies.append(((values[own] >= threshold) == labels[own]).double().mean())
    found = torch.stack(accuracies)
    return Verification(float(found.mean()), float(found.std(correction=0)), tuple(thresholds))


def _check_same_shape(**tensors: Tensor) -> None:
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items())
        raise ValueError(f"Shapes do not match: {shapes}; reshape them to one common shape.")


def _best_threshold(scores: Tensor, same: Tensor) -> float:
    levels, position = torch.unique(scores, return_inverse=True)
    alike = torch.zeros(len(levels), dtype=torch.float64).index_add_(0, position, same.double())
    other = torch.zeros_like(alike).index_add_(0, position, (~same).double())
    # Right decisions with the threshold below level k: all that are alike from k on, all others before it.
    zero = torch.zeros(1, dtype=torch.float64)
    right = torch.cat([alike.flip(0).cumsum(0).flip(0), zero]) + torch.cat([zero, other.cumsum(0)])
    best = int(right.argmax())
    if best == 0:
        return -math.inf
    if best == len(levels):
        return math.inf
    return float((levels[best - 1] + levels[best]) / 2)
