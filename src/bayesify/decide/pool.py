"""Choose from a pool of any size, in one pass over it and in memory that does not grow with it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bayesify._core.inputs import as_loader
from bayesify._core.trees import batch_rows, inputs_of, without_arrays
from bayesify.decide.acquisition import SCORES, batch_bald, check_acquisition, refuse_nan
from bayesify.laws import Posterior
from bayesify.likelihoods.prediction import Prediction
from bayesify.prediction import Predictor, predict

__all__ = ["acquire_streaming"]


class _Best:
    """The rows of the highest scores so far, with what belongs to them; equal scores in a random order."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.generator, self.seen = size, torch.Generator().manual_seed(seed), 0
        self.scores = self.order = torch.empty(0, dtype=torch.float64)
        self.rows = torch.empty(0, dtype=torch.long)
        self.samples: Tensor | None = None  # (S, kept, C)

    def add(self, scores: Tensor, samples: Tensor | None = None) -> None:
        rows = torch.arange(self.seen, self.seen + len(scores))
        self.seen += len(scores)
        order = torch.rand(len(scores), generator=self.generator, dtype=torch.float64)
        if len(self.rows) == self.size:  # most of a long pool
            possible = scores >= self.scores[-1]
            scores, order, rows = scores[possible], order[possible], rows[possible]
            samples = None if samples is None else samples[:, possible]
        if not len(rows):
            return
        scores, order = torch.cat([self.scores, scores]), torch.cat([self.order, order])
        first = order.argsort()
        best = first[scores[first].argsort(descending=True, stable=True)][: self.size]
        self.scores, self.order, self.rows = scores[best], order[best], torch.cat([self.rows, rows])[best]
        if samples is not None:
            both = samples if self.samples is None else torch.cat([self.samples, samples], 1)
            self.samples = both[:, best]


def acquire_streaming(
    posterior: Posterior,
    loader: Iterable[Any],
    num: int,
    *,
    acquisition: str = "bald",
    seed: int = 0,
    predictor: str | Predictor = "sampling",
    num_draws: int | None = None,
    candidates: int | None = None,
) -> Tensor:
    """Return the rows of a loader that are most worth a label, best first; see `acquire`."""
    check_acquisition(acquisition, num)
    together = acquisition == "batch-bald"
    if candidates is not None and candidates < num:
        raise ValueError(f"candidates must be at least num, {num}, but it is {candidates}.")
    best = _Best((candidates or max(20 * num, 200)) if together else num, seed)
    options: dict[str, Any] = {"how": predictor, "num_draws": num_draws, "seed": seed, "keep_samples": together}
    for batch in as_loader(loader, "acquire"):
        inputs = inputs_of(without_arrays(batch))
        if acquisition == "random":
            best.add(torch.zeros(batch_rows(inputs), dtype=torch.float64))
            continue
        prediction: Prediction = predict(posterior, inputs, **options)
        scores = prediction.score(SCORES["bald" if together else acquisition]).detach().cpu().double()
        if scores.ndim != 1:
            raise ValueError(f"Scores of shape {tuple(scores.shape)} are not one per example. Average dense ones.")
        refuse_nan(scores.isnan())
        best.add(scores, prediction.samples.cpu() if together else None)  # type: ignore[attr-defined]
    if not best.seen:
        raise ValueError("The pool is empty: the loader gave no batch. Check its data set and sampler.")
    if best.samples is None:
        return best.rows
    return best.rows[batch_bald(best.samples, num, seed=seed)]
