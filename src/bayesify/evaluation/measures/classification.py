"""Accuracy and proper scores of class probabilities.

Probabilities are ``(N, ..., C)`` with the classes last and labels ``(N, ...)``; a 1-D array of
p(y=1) is a binary problem. Positions whose label is ``ignore_index`` are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bayesify._core.maths import label_log_prob
from bayesify.evaluation.measures.arguments import check_problem, flatten, to_double

if TYPE_CHECKING:
    from bayesify.evaluation.measures.arguments import ArrayLike

__all__ = ["accuracy", "brier", "nll"]


def accuracy(probs: ArrayLike, labels: ArrayLike, *, ignore_index: int = -100) -> float:
    """Compute the share of predictions whose most probable class is the label.

    (1/N) sum_n [arg max_c p_nc = y_n]; the first of equally probable classes is predicted.

    Args:
        probs: Probabilities (N, ..., C), or p(y=1) as (N,).
        labels: Class indices (N, ...).
        ignore_index: Label of the positions to leave out.

    Returns:
        Accuracy in [0, 1].

    Example:
        >>> accuracy([[0.9, 0.1], [0.6, 0.4]], [0, 1])
        0.5
    """
    flat, index = check_problem(probs, labels, ignore_index)
    return float((flat.argmax(-1) == index).double().mean())


def nll(
    probs: ArrayLike | None,
    labels: ArrayLike,
    *,
    log_probs: ArrayLike | None = None,
    ignore_index: int = -100,
) -> float:
    """Compute the mean negative log probability of the labels, in nats.

    -(1/N) sum_n log p_n,y_n. A probability of exactly zero at a label gives ``inf``: nothing is
    clipped. Where float32 probabilities underflow, pass log probabilities instead.

    Args:
        probs: Probabilities (N, ..., C), or p(y=1) as (N,); None if ``log_probs`` is given.
        labels: Class indices (N, ...).
        log_probs: Log probabilities (N, ..., C), for example ``logits.log_softmax(-1)``.
        ignore_index: Label of the positions to leave out.

    Returns:
        Mean nats per prediction.

    Example:
        >>> round(nll([[0.5, 0.5], [0.25, 0.75]], [0, 1]), 4)
        0.4904
        >>> nll([[1.0, 0.0]], [1])
        inf
    """
    if (probs is None) == (log_probs is None):
        raise ValueError("Pass either probs, or None and log_probs=..., not both and not neither.")
    if log_probs is None:
        assert probs is not None
        flat, index = check_problem(probs, labels, ignore_index)
        flat = flat.log()
    else:
        values = to_double(log_probs, "log_probs", finite=False).detach()
        if values.ndim < 2:
            raise ValueError("log_probs is 1-D; pass (N, C) with one column per class.")
        if values.logsumexp(-1).abs().max() > 1e-2:
            raise ValueError("log_probs do not sum to one after exp; apply log_softmax(-1) to the logits.")
        flat, index = flatten(values, labels, ignore_index)
    return float(-label_log_prob(flat, index).mean())


def brier(probs: ArrayLike, labels: ArrayLike, *, ignore_index: int = -100) -> float:
    """Compute the Brier score: squared error summed over classes, averaged over examples.

    (1/N) sum_n sum_c (p_nc - [y_n = c])^2, in [0, 2]; for two classes this is twice the score
    that looks at p(y=1) only. Brier, "Verification of Forecasts Expressed in Terms of
    Probability", 1950.

    Args:
        probs: Probabilities (N, ..., C), or p(y=1) as (N,).
        labels: Class indices (N, ...).
        ignore_index: Label of the positions to leave out.

    Returns:
        Brier score, lower is better.

    Example:
        >>> brier([[0.5, 0.5], [1.0, 0.0]], [0, 0])
        0.25
    """
    flat, index = check_problem(probs, labels, ignore_index)
    target = torch.nn.functional.one_hot(index, flat.shape[-1])
    return float((flat - target).square().sum(-1).mean())
