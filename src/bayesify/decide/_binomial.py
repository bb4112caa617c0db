"""Exact binomial tail and the Clopper-Pearson bound, without scipy."""

from __future__ import annotations

import math

import torch

__all__ = ["binomial_cdf", "upper_bound"]


def binomial_cdf(errors: int, trials: int, rate: float) -> float:
    """Compute P(X <= errors) for X ~ Binomial(trials, rate), with 0 < rate < 1.

    sum_{i <= errors} C(trials, i) rate^i (1 - rate)^(trials - i), and 1 without trials.

    The terms are added in log space, so that the tail is exact where it underflows term by term.
    Cost: at most 16 sqrt(trials) terms.
    """
    if errors >= trials:
        return 1.0
    # Hoeffding: terms further than 8 sqrt(trials) from the mean, or below the last term, add less
    # than exp(-128) of the sum.
    mean, width = int(trials * rate), 8 * (math.isqrt(trials) + 1)
    low, high = max(0, min(errors, mean) - width), min(errors, mean + width)
    count = torch.arange(low, high + 1, dtype=torch.float64)
    log_orders = torch.lgamma(count + 1) + torch.lgamma(trials - count + 1)
    log_choose = math.lgamma(trials + 1) - log_orders
    log_terms = log_choose + count * math.log(rate) + (trials - count) * math.log1p(-rate)
    return min(1.0, math.exp(float(log_terms.logsumexp(0))))


def upper_bound(errors: int, trials: int, delta: float) -> float:
    """Compute the Clopper-Pearson bound: the rate at which P(X <= errors) falls to ``delta``.

    An unknown rate lies above it with probability at most ``delta``. The bisection returns its
    upper end, hence never less than the bound.
    """
    if errors >= trials:
        return 1.0
    low, high = errors / trials, 1.0
    while (middle := (low + high) / 2) not in (low, high):
        if binomial_cdf(errors, trials, middle) > delta:
            low = middle
        else:
            high = middle
    return high
