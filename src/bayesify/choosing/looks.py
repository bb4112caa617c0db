"""Which views of images are worth their passes, from outputs that are there."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

from bayesify.choosing.judging import POOLED
from bayesify.likelihoods import Likelihood
from bayesify.likelihoods.pooling import Pooling
from bayesify.prediction.trials import Batches, halves

__all__ = ["grown", "names_of", "some", "wanted"]

_SHIFTS = [(1, 0), (-1, 0), (2, 0), (-2, 0), (0, 1), (0, -1), (0, 2), (0, -2)]


def names_of(passes: int) -> list[str]:
    """Return the views of images that sets are made of."""
    names = ["identity", "mirror", "flip"]
    return names if passes < 4 else [*names, *(name for pair in _pairs() for name in pair if name not in names)]


def _pairs() -> list[tuple[str, str]]:
    shifts = [(f"shift({down},{right})", f"mirror+shift({-down},{right})") for down, right in _SHIFTS]
    return [("flip", "mirror+flip"), *shifts]


def grown(likelihood: Likelihood, batches: Batches, names: Sequence[str], passes: int) -> Iterator[list[str]]:
    """Give sets of views: the image with each reflection of it, then the better of these with the next best pair.

    Args:
        likelihood: Of the network.
        batches: Its outputs for each view (V, B, ...), and targets: what the sets are found on.
        names: Of the views.
        passes: The most that a set may have.
    """
    pooling: Pooling = "log-probs" if likelihood.kind in POOLED else "probs"

    def nll(chosen: Sequence[str]) -> float:
        own = some(batches, [names.index(name) for name in chosen])
        return copy.deepcopy(likelihood).calibrate(own, pooling=pooling)[1]

    first = [["identity", "mirror"], ["identity", "flip"]]
    yield from first
    rest = [pair for pair in _pairs() if set(pair) <= set(names)]
    if passes < 4 or not rest:
        return
    best = min(first, key=nll)
    while len(best) + 2 <= passes and rest:
        sets = [[*best, *(name for name in pair if name not in best)] for pair in rest]
        index = min(range(len(sets)), key=lambda index: nll(sets[index]))
        best = sets[index]
        del rest[index]
        yield best


def wanted(likelihood: Likelihood, batches: Batches, names: Sequence[str], passes: int) -> list[str]:
    """Return the views that are in any set that either half of the examples finds, or both, and each reflection."""
    parts = [*(half for half, _ in halves(batches)), batches]
    kept = {name for part in parts for chosen in grown(likelihood, part, names, passes) for name in chosen}
    return [name for name in names if name in kept]


def some(batches: Batches, draws: list[int]) -> Batches:
    """Return some of the draws."""
    return [(outputs[draws], target) for outputs, target in batches]
