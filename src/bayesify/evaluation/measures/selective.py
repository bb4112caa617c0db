"""What is gained by leaving the most uncertain inputs to a person.

Every function takes the uncertainty of each prediction and whether it was correct, two arrays of
one shape. Examples of equal uncertainty cannot be told apart by a threshold; each function says
what it does with them, and none depends on the order of the examples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bayesify.evaluation.measures.arguments import (
    check_count,
    check_selective,
    check_share,
    equal_mass_bins,
    to_double,
)

if TYPE_CHECKING:
    from bayesify.evaluation.measures.arguments import ArrayLike

__all__ = [
    "RiskCoverage",
    "accuracy_after_rejection",
    "accuracy_by_bucket",
    "aurc",
    "coverage_at_risk",
    "risk_coverage",
]


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """A risk-coverage curve, one entry per distinct uncertainty, coverage increasing.

    Attributes:
        coverage: Share of examples kept (K,).
        risk: Share of wrong predictions among those kept (K,).
        threshold: The point keeps all examples with uncertainty <= threshold (K,).
    """

    coverage: Tensor
    risk: Tensor
    threshold: Tensor


def risk_coverage(uncertainty: ArrayLike, correct: ArrayLike) -> RiskCoverage:
    """Compute the error rate among the kept examples for every threshold on the uncertainty.

    coverage(t) = (1/N) #{u <= t} and risk(t) = #{u <= t, wrong} / #{u <= t}; Geifman & El-Yaniv,
    "Selective Classification for Deep Neural Networks", 2017, section 2. Equal uncertainties
    are kept or rejected together, so the curve has only points that a threshold can reach.

    Args:
        uncertainty: Uncertainties (N, ...), higher = rejected earlier.
        correct: Whether each prediction was correct (N, ...), bool or 0 and 1.

    Returns:
        Coverage, risk and threshold, (K,) each for K distinct uncertainties.

    Example:
        >>> curve = risk_coverage([0.1, 0.2, 0.2, 0.9], [True, True, False, False])
        >>> curve.coverage.tolist(), curve.risk[-1].item()
        ([0.25, 0.75, 1.0], 0.5)
    """
    scores, hits = check_selective(uncertainty, correct)
    distinct, group = torch.unique(scores, return_inverse=True)
    kept = torch.bincount(group, minlength=len(distinct)).cumsum(0).double()
    wrong = torch.bincount(group, 1 - hits, len(distinct)).cumsum(0)
    return RiskCoverage(coverage=kept / len(scores), risk=wrong / kept, threshold=distinct)


def aurc(uncertainty: ArrayLike, correct: ArrayLike) -> float:
    """Compute the area under the risk-coverage curve.

    (1/N) sum_{k=1..N} risk of the k least uncertain examples; Geifman et al., "Bias-Reduced
    Uncertainty Estimation for Deep Neural Classifiers", 2019. Among equal uncertainties the
    value is the mean over all their orders.

    Args:
        uncertainty: Uncertainties (N, ...).
        correct: Whether each prediction was correct (N, ...).

    Returns:
        Mean selective risk in [0, 1], lower is better.

    Example:
        >>> aurc([0.1, 0.2, 0.3, 0.4], [True, True, True, False])
        0.0625
    """
    wrong = _wrong_among_first(*check_selective(uncertainty, correct))
    kept = torch.arange(1, len(wrong), dtype=torch.float64, device=wrong.device)
    return float((wrong[1:] / kept).mean())


def coverage_at_risk(uncertainty: ArrayLike, correct: ArrayLike, *, max_risk: float) -> float:
    """Compute the largest share of examples that can be kept at an error rate of ``max_risk``.

    max {coverage(t) : risk(t) <= max_risk} over the thresholds t, 0 if no threshold reaches it.
    This describes the given data; ``bayesify.decide.Abstainer`` chooses a threshold for new data.

    Args:
        uncertainty: Uncertainties (N, ...).
        correct: Whether each prediction was correct (N, ...).
        max_risk: Error rate allowed among the kept examples, in [0, 1).

    Returns:
        Coverage in [0, 1].

    Example:
        >>> coverage_at_risk([0.1, 0.2, 0.3, 0.4], [True, True, True, False], max_risk=0.1)
        0.75
    """
    max_risk = check_share(max_risk, "max_risk", closed_below=True)
    curve = risk_coverage(uncertainty, correct)
    allowed = curve.coverage[curve.risk <= max_risk]
    return float(allowed[-1]) if len(allowed) else 0.0


def accuracy_after_rejection(uncertainty: ArrayLike, correct: ArrayLike, *, fractions: ArrayLike) -> Tensor:
    """Compute the accuracy on what remains after rejecting the most uncertain examples.

    For each fraction f the floor(f N) most uncertain examples are rejected. Where the cut falls
    among equal uncertainties the value is the mean over all their orders.

    Args:
        uncertainty: Uncertainties (N, ...).
        correct: Whether each prediction was correct (N, ...).
        fractions: Shares to reject (F,), each in [0, 1).

    Returns:
        Accuracies (F,).

    Example:
        >>> accuracy_after_rejection([0.1, 0.2, 0.3, 0.4], [1, 1, 1, 0], fractions=[0.0, 0.25])
        tensor([0.7500, 1.0000], dtype=torch.float64)
    """
    wrong = _wrong_among_first(*check_selective(uncertainty, correct))
    count = len(wrong) - 1
    shares = to_double(fractions, "fractions").to(wrong.device)
    if shares.min() < 0 or shares.max() >= 1:
        raise ValueError("fractions leave [0, 1); reject less than everything, for example 0.2.")
    # Scaled up by more than a float32 rounding error: 0.29 of 100 examples is 29, not 28.
    rejected = (shares * (1 + 1e-7) * count).floor().long().clamp(max=count - 1)
    kept = count - rejected
    return 1 - wrong[kept] / kept


def accuracy_by_bucket(uncertainty: ArrayLike, correct: ArrayLike, *, num_buckets: int = 10) -> Tensor:
    """Compute the accuracy in each quantile bucket of the uncertainty.

    An example belongs to bucket floor(num_buckets * #{less uncertain} / N), from the most
    certain to the most uncertain. Equal uncertainties share a bucket, which may leave others
    empty.

    Args:
        uncertainty: Uncertainties (N, ...).
        correct: Whether each prediction was correct (N, ...).
        num_buckets: Number of buckets, at most N.

    Returns:
        Accuracies (num_buckets,), NaN in an empty bucket.

    Example:
        >>> accuracy_by_bucket([0.1, 0.2, 0.3, 0.4], [1, 1, 1, 0], num_buckets=2)
        tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    scores, hits = check_selective(uncertainty, correct)
    if check_count(num_buckets, "num_buckets") > len(scores):
        raise ValueError(f"{num_buckets} buckets for {len(scores)} examples; ask for fewer buckets.")
    bucket = equal_mass_bins(scores, num_buckets)
    return torch.bincount(bucket, hits, num_buckets) / torch.bincount(bucket, minlength=num_buckets)


def _wrong_among_first(scores: Tensor, hits: Tensor) -> Tensor:
    """Return the expected errors among the k least uncertain (N + 1,), k = 0..N.

    Within a group of equal uncertainties the errors are spread evenly: the expectation over a
    random order of the group.
    """
    ordered, order = scores.sort()
    zero = scores.new_zeros(1)
    wrong = torch.cat([zero, (1 - hits[order]).cumsum(0)])
    start = torch.searchsorted(ordered, ordered)
    end = torch.searchsorted(ordered, ordered, right=True)
    position = torch.arange(1, len(ordered) + 1, device=scores.device)
    share = (position - start) / (end - start).double()
    return torch.cat([zero, wrong[start] + share * (wrong[end] - wrong[start])])
