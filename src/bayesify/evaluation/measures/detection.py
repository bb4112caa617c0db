"""How well a score separates in-distribution from out-of-distribution inputs.

Every function takes the two score arrays by name; higher = more suspicious. Scores may have any
shape (dense scores count per position) and may be infinite, but not NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from bayesify.evaluation.measures.arguments import ceil_share, to_double

if TYPE_CHECKING:
    from bayesify.evaluation.measures.arguments import ArrayLike

__all__ = ["aupr", "auroc", "average_precision", "fpr_at_tpr"]


def auroc(id_scores: ArrayLike, ood_scores: ArrayLike) -> float:
    """Compute the probability that an OOD input scores higher than an in-distribution one.

    P(s_ood > s_id) + P(s_ood = s_id) / 2: ties count half. The same number whichever side is
    called positive. Cost: one sort.

    Args:
        id_scores: Scores of in-distribution inputs.
        ood_scores: Scores of out-of-distribution inputs.

    Returns:
        Area under the ROC curve, 0.5 for a score without information.

    Example:
        >>> auroc(id_scores=[0.1, 0.2, 0.3], ood_scores=[0.3, 0.9])
        0.9166666666666666
    """
    inside, outside = _check_scores(id_scores, ood_scores)
    inside = inside.sort().values
    below = torch.searchsorted(inside, outside)
    not_above = torch.searchsorted(inside, outside, right=True)
    return int((below + not_above).sum()) / (2 * len(inside) * len(outside))


def aupr(id_scores: ArrayLike, ood_scores: ArrayLike, *, positive: Literal["ood", "id"] = "ood") -> float:
    """Compute the trapezoidal area under the precision-recall curve.

    sum_k (R_k - R_{k-1}) (P_k + P_{k-1}) / 2 over the distinct thresholds, from (R, P) = (0, 1).
    This is what papers call AUPR ("AUPR+" with OOD positive, "AUPR-" with ``positive="id"``);
    linear interpolation is optimistic, see ``average_precision``.

    Args:
        id_scores: Scores of in-distribution inputs.
        ood_scores: Scores of out-of-distribution inputs.
        positive: Which side is to be found; for "id" the scores are negated.

    Returns:
        Area in (0, 1].

    Example:
        >>> round(aupr(id_scores=[0.1, 0.2, 0.3], ood_scores=[0.25, 0.9]), 4)
        0.7917
    """
    precision, recall = _precision_recall(*_sides(id_scores, ood_scores, positive))
    one, zero = precision.new_ones(1), precision.new_zeros(1)
    return float(torch.trapezoid(torch.cat([one, precision]), torch.cat([zero, recall])))


def average_precision(id_scores: ArrayLike, ood_scores: ArrayLike, *, positive: Literal["ood", "id"] = "ood") -> float:
    """Compute the average precision: the step-wise area under the precision-recall curve.

    sum_k (R_k - R_{k-1}) P_k over the distinct thresholds, scikit-learn's definition. The worst
    ranking of two large sets of equal size gives 1 - ln 2, about 0.307, not 0.

    Args:
        id_scores: Scores of in-distribution inputs.
        ood_scores: Scores of out-of-distribution inputs.
        positive: Which side is to be found; for "id" the scores are negated.

    Returns:
        Average precision in (0, 1].

    Example:
        >>> round(average_precision(id_scores=[0.1, 0.2, 0.3], ood_scores=[0.25, 0.9]), 4)
        0.8333
    """
    precision, recall = _precision_recall(*_sides(id_scores, ood_scores, positive))
    return float((torch.diff(recall, prepend=recall.new_zeros(1)) * precision).sum())


def fpr_at_tpr(
    id_scores: ArrayLike,
    ood_scores: ArrayLike,
    *,
    tpr: float = 0.95,
    positive: Literal["ood", "id"] = "ood",
) -> float:
    """Compute the false alarm rate at the threshold that detects a share ``tpr``.

    With ``positive="ood"``: the threshold is the highest t for which at least a share ``tpr`` of
    the OOD inputs has s >= t, and the result is the share of in-distribution inputs with
    s >= t. Part of the literature calls "FPR95" the other direction, the share of OOD inputs
    that pass when 95 % of in-distribution inputs pass: that is ``positive="id"``.

    Args:
        id_scores: Scores of in-distribution inputs.
        ood_scores: Scores of out-of-distribution inputs.
        tpr: Share of the positive side that must be detected, in (0, 1].
        positive: Which side counts as detected; for "id" the scores are negated.

    Returns:
        Share of the other side taken for positive, 0 for perfect separation.

    Example:
        >>> fpr_at_tpr(id_scores=[0.1, 0.2, 0.3, 0.8], ood_scores=[0.25, 0.9])
        0.5
    """
    if not 0 < tpr <= 1:
        raise ValueError(f"tpr is {tpr}; give a share in (0, 1], for example 0.95.")
    positives, negatives = _sides(id_scores, ood_scores, positive)
    detected = ceil_share(tpr, len(positives))
    threshold = positives.sort(descending=True).values[detected - 1]
    return float((negatives >= threshold).double().mean())


def _check_scores(id_scores: ArrayLike, ood_scores: ArrayLike) -> tuple[Tensor, Tensor]:
    inside = to_double(id_scores, "id_scores", finite=False).detach().flatten()
    outside = to_double(ood_scores, "ood_scores", finite=False).detach().flatten()
    return inside, outside.to(inside.device)


def _sides(id_scores: ArrayLike, ood_scores: ArrayLike, positive: str) -> tuple[Tensor, Tensor]:
    """Return the scores of the positive and of the negative side, higher = positive."""
    inside, outside = _check_scores(id_scores, ood_scores)
    if positive == "ood":
        return outside, inside
    if positive == "id":
        return -inside, -outside
    raise ValueError(f'positive is {positive!r}; choose "ood" or "id".')


def _precision_recall(positives: Tensor, negatives: Tensor) -> tuple[Tensor, Tensor]:
    """Return precision and recall at every distinct threshold, from the highest down."""
    scores, order = torch.cat([positives, negatives]).sort(descending=True)
    found = (order < len(positives)).double().cumsum(0)
    taken = torch.arange(1, len(scores) + 1, dtype=torch.float64, device=scores.device)
    # Tied scores pass a threshold together: only the last of each group is a point of the curve.
    last = torch.cat([scores[1:] != scores[:-1], scores.new_ones(1, dtype=torch.bool)])
    return (found / taken)[last], (found / len(positives))[last]
