"""What the entries of a head of attention have in common, carried into the output projection."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from bayesify.prediction.streamlined.moments import Moments, Origin, same_size

__all__ = ["Heads", "heads_of"]


@dataclass(frozen=True)
class Heads(Origin):
    """Attention's output, whose entries have the covariance C_h = L_h diag(S_h) L_h' + diag(own) in each head h.

    Values x W' + b are mixed as inputs, A x, of variance S: W moves all entries of a head together. Heads count as
    independent (Li et al. 2025, "+Cov").

    Attributes:
        loadings: L, (H, d, K): the rows of W that make a head, and for correlated weights those of V_B.
        spread: S, (B, H, T, K).
        own: What independent value weights add, (B, H, T, d), or None.
    """

    loadings: Tensor
    spread: Tensor
    own: Tensor | None

    def variance(self) -> Tensor:
        """Return diag C, (B, H, T, d)."""
        found = self.spread @ self.loadings.square().mT
        return found if self.own is None else found + self.own

    def through(self, weight: Tensor) -> Tensor:
        """Return diag(M C M') of a linear map M, (B, T, O) or (T, B, O): sum_h S_h (M_h L_h)^2 + M^2 own.

        (M_h L_h)^2 is one matrix for each head, so that the covariances are never formed.
        """
        heads, size = self.loadings.shape[:2]
        blocks = torch.unflatten(weight, 1, (heads, size)).transpose(0, 1)  # (H, O, d)
        squares = (blocks @ self.loadings).square().transpose(0, 1)  # (O, H, K)
        found = functional.linear(self.spread.transpose(1, 2).flatten(2), squares.flatten(1))
        if self.own is not None:
            found = found + functional.linear(self.own.transpose(1, 2).flatten(2), weight.square())
        return found if _batch_first(self) else found.transpose(0, 1)


def _flat(heads: Heads) -> tuple[int, ...]:
    """Return rows, tokens and width of the output when heads lie side by side."""
    rows, number, tokens, _ = heads.spread.shape
    return rows, tokens, number * heads.loadings.shape[1]


def _batch_first(heads: Heads) -> bool:
    rows, tokens, width = _flat(heads)
    present = (*heads.index.shape[:2], *heads.index.stride()[:2])
    return all(map(same_size, present, (rows, tokens, tokens * width, width)))


def heads_of(x: Tensor) -> Heads | None:
    """Return the heads of an activation that is attention's output with the heads side by side, and else None."""
    heads = x.source if isinstance(x, Moments) else None
    if not isinstance(heads, Heads) or x.ndim != 3:
        return None
    rows, tokens, width = _flat(heads)
    index = heads.index
    if not same_size(index.shape[2], width) or index.stride(2) != 1 or int(index.storage_offset()) != 0:
        return None
    token_first = (*index.shape[:2], *index.stride()[:2])
    known = _batch_first(heads) or all(map(same_size, token_first, (tokens, rows, width, tokens * width)))
    return heads if known else None
