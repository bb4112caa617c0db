"""Draws of logits, collected a group at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify._core.maths import LEAST, entropy, log_rest, softmax_below
from bayesify.likelihoods.likelihood import Stream
from bayesify.likelihoods.pooling import PowerMean
from bayesify.likelihoods.prediction import ClassificationPrediction

if TYPE_CHECKING:
    from bayesify.likelihoods.categorical import Categorical

__all__ = ["CategoricalStream"]


# Numbers in a prediction's logits up to which fields that are seldom asked for are made when they are.
FEW = 2**16


class _Details:
    """Sums over draws of what a prediction says beside its probabilities and their entropies.

    Args:
        logits: Those of some draws, tempered, less the largest, (S, B, ..., C).
        probs: Their probabilities.
        top: Where the largest is, (S, B, ..., 1).
        energy: ln sum_c exp(logit_c) of the outputs as they are, in two terms, (S, B, ..., 1).
    """

    def __init__(self, logits: Tensor, probs: Tensor, top: Tensor, energy: tuple[Tensor, Tensor]) -> None:
        self.count = len(logits)
        self.squares = probs.square().sum((0, -1))
        winners = top[..., 0].movedim(0, -1)
        votes = torch.zeros_like(probs[0])
        self.votes = votes.scatter_add_(-1, winners, torch.ones_like(winners, dtype=votes.dtype))
        self.energy = (energy[0] + energy[1]).sum(0)
        logits = logits - logits.mean(-1, keepdim=True)
        self.mean = logits.mean(0)
        self.spread = (logits - self.mean).square().sum(0)

    def add(self, other: _Details) -> None:
        """Add those of other draws."""
        self.squares = self.squares + other.squares
        self.votes = self.votes + other.votes
        self.energy = self.energy + other.energy
        # Chan's update of mean and sum of squared deviations, exact for groups of any size.
        step = other.mean - self.mean
        total = self.count + other.count
        self.mean = self.mean + step * (other.count / total)
        self.spread = self.spread + other.spread + step.square() * (self.count * other.count / total)
        self.count = total

    def fields(self, probs: Tensor) -> dict[str, Tensor]:
        """Return the prediction's fields, by name, given its probabilities."""
        return {
            "variation_ratio": 1 - self.votes.amax(-1) / self.count,
            "model_variance": (self.squares / self.count - probs.square().sum(-1)).clamp_min(0),
            "logits_mean": self.mean,
            "logits_variance": self.spread / self.count,
            "energy": self.energy[..., 0] / -self.count,
        }


class CategoricalStream(Stream):
    """Sums over draws of logits of what a prediction is made of.

    Args:
        likelihood: Whose temperatures and exponent hold.
        keep_samples: Whether to keep the probabilities of each draw.
    """

    def __init__(self, likelihood: Categorical, keep_samples: bool) -> None:
        self.likelihood = likelihood
        self.samples: list[Tensor] | None = [] if keep_samples else None
        self.count = 0
        self.views: dict[int, tuple[Tensor, int]] = {}  # ln of sums of probabilities, and of how many draws
        self.pooled = None if likelihood.exponent == 1 else PowerMean(likelihood.exponent)
        self.details: _Details | None = None
        self.waiting: Callable[[], _Details] | None = None  # makes them, where all draws are one group so far

    def add(self, outputs: Tensor, *, part: int = 0, view: int = 0) -> None:
        """Add a group of draws, (S, B, ...)."""
        logits = self.likelihood.classes_last(outputs, lead=2)
        largest, top = logits.max(-1, keepdim=True)  # a third faster than argmax on a processor
        logits = logits - largest
        rest = log_rest(logits, top)
        energy = (largest, rest)
        if self.likelihood.tempers:
            logits = self.likelihood.tempered(logits, part)
            rest = log_rest(logits, top)
        log_probs = logits - rest
        probs = log_probs.exp()
        log_sum = log_probs.logsumexp(0)
        entropies = (probs * log_probs.clamp_min(LEAST)).sum((0, -1)).abs()  # ln p is never above zero
        if self.samples is not None:
            self.samples.append(probs)
        if self.pooled is not None:
            self.pooled.add(log_probs)
        known, number = self.views.get(view), outputs.shape[0]
        self.views[view] = (
            (log_sum, number) if known is None else (torch.logaddexp(known[0], log_sum), known[1] + number)
        )
        self.entropies: Tensor = self.entropies + entropies if self.count else entropies
        make = partial(_Details, logits, probs, top, energy)
        if self.count == 0 and _can_wait(logits):
            self.waiting = make
        elif self.count == 0:
            self.details = make()
        else:
            if self.waiting is not None:
                self.details, self.waiting = self.waiting(), None
            assert self.details is not None
            self.details.add(make())
        self.count += number

    def result(self) -> ClassificationPrediction:
        """Return the prediction of all draws."""
        count = self.count
        sums = [total for total, _ in self.views.values()]
        aleatoric = self.entropies / count
        log_probs = _normalised(sums[0] if len(sums) == 1 else torch.stack(sums).logsumexp(0), count)
        probs = log_probs.exp()
        total = aleatoric if count == 1 else entropy(log_probs, probs)  # of one draw alike, but for rounding

        known: dict[str, Any] = {
            "log_probs": log_probs,
            "aleatoric": aleatoric,
            "epistemic": (total - aleatoric).clamp_min(0),
            "view_epistemic": (total - self._within()).clamp_min(0) if len(sums) > 1 else None,
            "samples": None if self.samples is None else torch.cat(self.samples),
        }
        waiting = self.waiting
        if waiting is not None:
            made = ClassificationPrediction.waiting(lambda: waiting().fields(probs), **known)
        else:
            assert self.details is not None
            made = ClassificationPrediction(**{**known, **self.details.fields(probs)})
        if self.pooled is None:
            return made
        return made.repooled(*self.pooled.result(), self.likelihood.exponent)

    def _within(self) -> Tensor:
        """Return the mean entropy of the views' averages."""
        each = [number * entropy(_normalised(total, number)) for total, number in self.views.values()]
        return torch.stack(each).sum(0) / self.count


def _can_wait(logits: Tensor) -> bool:
    """Return whether numbers are few, and not those of a program that is traced or of a gradient."""
    plain = type(logits) is Tensor and not torch.compiler.is_compiling()
    return plain and not logits.requires_grad and logits.numel() <= FEW


def _normalised(log_sum: Tensor, number: int) -> Tensor:
    """Return the average's ln p, of the ln of a sum of `number` draws' probabilities (..., C)."""
    if number == 1:
        return log_sum
    largest, top = log_sum.max(-1, keepdim=True)
    return softmax_below(log_sum - largest, top)  # sums to one but for rounding, whatever is added to it
