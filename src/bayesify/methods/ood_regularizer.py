"""OOD regulariser: a hinge on the mutual information of OOD inputs (BayesAdapter, section 3)."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from bayesify._core.deprecation import renamed_fields
from bayesify._core.trees import batch_rows, inputs_of, join_rows, repeat_rows
from bayesify.laws import LossTerms
from bayesify.methods.method import Method

if TYPE_CHECKING:
    from bayesify.laws import Posterior

__all__ = ["OODRegularizer", "mutual_information"]


def mutual_information(log_probs: Tensor) -> Tensor:
    """Return I = (1/S) sum_s KL(p_s || mean p) of draws' log-probabilities (S, B, ..., C), in nats, (B, ...).

    It is H(mean p) - mean H(p_s), without the difference of two larger numbers; finite, with finite gradients, for
    one-hot draws, and never above ln min(S, C).

    >>> certain = torch.tensor([[[0.0, -torch.inf]], [[-torch.inf, 0.0]]])
    >>> torch.allclose(mutual_information(certain), torch.tensor(math.log(2)))
    True
    """
    log_probs = log_probs.clamp_min(-1e30)  # of what is impossible; 0 ln 0 = 0
    mean = log_probs.logsumexp(0) - math.log(len(log_probs))
    return (log_probs.exp() * (log_probs - mean)).sum(-1).mean(0)


@renamed_fields(num_samples="num_draws")
@dataclass(frozen=True, kw_only=True)
class OODRegularizer:
    """Ask the posterior to be uncertain on OOD inputs (BayesAdapter, section 3).

    Adds weight * mean max(0, threshold - I(x)) over OOD inputs x, with I the mutual information of `num_draws`
    draws. Works during any method whose training is random. Where rows have noise of their own, all draws and the
    ordinary examples go through the network in one pass of B + num_draws * B_ood rows; else each draw is a pass.

    With BayesAdapter's estimator="flipout", and "auto" where it takes that, the draws of an input are uncorrelated, but
    not independent: a weight's noise has the same magnitude in all of them, and signs of its own in each. The mean of I
    can then differ from that of independent draws, which estimator="exemplar" has.

    Attributes:
        weight: The coefficient; the paper has 1 for CIFAR and 3 for ImageNet.
        threshold: The mutual information, in nats, from which on an OOD input costs nothing. At or above
            ln min(num_draws, classes), which I cannot pass, it has no effect but a constant; the paper's 0.75 with
            two samples is such.
        num_draws: Draws for each OOD input.
        statistics: "apart" normalises OOD rows by the statistics of the ordinary ones, or by the running
            statistics where each draw is a pass, and lets them change none, in batch and instance normalisation of any
            kind; "together" puts all rows into one batch, as the authors do.

    Example:
        >>> from torch import nn
        >>> from bayesify import MCDropout, convert
        >>> posterior = convert(nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 3)), MCDropout())
        >>> batch, ood = (torch.randn(6, 4), torch.arange(6) % 3), torch.randn(4, 4)
        >>> list(posterior.loss(batch, num_data=6, ood=ood, regularizer=OODRegularizer()))
        ['nll', 'uncertainty']
    """

    weight: float = 1.0
    threshold: float = 0.5
    num_draws: int = 2
    statistics: Literal["apart", "together"] = "apart"

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.num_draws < 2:
            raise ValueError(f"Draws disagree from two on, but num_draws={self.num_draws}.")
        if not self.weight >= 0 or not self.threshold > 0:
            raise ValueError(
                f"weight must be at least 0 and threshold above 0, but they are {self.weight} and {self.threshold}."
            )

    def objective(self, posterior: Posterior, inputs: Any, targets: Any, ood: Any, num_data: int) -> LossTerms:
        """Return the method's loss terms of a batch, and the term "uncertainty" of OOD inputs."""
        method = posterior.require_method()
        if not method.trains_draws:
            raise ValueError(
                f"{type(method).__name__} trains no random pass, so there is no disagreement to ask for. Use "
                "BayesAdapter or MCDropout with OOD inputs."
            )
        ood = inputs_of(ood)
        rows, others = batch_rows(inputs), batch_rows(ood)
        if not others:
            return method.objective(posterior, inputs, targets, num_data)
        together = None
        if type(method).objective is Method.objective and posterior.independent_rows(inputs):
            together = join_rows(inputs, repeat_rows(ood, self.num_draws))
        apart = self.statistics == "apart"
        if together is not None:
            ood_rows = self.num_draws * others if apart else 0
            outputs = method.outputs(posterior, together, ood_rows=ood_rows)
            terms = method.terms(posterior, outputs[:rows], targets, num_data)
            draws = outputs[rows:].view(self.num_draws, others, *outputs.shape[1:])
        else:
            terms = method.objective(posterior, inputs, targets, num_data)
            ood_rows = others if apart else 0
            draws = torch.stack([method.outputs(posterior, ood, ood_rows=ood_rows) for _ in range(self.num_draws)])
        log_probs = posterior.likelihood.log_probs(draws)
        self._warn(log_probs.shape[-1])
        missing = (self.threshold - mutual_information(log_probs)).clamp_min(0)
        return LossTerms({**terms, "uncertainty": self.weight * missing.mean()})

    def _warn(self, classes: int) -> None:
        most = math.log(min(self.num_draws, classes))
        if self.threshold >= most:
            warnings.warn(
                f"threshold={self.threshold:g} is not below ln min(num_draws, classes) = {most:.3f}, the most that "
                f"{self.num_draws} draws of {classes} classes can disagree, so it has no effect. Lower it, or take "
                "more samples.",
                stacklevel=5,
            )
