"""Measures as functions of how often each example counts, for many such weightings at once.

Each function prepares what does not depend on the weights (sums over an example's positions, sorted orders) and returns
a function of weights (R, N), whole numbers that say how often each of N examples is there, to values (R,). The value is
that of the plain measure on data in which each example is repeated so often; the number of repetitions is no part of
the cost. The unit is the example: the positions of a dense output (N, ...) count together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from bayesify._core.maths import as_double
from bayesify.evaluation.measures.arguments import ceil_share, equal_width_bins

__all__ = ["Detecting", "Weighted", "aurc", "auroc", "coverage_at_risk", "ece", "ece_floor", "fpr_at_tpr", "mean"]

Weighted: TypeAlias = Callable[[Tensor], Tensor]
Detecting: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # of the weights of test examples and of OOD examples


def mean(values: Tensor, counted: Tensor | None = None) -> Weighted:
    """Prepare the mean over all positions that count: sum_n w_n s_n / sum_n w_n c_n.

    With s_n the sum of an example's values, c_n the number of its positions: two products of a matrix and a vector.

    Args:
        values: One for each position (N, ...); they may be infinite.
        counted: Which positions count (N, ...); None is all.

    Example:
        >>> mean(torch.tensor([1.0, 2.0, 6.0]))(torch.tensor([[1, 1, 1], [0, 3, 0]]).double())
        tensor([3., 2.], dtype=torch.float64)
    """
    values = as_double(values)
    counted = torch.ones_like(values, dtype=torch.bool) if counted is None else counted
    totals = values.where(counted, 0).reshape(len(values), -1).sum(1)
    counts = counted.reshape(len(values), -1).sum(1).double()
    infinite = totals.isinf()
    if not infinite.any():
        return lambda weights: (weights @ totals) / (weights @ counts)
    finite, endless = totals.where(~infinite, 0), infinite.double()

    def value(weights: Tensor) -> Tensor:  # where 0 times infinity is 0
        return ((weights @ finite) / (weights @ counts)).where(weights @ endless == 0, torch.inf)

    return value


def ece(confidence: Tensor, correct: Tensor, counted: Tensor, *, num_bins: int = 15) -> Weighted:
    """Prepare the expected calibration error in bins of equal width, as `measures.ece`.

    sum_i |sum_n w_n g_ni| / sum_n w_n c_n with g_ni the sum of confidence - correct over the positions of example n in
    bin i, and c_n the number of its positions: a product of a matrix (R, N) and one of (N, bins).

    Args:
        confidence: Probability of the predicted class (N, ...).
        correct: Whether it is the label (N, ...).
        counted: Which positions count (N, ...).
        num_bins: Number of bins.

    Example:
        >>> two = torch.tensor([0.9, 0.7]), torch.tensor([True, False]), torch.tensor([True, True])
        >>> ece(*two)(torch.tensor([[1, 1], [0, 2]]).double())
        tensor([0.4000, 0.7000], dtype=torch.float64)
    """
    gaps_of = _gaps(confidence, correct, counted, num_bins)
    return lambda weights: gaps_of(weights).abs().sum(1)


def ece_floor(confidence: Tensor, correct: Tensor, counted: Tensor, *, num_bins: int = 15) -> Weighted:
    """Prepare how small the true error may be, if the data differ from the truth as resampled data do from them.

    ece - sum_i |g_i(w) - g_i|, with g_i(w) the gap of bin i under the weights and g_i that of the data, ece = sum_i
    |g_i|. The error of resampled data is larger than that of the data where gaps are small, since noise adds to each
    |g_i|, as that of the data is larger than the true one; by the triangle inequality |ece - true ece| is at most the
    sum of the gaps' own errors, whatever they are. So the low quantile of these numbers is an honest lower end.

    Args:
        confidence: Probability of the predicted class (N, ...).
        correct: Whether it is the label (N, ...).
        counted: Which positions count (N, ...).
        num_bins: Number of bins.

    Example:
        >>> two = torch.tensor([0.9, 0.7]), torch.tensor([True, False]), torch.tensor([True, True])
        >>> ece_floor(*two)(torch.tensor([[1, 1], [0, 2]]).double())
        tensor([0.4000, 0.0000], dtype=torch.float64)
    """
    gaps_of = _gaps(confidence, correct, counted, num_bins)
    gaps = gaps_of(torch.ones(1, len(confidence), dtype=torch.float64))
    return lambda weights: gaps.abs().sum() - (gaps_of(weights) - gaps).abs().sum(1)


def _gaps(confidence: Tensor, correct: Tensor, counted: Tensor, num_bins: int) -> Weighted:
    """Prepare the share of each bin times its mean of confidence - correct, (R, num_bins)."""
    confidence = as_double(confidence)
    examples = len(confidence)
    places = num_bins * _example_of(counted) + equal_width_bins(confidence[counted], num_bins)
    gaps = torch.bincount(places, (confidence - as_double(correct))[counted], examples * num_bins)
    gaps = gaps.reshape(examples, num_bins)
    counts = counted.reshape(examples, -1).sum(1, keepdim=True).double()
    return lambda weights: (weights @ gaps) / (weights @ counts)


def aurc(uncertainty: Tensor, correct: Tensor, counted: Tensor) -> Weighted:
    r"""Prepare the area under the risk-coverage curve, as `measures.aurc`.

    Where K examples with E errors come before a group of m of equal uncertainty with e errors, the mean over all orders
    of the group adds

        sum_{j=1..m} (E + j e / m) / (K + j) = e + (E - K e / m) (H_{K + m} - H_K)

    to the sum over k of the risk of the first k, with H_k = digamma(k + 1) + const the harmonic numbers. One sort for
    all weights; two cumulative sums for each.

    Args:
        uncertainty: Of each position (N, ...).
        correct: Whether it is right (N, ...).
        counted: Which positions count (N, ...).

    Example:
        >>> doubts, right = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([True, True, True, False])
        >>> aurc(doubts, right, torch.ones_like(right))(torch.tensor([[1, 1, 1, 1], [0, 0, 2, 2]]).double())
        tensor([0.0625, 0.2083], dtype=torch.float64)
    """
    kept_and_wrong = _ranked(uncertainty, correct, counted)

    def value(weights: Tensor) -> Tensor:
        kept, wrong = kept_and_wrong(weights)
        harmonic = torch.digamma(kept + 1)
        before, errors = kept[:, :-1], wrong[:, :-1]
        rate = wrong.diff() / kept.diff().clamp(min=1)  # of a group that is not there: 0 / 1
        total = wrong[:, -1] + ((errors - before * rate) * harmonic.diff()).sum(1)
        return total / kept[:, -1]

    return value


def coverage_at_risk(uncertainty: Tensor, correct: Tensor, counted: Tensor, *, max_risk: float) -> Weighted:
    """Prepare the largest share that can be kept at an error rate of `max_risk`, as `measures.coverage_at_risk`.

    Args:
        uncertainty: Of each position (N, ...).
        correct: Whether it is right (N, ...).
        counted: Which positions count (N, ...).
        max_risk: Error rate allowed among those kept.

    Example:
        >>> doubts, right = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([True, True, True, False])
        >>> found = coverage_at_risk(doubts, right, torch.ones_like(right), max_risk=0.1)
        >>> found(torch.tensor([[1, 1, 1, 1], [1, 1, 0, 2]]).double())
        tensor([0.7500, 0.5000], dtype=torch.float64)
    """
    kept_and_wrong = _ranked(uncertainty, correct, counted)

    def value(weights: Tensor) -> Tensor:
        kept, wrong = kept_and_wrong(weights)
        return kept.where(wrong / kept <= max_risk, 0).amax(1) / kept[:, -1]  # 0 / 0 is not allowed

    return value


def auroc(id_scores: Tensor, ood_scores: Tensor) -> Detecting:
    """Prepare the area under the ROC curve, as `measures.auroc`: sum_nm w_n v_m ([s_m > s_n] + [s_m = s_n] / 2).

    Args:
        id_scores: Of each position of test examples (N, ...), with weights w.
        ood_scores: Of each position of OOD examples (M, ...), with weights v.

    Example:
        >>> found = auroc(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.3, 0.9]))
        >>> found(torch.tensor([[1, 1, 1], [0, 1, 2]]).double(), torch.tensor([[1, 1], [2, 0]]).double())
        tensor([0.9167, 0.6667], dtype=torch.float64)
    """
    inside, columns = _sorted(id_scores)
    outside, others = _sorted(ood_scores)
    below, not_above = torch.searchsorted(inside, outside), torch.searchsorted(inside, outside, right=True)
    tied = not torch.equal(below, not_above)

    def value(weights: Tensor, ood_weights: Tensor) -> Tensor:
        reached = _cumulative(weights.index_select(1, columns))
        there = ood_weights.index_select(1, others)
        passed = reached.index_select(1, below)
        if tied:
            passed = (passed + reached.index_select(1, not_above)) / 2
        return (there * passed).sum(1) / (there.sum(1) * reached[:, -1])

    return value


def fpr_at_tpr(id_scores: Tensor, ood_scores: Tensor, *, tpr: float) -> Detecting:
    """Prepare the share of test examples above the threshold that finds a share `tpr` of the OOD ones.

    As `measures.fpr_at_tpr`, with OOD as the positive side.

    Args:
        id_scores: Of each position of test examples (N, ...).
        ood_scores: Of each position of OOD examples (M, ...).
        tpr: Share of the OOD examples that must be found.

    Example:
        >>> found = fpr_at_tpr(torch.tensor([0.1, 0.2, 0.3, 0.8]), torch.tensor([0.25, 0.9]), tpr=0.95)
        >>> found(torch.ones(2, 4).double(), torch.tensor([[1, 1], [0, 2]]).double())
        tensor([0.5000, 0.0000], dtype=torch.float64)
    """
    inside, columns = _sorted(-as_double(id_scores))  # from the most suspicious down
    outside, others = _sorted(-as_double(ood_scores))
    above = torch.searchsorted(inside, outside, right=True)  # how many test positions each threshold takes
    wanted = ceil_share(tpr, len(outside))

    def value(weights: Tensor, ood_weights: Tensor) -> Tensor:
        found = ood_weights.index_select(1, others).cumsum(1)
        threshold = torch.searchsorted(found, found.new_full((len(found), 1), wanted))
        taken = _cumulative(weights.index_select(1, columns))
        return taken.gather(1, above[threshold])[:, 0] / taken[:, -1]

    return value


def _ranked(uncertainty: Tensor, correct: Tensor, counted: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Prepare how many are kept, and how many of them wrong, at each distinct uncertainty, from none on (R, G + 1)."""
    ordered, order = as_double(uncertainty[counted]).sort()
    columns, wrong = _example_of(counted)[order], 1 - as_double(correct[counted])[order]
    last = torch.cat([ordered[1:] != ordered[:-1], ordered.new_ones(1, dtype=torch.bool)])
    groups = None if last.all() else torch.cat([last.new_ones(1), last]).nonzero()[:, 0]

    def kept_and_wrong(weights: Tensor) -> tuple[Tensor, Tensor]:
        there = weights.index_select(1, columns)
        both = _cumulative(there), _cumulative(there * wrong)
        return both if groups is None else (both[0].index_select(1, groups), both[1].index_select(1, groups))

    return kept_and_wrong


def _sorted(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores of all positions in order (P,), and the example that each belongs to."""
    ordered, order = as_double(scores).flatten().sort()
    return ordered, _example_of(torch.ones_like(scores, dtype=torch.bool))[order]


def _example_of(counted: Tensor) -> Tensor:
    """Return the example of each position that counts (P,)."""
    return counted.nonzero()[:, 0]


def _cumulative(values: Tensor) -> Tensor:
    """Return the sums of the first 0, 1, ..., P of each row (R, P + 1)."""
    sums = values.new_zeros(len(values), values.shape[1] + 1)
    torch.cumsum(values, 1, out=sums[:, 1:])
    return sums
