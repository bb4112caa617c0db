"""Draws of logits, collected a group at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bayesify._core.maths import LEAST, entropy, log_rest, softmax_below
from bayesify.likelihoods.likelihood import Stream
from bayesify.likelihoods.pooling import PowerMean
from bayesify.likelihoods.prediction import ClassificationPrediction

if TYPE_CHECKING:
    from bayesify.likelihoods.categorical import Categorical

__all__ = ["CategoricalStream"]


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

    def add(self, outputs: Tensor, *, part: int = 0, view: int = 0) -> None:
        """Add a group of draws, (S, B, ...)."""
        logits = self.likelihood.classes_last(outputs, lead=2)
        largest, top = logits.max(-1, keepdim=True)  # a third faster than argmax on a processor
        logits = logits - largest
        rest = log_rest(logits, top)
        energy = (largest + rest).sum(0)
        if self.likelihood.tempers:
            logits = self.likelihood.tempered(logits, part)
            rest = log_rest(logits, top)
        log_probs = logits - rest
        probs = log_probs.exp()
        log_sum = log_probs.logsumexp(0)
        entropies = (probs * log_probs.clamp_min(LEAST)).sum((0, -1)).abs()  # ln p is never above zero
        squares = probs.square().sum((0, -1))
        winners = top[..., 0].movedim(0, -1)
        votes = torch.zeros_like(log_sum).scatter_add_(-1, winners, torch.ones_like(winners, dtype=log_sum.dtype))
        logits = logits - logits.mean(-1, keepdim=True)
        number = outputs.shape[0]
        mean = logits.mean(0)
        spread = (logits - mean).square().sum(0)
        if self.samples is not None:
            self.samples.append(probs)
        if self.pooled is not None:
            self.pooled.add(log_probs)
        known = self.views.get(view)
        self.views[view] = (
            (log_sum, number) if known is None else (torch.logaddexp(known[0], log_sum), known[1] + number)
        )
        if self.count == 0:
            self.entropies, self.squares, self.votes, self.energy = entropies, squares, votes, energy
            self.mean, self.spread = mean, spread
        else:
            self.entropies = self.entropies + entropies
            self.squares = self.squares + squares
            self.votes = self.votes + votes
            self.energy = self.energy + energy
            # Chan's update of mean and sum of squared deviations, exact for groups of any size.
            step = mean - self.mean
            total = self.count + number
            self.mean = self.mean + step * (number / total)
            self.spread = self.spread + spread + step.square() * (self.count * number / total)
        self.count += number

    def result(self) -> ClassificationPrediction:
        """Return the prediction of all draws."""
        count = self.count
        sums = [total for total, _ in self.views.values()]
        aleatoric = self.entropies / count
        log_probs = _normalised(sums[0] if len(sums) == 1 else torch.stack(sums).logsumexp(0), count)
        probs = log_probs.exp()
        total = aleatoric if count == 1 else entropy(log_probs, probs)  # of one draw alike, but for rounding
        made = ClassificationPrediction(
            log_probs=log_probs,
            aleatoric=aleatoric,
            epistemic=(total - aleatoric).clamp_min(0),
            variation_ratio=1 - self.votes.amax(-1) / count,
            model_variance=(self.squares / count - probs.square().sum(-1)).clamp_min(0),
            logits_mean=self.mean,
            logits_variance=self.spread / count,
            view_epistemic=(total - self._within()).clamp_min(0) if len(sums) > 1 else None,
            samples=None if self.samples is None else torch.cat(self.samples),
            energy=self.energy[..., 0] / -count,
        )
        if self.pooled is None:
            return made
        return made.repooled(*self.pooled.result(), self.likelihood.exponent)

    def _within(self) -> Tensor:
        """Return the mean entropy of the views' averages."""
        each = [number * entropy(_normalised(total, number)) for total, number in self.views.values()]
        return torch.stack(each).sum(0) / self.count


def _normalised(log_sum: Tensor, number: int) -> Tensor:
    """Return the average's ln p, of the ln of a sum of `number` draws' probabilities (..., C)."""
    if number == 1:
        return log_sum
    largest, top = log_sum.max(-1, keepdim=True)
    return softmax_below(log_sum - largest, top)  # sums to one but for rounding, whatever is added to it
