"""Uncertainty of a classification, per input, in nats.

Probabilities are ``(N, ..., C)`` with the classes last, samples ``(S, N, ..., C)`` with the draws
first; results are float64 tensors ``(N, ...)``, safe at zero probabilities (0 log 0 = 0).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bayesify.evaluation.measures.arguments import check_probs

if TYPE_CHECKING:
    from bayesify.evaluation.measures.arguments import ArrayLike

__all__ = [
    "entropy",
    "expected_entropy",
    "model_variance",
    "mutual_information",
    "variation_ratio",
]


def entropy(probs: ArrayLike) -> Tensor:
    """Compute the entropy of each predictive distribution: the total uncertainty.

    H[p] = -sum_c p_c log p_c, in [0, ln C].

    Args:
        probs: Probabilities (N, ..., C).

    Returns:
        Entropies (N, ...) in nats.

    Example:
        >>> entropy([[0.5, 0.5], [1.0, 0.0]])
        tensor([0.6931, 0.0000], dtype=torch.float64)
    """
    return _entropy(check_probs(probs))


def expected_entropy(samples: ArrayLike) -> Tensor:
    """Compute the mean entropy of the draws: the aleatoric part of the uncertainty.

    (1/S) sum_s H[p_s], in [0, ln C].

    Args:
        samples: Probabilities (S, N, ..., C), one slice per draw.

    Returns:
        Mean entropies (N, ...) in nats.

    Example:
        >>> expected_entropy([[[0.5, 0.5]], [[1.0, 0.0]]])
        tensor([0.3466], dtype=torch.float64)
    """
    return _entropy(_check_samples(samples)).mean(0)


def mutual_information(samples: ArrayLike) -> Tensor:
    """Compute how much the draws disagree: the epistemic part of the uncertainty.

    I = H[(1/S) sum_s p_s] - (1/S) sum_s H[p_s], in [0, ln C]; Houlsby et al., "Bayesian Active
    Learning for Classification and Preference Learning", 2011, eq. 2 (BALD).

    Args:
        samples: Probabilities (S, N, ..., C), one slice per draw.

    Returns:
        Mutual information (N, ...) in nats, 0 for identical draws.

    Example:
        >>> mutual_information([[[1.0, 0.0]], [[0.0, 1.0]]])
        tensor([0.6931], dtype=torch.float64)
    """
    draws = _check_samples(samples)
    return (_entropy(draws.mean(0)) - _entropy(draws).mean(0)).clamp(min=0)


def variation_ratio(samples: ArrayLike) -> Tensor:
    """Compute the share of draws that do not vote for the most frequent class.

    1 - max_c (1/S) sum_s [arg max p_s = c], in [0, 1 - 1/C]; votes are counted, so one draw
    always gives 0. Within a draw the first of equally probable classes gets the vote. Freeman,
    "Elementary Applied Statistics", 1965.

    Args:
        samples: Probabilities (S, N, ..., C), one slice per draw.

    Returns:
        Variation ratios (N, ...).

    Example:
        >>> variation_ratio([[[0.9, 0.1]], [[0.8, 0.2]], [[0.4, 0.6]], [[0.7, 0.3]]])
        tensor([0.2500], dtype=torch.float64)
    """
    votes = _check_samples(samples).argmax(-1)
    winner = votes.mode(dim=0).values
    return 1 - (votes == winner).double().mean(0)


def model_variance(samples: ArrayLike) -> Tensor:
    """Compute the variance of the probability vector over the draws, summed over classes.

    (1/S) sum_s p_s . p_s - pbar . pbar with pbar = (1/S) sum_s p_s, in [0, 1]; computed as the
    mean of |p_s - pbar|^2, which is the same number without cancellation.

    Args:
        samples: Probabilities (S, N, ..., C), one slice per draw.

    Returns:
        Variances (N, ...).

    Example:
        >>> model_variance([[[1.0, 0.0]], [[0.0, 1.0]]])
        tensor([0.5000], dtype=torch.float64)
    """
    draws = _check_samples(samples)
    return (draws - draws.mean(0)).square().sum(-1).mean(0)


def _check_samples(samples: ArrayLike) -> Tensor:
    return check_probs(samples, "samples", min_dims=3)


def _entropy(probs: Tensor) -> Tensor:
    # Rounded inputs may sum to slightly more or less than one, which the clamp absorbs.
    total: Tensor = torch.special.entr(probs).sum(-1)
    return total.clamp(0, math.log(probs.shape[-1]))
