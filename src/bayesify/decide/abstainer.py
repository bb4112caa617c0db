"""Decide which predictions to keep so that the error rate among them stays low."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify.decide._binomial import binomial_cdf, upper_bound
from bayesify.decide._state import check_state
from bayesify.evaluation.measures.arguments import check_selective, check_share, to_double
from bayesify.evaluation.measures.selective import risk_coverage

if TYPE_CHECKING:
    from bayesify.evaluation.measures.arguments import ArrayLike

__all__ = ["Abstainer", "Abstention"]


@dataclass(frozen=True, eq=False)
class Abstention:
    """What an ``Abstainer`` decided.

    Attributes:
        keep: Whether to keep each prediction, in the shape of the uncertainties.
        coverage: Share kept.
        threshold: The threshold applied: kept are uncertainties strictly below it.
    """

    keep: Tensor
    coverage: float
    threshold: float


@dataclass(frozen=True)
class Abstainer:
    """Keep the predictions whose uncertainty is below a threshold fitted to an error rate.

    Without ``confidence`` the threshold gives the largest coverage whose risk on the calibration
    data is at most ``max_risk``: #{u < t, wrong} / #{u < t} <= max_risk. The risk on new data is
    then often higher, because the luckiest threshold was chosen.

    With ``confidence`` = 1 - delta the risk on new data, R(t) = P(wrong | u < t), is at most
    ``max_risk`` with a probability of at least 1 - delta over independent calibration examples.
    Candidate thresholds are the (k+1)-th smallest calibration uncertainties for about sqrt(n)
    fixed ranks k, from a fifth of the examples up. Given a threshold, the m examples below it
    are independent draws of u < t, so with e errors among them the Clopper-Pearson test is exact:
    it passes at level a if

        sum_{i <= e} C(m, i) max_risk^i (1 - max_risk)^(m - i) <= a.

    This is Lemma 3.1 of Geifman & El-Yaniv, "Selective Classification for Deep Neural Networks",
    2017. Their binary search picks thresholds by looking at the errors; here the order of the
    tests is fixed in advance:

    - ``monotone=True`` tests from the lowest threshold up at level delta, and stops at the first
      that fails (fixed-sequence testing). Exact if errors do not get rarer as the uncertainty
      grows, P(wrong | u) non-decreasing: to exceed the risk, the first threshold beyond the true
      limit must pass, and it does so with a probability of at most delta.
    - ``monotone=False`` takes the largest threshold that passes at level delta / (number of
      candidates), a union bound that assumes nothing and keeps less.

    Build it with ``Abstainer.fit``, on examples that were not used for training.

    Attributes:
        threshold: First calibration uncertainty not kept; ``inf`` if all are kept.
        max_risk: Error rate asked for.
        confidence: Probability of the guarantee, None for no guarantee.
        coverage: Share of the calibration examples kept.
        risk: Error rate among them.
        risk_bound: Clopper-Pearson bound of the risk on new data at the level of its test, None
            without confidence.

    Example:
        >>> uncertainty = torch.linspace(0, 1, 1000)
        >>> abstainer = Abstainer.fit(uncertainty, uncertainty < 0.8, max_risk=0.05)
        >>> round(abstainer.coverage, 3), abstainer([0.1, 0.95]).keep.tolist()
        (0.842, [True, False])
        >>> Abstainer.fit(uncertainty, uncertainty < 0.8, max_risk=0.05, confidence=0.95).coverage
        0.825
    """

    threshold: float
    max_risk: float
    confidence: float | None
    coverage: float
    risk: float
    risk_bound: float | None

    @classmethod
    def fit(
        cls,
        uncertainty: ArrayLike,
        correct: ArrayLike,
        *,
        max_risk: float = 0.05,
        confidence: float | None = None,
        monotone: bool = True,
    ) -> Abstainer:
        """Choose the threshold from the uncertainty and correctness of calibration examples.

        Args:
            uncertainty: Uncertainties (n, ...), finite. Equal ones are kept or rejected together.
            correct: Whether each prediction was correct (n, ...).
            max_risk: Error rate allowed among kept predictions, in [0, 1), above 0 with
                ``confidence``.
            confidence: Probability in (0, 1) with which the risk on new data must hold.
            monotone: Whether errors may be taken to become no rarer as uncertainty grows; used
                with ``confidence`` only.

        Returns:
            The fitted abstainer. Cost: one sort, plus at most sqrt(n) binomial tails.

        Raises:
            ValueError: If no threshold reaches the risk. An abstainer that keeps nothing would
                hide in production that the network cannot do what was asked.
        """
        scores, hits = check_selective(to_double(uncertainty, "uncertainty").cpu(), correct)
        max_risk = check_share(max_risk, "max_risk", closed_below=confidence is None)
        if confidence is None:
            return cls._fit_empirical(scores, hits, max_risk)
        check_share(confidence, "confidence")
        return cls._fit_guaranteed(scores, hits, max_risk, confidence, monotone)

    @classmethod
    def _fit_empirical(cls, scores: Tensor, hits: Tensor, max_risk: float) -> Abstainer:
        curve = risk_coverage(scores, hits)
        allowed = (curve.risk <= max_risk).nonzero().flatten()
        if len(allowed) == 0:
            raise ValueError(
                f"No threshold reaches a risk of {max_risk}: the lowest on the calibration data "
                f"is {float(curve.risk.min()):.4g}; allow more risk or use a better uncertainty."
            )
        last = int(allowed[-1])
        is_all = last + 1 == len(curve.threshold)
        return cls(
            threshold=math.inf if is_all else float(curve.threshold[last + 1]),
            max_risk=max_risk,
            confidence=None,
            coverage=float(curve.coverage[last]),
            risk=float(curve.risk[last]),
            risk_bound=None,
        )

    @classmethod
    def _fit_guaranteed(
        cls, scores: Tensor, hits: Tensor, max_risk: float, confidence: float, monotone: bool
    ) -> Abstainer:
        count = len(scores)
        # Finer steps of coverage than 1 / sqrt(n) are below the noise.
        steps = math.isqrt(count - 1) + 1
        level = (1 - confidence) / (1 if monotone else steps + 1)
        smallest = math.ceil(math.log(level) / math.log1p(-max_risk))
        if smallest > count:
            raise ValueError(
                f"{count} examples cannot show a risk of at most {max_risk} with confidence "
                f"{confidence}, even without any error; give at least {smallest} or ask for less."
            )
        scores, order = scores.sort()
        wrong = torch.cat([hits.new_zeros(1), (1 - hits[order]).cumsum(0)])
        passed: tuple[float, int, int] | None = None
        closest = (math.inf, 0, 0)
        # A start with few examples would let one or two early errors end the search.
        first = min(max(2 * smallest, count // 5), count)
        for rank in _spread(first, count, steps):
            threshold = float(scores[rank]) if rank < count else math.inf
            kept = int(torch.searchsorted(scores, threshold))
            if kept < smallest:  # equal uncertainties: too few below them for any test to pass
                continue
            errors = int(wrong[kept])
            tail = binomial_cdf(errors, kept, max_risk)
            closest = min(closest, (tail, errors, kept))
            if tail <= level:
                passed = (threshold, errors, kept)
            elif monotone:
                break
        if passed is None:
            bound = upper_bound(*closest[1:], level)
            raise ValueError(
                f"No threshold has a risk of at most {max_risk} with confidence {confidence}: the "
                f"closest has a bound of {bound:.4g}; allow more risk, give more calibration "
                "examples or use a better uncertainty."
            )
        threshold, errors, kept = passed
        return cls(
            threshold=threshold,
            max_risk=max_risk,
            confidence=confidence,
            coverage=kept / count,
            risk=errors / kept,
            risk_bound=min(max_risk, upper_bound(errors, kept, level)),
        )

    def __call__(self, uncertainty: ArrayLike) -> Abstention:
        """Decide for each uncertainty; infinity is never kept, NaN is an error.

        Args:
            uncertainty: Uncertainties of new predictions, any shape.

        Returns:
            The decisions, on the device of the uncertainties.
        """
        scores = to_double(uncertainty, "uncertainty", finite=False).detach()
        keep = scores < self.threshold
        return Abstention(keep, float(keep.double().mean()), self.threshold)

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON-serialisable values; an infinite threshold becomes None.

        Example:
            >>> Abstainer.fit([0.1, 0.2], [True, True]).to_dict()["threshold"] is None
            True
        """
        state = {"kind": "Abstainer", "version": 1, **asdict(self)}
        if math.isinf(self.threshold):
            state["threshold"] = None
        return state

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Abstainer:
        """Rebuild an abstainer from ``to_dict``."""
        fields = set(cls.__dataclass_fields__)
        check_state(state, kind="Abstainer", fields=fields)
        values = {name: state[name] for name in fields}
        if values["threshold"] is None:
            values["threshold"] = math.inf
        return cls(**values)


def _spread(first: int, last: int, steps: int) -> list[int]:
    """Return at most steps + 1 evenly spread increasing integers, both ends included."""
    return sorted({first + (last - first) * step // steps for step in range(steps + 1)})
