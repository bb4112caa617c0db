"""Does a confidence of 0.8 mean right in 80 % of cases?

Probabilities are ``(N, ..., C)`` with the classes last and labels ``(N, ...)``; a 1-D array of
p(y=1) is a binary problem and means the same as its two columns (1 - p, p).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bayesify.evaluation.measures.arguments import (
    bin_edges,
    check_count,
    check_problem,
    equal_mass_bins,
    equal_width_bins,
)

if TYPE_CHECKING:
    from bayesify.evaluation.measures.arguments import ArrayLike

__all__ = ["Reliability", "adaptive_ece", "classwise_ece", "ece", "reliability"]


@dataclass(frozen=True, eq=False)
class Reliability:
    """The numbers of a reliability diagram, one entry per bin.

    Attributes:
        confidence: Mean confidence (num_bins,), NaN in an empty bin.
        accuracy: Share of correct predictions (num_bins,), NaN in an empty bin.
        count: Number of predictions (num_bins,).
        edges: Bin edges (num_bins + 1,); bin i is the interval (edges[i], edges[i + 1]].
    """

    confidence: Tensor
    accuracy: Tensor
    count: Tensor
    edges: Tensor


def reliability(probs: ArrayLike, labels: ArrayLike, *, num_bins: int = 15, ignore_index: int = -100) -> Reliability:
    """Compute accuracy against confidence in bins of equal width.

    Bin i holds the predictions whose highest probability lies in ((i - 1) / m, i / m].

    Args:
        probs: Probabilities (N, ..., C), or p(y=1) as (N,).
        labels: Class indices (N, ...).
        num_bins: Number of bins m.
        ignore_index: Label of the positions to leave out.

    Returns:
        Mean confidence, accuracy and count of each bin.

    Example:
        >>> diagram = reliability([[0.9, 0.1], [0.7, 0.3]], [0, 1], num_bins=2)
        >>> diagram.confidence, diagram.count
        (tensor([   nan, 0.8000], dtype=torch.float64), tensor([0, 2]))
    """
    confidence, correct = _top_label(probs, labels, ignore_index)
    bins = equal_width_bins(confidence, num_bins)
    count = torch.bincount(bins, minlength=num_bins)
    return Reliability(
        confidence=torch.bincount(bins, confidence, num_bins) / count,
        accuracy=torch.bincount(bins, correct, num_bins) / count,
        count=count,
        edges=bin_edges(num_bins, confidence.device),
    )


def ece(probs: ArrayLike, labels: ArrayLike, *, num_bins: int = 15, ignore_index: int = -100) -> float:
    """Compute the expected calibration error in bins of equal width.

    sum_i (|B_i| / N) |acc(B_i) - conf(B_i)| with B_i the predictions whose confidence lies in
    ((i - 1) / m, i / m]; Guo et al., "On Calibration of Modern Neural Networks", 2017, eq. 3.

    Args:
        probs: Probabilities (N, ..., C), or p(y=1) as (N,); the confidence is that of the
            predicted class, in the binary case max(p, 1 - p).
        labels: Class indices (N, ...).
        num_bins: Number of bins m.
        ignore_index: Label of the positions to leave out.

    Returns:
        Error in [0, 1], 0 for perfect calibration.

    Example:
        >>> round(ece([[0.9, 0.1], [0.7, 0.3]], [0, 1]), 4)
        0.4
    """
    confidence, correct = _top_label(probs, labels, ignore_index)
    bins = equal_width_bins(confidence, num_bins)
    return _binned_gap(bins, confidence, correct, num_bins) / len(bins)


def adaptive_ece(probs: ArrayLike, labels: ArrayLike, *, num_bins: int = 15, ignore_index: int = -100) -> float:
    """Compute the expected calibration error in bins of equal mass.

    As ``ece``, but bin i holds about N / m predictions of consecutive confidences; equal
    confidences share a bin, so the order of the examples is irrelevant. Nguyen & O'Connor,
    "Posterior Calibration and Exploratory Analysis for NLP Models", 2015.

    Args:
        probs: Probabilities (N, ..., C), or p(y=1) as (N,).
        labels: Class indices (N, ...).
        num_bins: Number of bins m.
        ignore_index: Label of the positions to leave out.

    Returns:
        Error in [0, 1].

    Example:
        >>> round(adaptive_ece([0.9, 0.8, 0.3, 0.6], [1, 1, 0, 1], num_bins=2), 4)
        0.25
    """
    confidence, correct = _top_label(probs, labels, ignore_index)
    bins = equal_mass_bins(confidence, check_count(num_bins, "num_bins"))
    return _binned_gap(bins, confidence, correct, num_bins) / len(bins)


def classwise_ece(probs: ArrayLike, labels: ArrayLike, *, num_bins: int = 15, ignore_index: int = -100) -> float:
    """Compute the calibration error of each class probability, averaged over classes.

    (1/C) sum_c sum_i (|B_ic| / N) |freq_c(B_ic) - mean p_c(B_ic)| with B_ic the examples whose
    p_c lies in bin i, the first bin including 0; Kull et al., "Beyond temperature scaling",
    2019, classwise-ECE. Memory: a few arrays of the size of ``probs``.

    Args:
        probs: Probabilities (N, ..., C), or p(y=1) as (N,).
        labels: Class indices (N, ...).
        num_bins: Number of equal-width bins.
        ignore_index: Label of the positions to leave out.

    Returns:
        Error in [0, 1].

    Example:
        >>> round(classwise_ece([0.9, 0.7], [1, 0]), 4)
        0.4
    """
    flat, index = check_problem(probs, labels, ignore_index)
    num_classes = flat.shape[-1]
    target = torch.nn.functional.one_hot(index, num_classes).double()
    offset = num_bins * torch.arange(num_classes, device=flat.device)
    bins = (equal_width_bins(flat, num_bins) + offset).flatten()
    gap = _binned_gap(bins, flat.flatten(), target.flatten(), num_bins * num_classes)
    return gap / flat.numel()


def _top_label(probs: ArrayLike, labels: ArrayLike, ignore_index: int) -> tuple[Tensor, Tensor]:
    flat, index = check_problem(probs, labels, ignore_index)
    confidence, predicted = flat.max(-1)
    return confidence, (predicted == index).double()


def _binned_gap(bins: Tensor, confidence: Tensor, correct: Tensor, num_bins: int) -> float:
    """Return sum_i |B_i| |acc(B_i) - conf(B_i)|, which needs no division in empty bins."""
    return float(torch.bincount(bins, confidence - correct, num_bins).abs().sum())
