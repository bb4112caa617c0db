"""Which dimension of an activation is the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bayesify._core.modes import evaluation_mode
from bayesify._core.trees import repeat_rows, slice_rows
from bayesify.laws.noise import BatchDim, Key, Noise

__all__ = ["grown", "learn_batch_dims"]


def learn_batch_dims(network: nn.Module, noise: Noise, run: Callable[[Any], Any], inputs: Any) -> None:
    """Find the batch in every noisy activation, once: it is the dimension that grows with the batch.

    A shape alone does not tell: (4, 2, 8) in a batch of two may be (B r, T, D) or (T, B, D), and a draw that guessed
    would be another function in another batch. Costs two passes without noise, on one example twice and three times.
    """
    noise.batch_dims = {}
    if not any(isinstance(getattr(module, "noise", None), Noise) for module in network.modules()):
        return
    try:
        one = slice_rows(inputs, 0, 1)
        keys = noise.keys[:1] or (Key(0),)
        with torch.no_grad(), evaluation_mode(network), noise.mode(silent=True, keys=keys):
            two, three = (_shapes(noise, run, repeat_rows(one, rows), rows) for rows in (2, 3))
    except Exception:  # the pass that follows says what is wrong; without one, the shape has to do
        return
    found = {site: grown(shape, three[site]) for site, shape in two.items() if site in three}
    noise.batch_dims = {site: batch for site, batch in found.items() if batch is not None}


def _shapes(noise: Noise, run: Callable[[Any], Any], inputs: Any, rows: int) -> dict[str, torch.Size]:
    with noise.recorded_shapes() as shapes, noise.one_pass(rows):
        run(inputs)
    return shapes


def grown(two: torch.Size, three: torch.Size) -> BatchDim | None:
    """Return the dimension that holds the batch, and how often; None where that is not clear."""
    dims = [dim for dim, (a, b) in enumerate(zip(two, three, strict=False)) if a != b]
    if len(two) != len(three) or len(dims) > 1:
        return None
    if not dims:
        return BatchDim(None)
    times, rest = divmod(two[dims[0]], 2)
    return BatchDim(dims[0], times) if rest == 0 and three[dims[0]] == 3 * times else None
