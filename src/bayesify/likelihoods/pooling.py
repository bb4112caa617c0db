"""How the probabilities of several draws become one distribution: the power mean."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

__all__ = ["Pooling", "PowerMean", "Temperatures", "check_pooling", "normalised", "pool"]

Pooling = Literal["auto", "probs", "log-probs", "power"]
Temperatures = Literal["auto", "one", "each"]


class PowerMean:
    """The power mean of distributions, one group of draws at a time; memory does not grow with their number.

    p_c is proportional to ((1/S) sum_s p_sc^a)^(1/a): the average of probabilities for a = 1, and in the limit a = 0
    exp((1/S) sum_s ln p_sc), the normalised average of log-probabilities.

    Args:
        exponent: a, from 0 to 1.

    Example:
        >>> mean = PowerMean(0.0)
        >>> mean.add(torch.tensor([[0.5, 0.5], [0.2, 0.8]]).log())
        >>> mean.result()[0].exp()  # sqrt(.5 .2) : sqrt(.5 .8)
        tensor([0.3333, 0.6667])
    """

    def __init__(self, exponent: float) -> None:
        self.exponent = exponent
        self.count = 0
        self.total = torch.zeros(())

    def add(self, log_probs: Tensor) -> None:
        """Add draws, (S, ..., C)."""
        if self.exponent:
            found = (self.exponent * log_probs).logsumexp(0)
            self.total = torch.logaddexp(self.total, found) if self.count else found
        else:
            found = log_probs.sum(0)
            self.total = self.total + found if self.count else found
        self.count += len(log_probs)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return ln p, (..., C), and the logarithm of what normalised it, (...)."""
        if self.exponent:
            return normalised((self.total - math.log(self.count)) / self.exponent)
        return normalised(self.total / self.count)


def normalised(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return ln softmax, and the logarithm of the sum that it divides by; all classes ruled out stay so."""
    total = logits.logsumexp(-1)
    return logits - total.clamp_min(torch.finfo(logits.dtype).min)[..., None], total


def pool(log_probs: Tensor, exponent: float) -> Tensor:
    """Return the power mean of distributions (S, ..., C) over the first dimension, (..., C), as logarithms."""
    mean = PowerMean(exponent)
    mean.add(log_probs)
    return mean.result()[0]


def check_pooling(pooling: str | float, temperatures: str) -> None:
    """Refuse what there is not."""
    known = get_args(Pooling)
    if isinstance(pooling, str) and pooling not in known:
        raise ValueError(f"pooling must be one of {list(known)}, or an exponent from 0 to 1, but it is {pooling!r}.")
    if not isinstance(pooling, str) and not 0 <= pooling <= 1:
        raise ValueError(
            f"pooling={pooling} must be an exponent from 0, the average of log-probabilities, to 1, of probabilities."
        )
    if temperatures not in get_args(Temperatures):
        raise ValueError(f"temperatures must be one of {list(get_args(Temperatures))}, but it is {temperatures!r}.")
