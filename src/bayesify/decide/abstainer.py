"""Decide which predictions to keep so that the error rate among them stays low."""

from __future__ import annotations

import math
from collections.abc import Iterable
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

__all__ = ["Abstainer", "Abstention", "examples_needed", "order_of_tests"]


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
    - ``monotone=False`` assumes nothing. Other examples, ``holdout``, or a quarter of the examples
      by ``seed``, say which thresholds are tested in which order: from the safest to larger
      coverages, until one fails. Thresholds and order are then fixed numbers to the rest, so that
      the first whose true risk is too high passes with a probability of at most delta, at full
      level each (Angelopoulos et al., "Learn then Test", 2021). ``max_risk`` is compared with the
      exact binomial tail, which no betting or Hoeffding-Bentkus bound of 0/1 errors improves on.

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
        holdout: tuple[ArrayLike, ArrayLike] | None = None,
        seed: int = 0,
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
            holdout: Uncertainty and correctness of other examples, for ``monotone=False``; None
                takes a quarter of the examples.
            seed: Which quarter.

        Returns:
            The fitted abstainer. Cost: one sort, plus at most sqrt(n) binomial tails. Its coverage
            and risk are of the examples that were tested.

        Raises:
            ValueError: If no threshold reaches the risk. An abstainer that keeps nothing would
                hide in production that the network cannot do what was asked.
        """
        scores, hits = check_selective(to_double(uncertainty, "uncertainty").cpu(), correct)
        max_risk = check_share(max_risk, "max_risk", closed_below=confidence is None)
        if confidence is None:
            return cls._fit_empirical(scores, hits, max_risk)
        check_share(confidence, "confidence")
        if monotone:
            if holdout is not None:
                raise ValueError("holdout chooses the order of tests where monotone=False: give both.")
            return cls._fit_guaranteed(scores, hits, max_risk, confidence)
        if holdout is None:
            order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(seed))
            quarter = max(1, len(scores) // 4)
            other, rest = order[:quarter], order[quarter:]
            return cls._fit_ordered(scores[rest], hits[rest], max_risk, confidence, scores[other], hits[other])
        first = check_selective(to_double(holdout[0], "holdout").cpu(), holdout[1])
        return cls._fit_ordered(scores, hits, max_risk, confidence, *first)

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
    def _fit_guaranteed(cls, scores: Tensor, hits: Tensor, max_risk: float, confidence: float) -> Abstainer:
        count, level = len(scores), 1 - confidence
        smallest = _smallest(count, max_risk, confidence)
        scores, order = scores.sort()
        wrong = torch.cat([hits.new_zeros(1), (1 - hits[order]).cumsum(0)])
        # A start with few examples would let one or two early errors end the search. Finer steps of
        # coverage than 1 / sqrt(n) are below the noise.
        first = min(max(2 * smallest, count // 5), count)
        ranks = _spread(first, count, math.isqrt(count - 1) + 1)
        thresholds = (float(scores[rank]) if rank < count else math.inf for rank in ranks)
        # Equal uncertainties: there may be too few below them for any test to pass.
        tested = (one for one in thresholds if int(torch.searchsorted(scores, one)) >= smallest)
        return cls._first_failed(scores, wrong, tested, max_risk, level)

    @classmethod
    def _fit_ordered(
        cls, scores: Tensor, hits: Tensor, max_risk: float, confidence: float, other: Tensor, other_hits: Tensor
    ) -> Abstainer:
        _smallest(len(scores), max_risk, confidence)
        scores, order = scores.sort()
        wrong = torch.cat([hits.new_zeros(1), (1 - hits[order]).cumsum(0)])
        tested = order_of_tests(other, other_hits, max_risk)
        return cls._first_failed(scores, wrong, tested, max_risk, 1 - confidence)

    @classmethod
    def _first_failed(
        cls, scores: Tensor, wrong: Tensor, thresholds: Iterable[float], max_risk: float, level: float
    ) -> Abstainer:
        """Test thresholds in their order until one fails, and take the largest that passed."""
        passed: list[tuple[float, int, int]] = []
        closest = (math.inf, 1, 1)
        for threshold in thresholds:
            kept = int(torch.searchsorted(scores, threshold))
            errors = int(wrong[kept])
            tail = binomial_cdf(errors, kept, max_risk)
            closest = min(closest, (tail, errors, kept))
            if tail > level:
                break
            passed.append((threshold, errors, kept))
        if not passed:
            bound = upper_bound(*closest[1:], level)
            raise ValueError(
                f"No threshold has a risk of at most {max_risk} with confidence {1 - level:g}: the "
                f"closest has a bound of {bound:.4g}; allow more risk, give more calibration "
                "examples or use a better uncertainty."
            )
        threshold, errors, kept = max(passed)
        return cls(
            threshold=threshold,
            max_risk=max_risk,
            confidence=1 - level,
            coverage=kept / len(scores),
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


def examples_needed(max_risk: float, confidence: float) -> int:
    """Return how many examples without any error show a risk.

    >>> examples_needed(0.01, 0.95), examples_needed(0.05, 0.95)
    (299, 59)
    """
    return math.ceil(math.log(1 - confidence) / math.log1p(-max_risk))


def _smallest(count: int, max_risk: float, confidence: float) -> int:
    """Return how many examples without any error show the risk; raise if there are fewer."""
    smallest = examples_needed(max_risk, confidence)
    if smallest > count:
        raise ValueError(
            f"{count} examples cannot show a risk of at most {max_risk} with confidence "
            f"{confidence}, even without any error; give at least {smallest} or ask for less."
        )
    return smallest


def order_of_tests(uncertainty: Tensor, hits: Tensor, max_risk: float, *, steps: int = 64) -> list[float]:
    """Return thresholds in the order to test them on other examples: the safest, then larger ones by their safety.

    Candidates are the uncertainties at about `steps` ranks, and infinity. Safety is the binomial tail with one error
    more than there was, so that a threshold with few examples below it does not look safe by luck.
    """
    scores, order = uncertainty.sort()
    wrong = torch.cat([hits.new_zeros(1), (1 - hits[order]).cumsum(0)])
    ranks = _spread(0, len(scores), min(steps, len(scores)))
    candidates = sorted({float(scores[rank]) if rank < len(scores) else math.inf for rank in ranks})
    kept = torch.searchsorted(scores, torch.tensor(candidates, dtype=scores.dtype)).tolist()
    safety = [binomial_cdf(int(wrong[number]) + 1, number, max_risk) for number in kept]
    start = min(range(len(candidates)), key=lambda index: (safety[index], index))
    rest = sorted(range(start + 1, len(candidates)), key=lambda index: (safety[index], index))
    return [candidates[index] for index in (start, *rest)]


def _spread(first: int, last: int, steps: int) -> list[int]:
    """Return at most steps + 1 evenly spread increasing integers, both ends included."""
    return sorted({first + (last - first) * step // steps for step in range(steps + 1)})
