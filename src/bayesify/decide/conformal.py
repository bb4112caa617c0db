"""The conformal quantile, and how examples are put into groups that have one each."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bayesify.evaluation.measures.arguments import ceil_share, check_share, to_double, to_tensor

if TYPE_CHECKING:
    from bayesify.evaluation.measures.arguments import ArrayLike

__all__ = ["as_groups", "conformal_quantile", "group_quantiles"]


def conformal_quantile(scores: ArrayLike, coverage: float) -> float:
    """Return the k-th smallest of n scores, k = ceil((n + 1) coverage); infinity if k > n.

    A new score that is exchangeable with these is at most that with a probability of at least `coverage`, and below
    coverage + 1 / (n + 1) if scores are never equal. The probability is over these scores and the new one together
    (Vovk et al. 2005). Infinity, which holds for every score, is what too few of them can promise.

    Args:
        scores: How badly each calibration example fits, (n,); infinite ones are allowed.
        coverage: The share that must lie below, in (0, 1).

    Example:
        >>> conformal_quantile([3.0, 1.0, 2.0, 4.0], 0.8), conformal_quantile([3.0, 1.0], 0.8)
        (4.0, inf)
    """
    coverage = check_share(coverage, "coverage")
    flat = to_double(scores, "scores", finite=False).detach().flatten()
    rank = ceil_share(coverage, len(flat) + 1)
    return math.inf if rank > len(flat) else float(flat.kthvalue(rank).values)


def group_quantiles(scores: Tensor, groups: Tensor, number: int, coverage: float) -> Tensor:
    """Return the conformal quantile of each group of scores, (number,); infinity for those with too few."""
    members = [scores[groups == group] for group in range(number)]
    found = [conformal_quantile(one, coverage) if len(one) else math.inf for one in members]
    return torch.tensor(found, dtype=torch.float64)


def as_groups(groups: ArrayLike, count: int) -> Tensor:
    """Return whole numbers from zero on, one for each of `count` examples."""
    found = to_tensor(groups, "groups").detach().cpu()
    if found.is_floating_point() or found.dtype == torch.bool or found.shape != (count,) or int(found.min()) < 0:
        raise ValueError(
            f"groups are {found.dtype} of shape {tuple(found.shape)}; give one whole number from 0 on for each of the "
            f"{count} examples."
        )
    return found.long()
