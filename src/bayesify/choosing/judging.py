"""What a posterior is worth on validation examples that it was not made ready on."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesify._core.trees import batch_rows, slice_rows, without_arrays
from bayesify.likelihoods import Likelihood
from bayesify.likelihoods.pooling import Pooling, Temperatures
from bayesify.prediction.trials import Batches, halves

__all__ = ["POOLED", "Found", "crossed_nll", "first_of", "half_of", "mean_and_error"]

POOLED = ("categorical", "bernoulli")  # likelihoods whose draws can be averaged in two ways


class Found(NamedTuple):
    """Outputs on all validation examples, of what was found on one half of them.

    Attributes:
        batches: Outputs of the draws (S, B, ...), and targets.
        parts: Which part of a mixture each draw is of.
    """

    batches: Batches
    parts: Sequence[int]


def first_of(batches: Iterable[Any], most: int) -> Iterator[Any]:
    """Give the first so many examples, batch by batch."""
    left = most
    for batch in map(without_arrays, batches):
        rows = batch_rows(batch)
        yield batch if rows <= left else slice_rows(batch, 0, left)
        left -= rows
        if left <= 0:
            return


def half_of(batches: Iterable[Any], half: int, *, most: int) -> Iterator[Any]:
    """Give every second example of the first so many, as `halves` divides them."""
    start = 0
    for batch in first_of(batches, most):
        own = slice_rows(batch, (half - start) % 2, None, 2)
        start += batch_rows(batch)
        if batch_rows(own):
            yield own


@torch.no_grad()
def crossed_nll(likelihood: Likelihood, pair: tuple[Found, Found]) -> Tensor:
    """Return the NLL of each example, (E,): what one half found, and calibrates, is judged on the other, both ways.

    Examples come half by half. Those without a position that counts are left out.

    Args:
        likelihood: Which is left as it is.
        pair: What the first half of the examples found, and the second.
    """
    scores = []
    for learned, (own, parts) in enumerate(pair):
        if any(bool(outputs.isnan().any()) for outputs, _ in own):
            return torch.tensor([math.nan])
        learn, judge = ([batch for batch in half if len(batch[1])] for half in halves(own)[learned])
        fitted = _calibrated(likelihood, learn, parts)
        scores += [_nll(fitted, outputs, target, parts) for outputs, target in judge]
    return torch.cat(scores).cpu()


def _calibrated(likelihood: Likelihood, batches: Batches, parts: Sequence[int]) -> Likelihood:
    """Return the likelihood with the better of both averages, which have equally many numbers to fit."""
    pooled = len(parts) > 1 and likelihood.kind in POOLED
    poolings: tuple[Pooling, ...] = ("probs", "log-probs") if pooled else ("probs",)
    found = []
    for pooling in poolings:
        fitted = copy.deepcopy(likelihood)
        temperatures: Temperatures = "auto" if len(set(parts)) > 1 else "one"
        _, nll = fitted.calibrate(batches, parts=parts, pooling=pooling, temperatures=temperatures)
        found.append((nll, fitted))
    return min(found, key=lambda pair: pair[0])[1]


def _nll(likelihood: Likelihood, outputs: Tensor, target: Tensor, parts: Sequence[int]) -> Tensor:
    stream = likelihood.stream()
    for draw, part in zip(outputs, parts, strict=True):
        stream.add(draw[None], part=part)
    log_prob = stream.result().log_prob(likelihood.marked(target)).double()
    weight = likelihood.weight(target)
    weight = torch.ones_like(log_prob) if weight is None else weight.to(log_prob).reshape(log_prob.shape)
    total, count = ((values.reshape(len(target), -1)).sum(1) for values in (-log_prob * weight, weight))
    return total[count > 0] / count[count > 0]


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """Return the mean of values, and its standard error."""
    return float(values.mean()), float(values.std()) / math.sqrt(len(values))
