"""Answer where that is cheaper than to ask."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify.decide._binomial import binomial_cdf
from bayesify.decide._state import check_state
from bayesify.decide.abstainer import Abstention
from bayesify.evaluation.measures.arguments import check_selective, check_share, to_double

if TYPE_CHECKING:
    from bayesify.evaluation.measures.arguments import ArrayLike

__all__ = ["CostAbstainer", "mean_upper_bound"]


@dataclass(frozen=True)
class CostAbstainer:
    """Keep the predictions whose uncertainty is below the threshold of least cost, and bound what that costs.

    An error of an answer costs `error_cost`, a question to a person `question_cost`. One half of the examples chooses
    the threshold of least mean cost,

        (error_cost #{u < t, wrong} + question_cost #{u >= t}) / n.

    To the other half it is a fixed number, and their costs are independent and bounded, so that their mean has an upper
    bound that holds with a probability of at least `confidence` (`mean_upper_bound`). Chow's rule (1970), to ask where
    P(wrong | x) > question_cost / error_cost, is what the threshold comes to where the uncertainty is that probability.

    Build it with `CostAbstainer.fit`, on examples that were not used for training.

    Attributes:
        threshold: Predictions with less uncertainty are kept; infinity if all are, minus infinity if none.
        error_cost: Of a wrong answer.
        question_cost: Of a question.
        confidence: Probability of the bound.
        coverage: Share of the second half that is kept.
        cost: Mean cost of its examples.
        cost_bound: Upper bound of the mean cost of new ones.

    Example:
        >>> u = torch.linspace(0, 1, 1000)
        >>> abstainer = CostAbstainer.fit(u, u < 0.8, error_cost=10.0, question_cost=1.0)
        >>> round(abstainer.threshold, 1), round(abstainer.cost, 1), abstainer.cost_bound < 1
        (0.8, 0.2, True)
    """

    threshold: float
    error_cost: float
    question_cost: float
    confidence: float
    coverage: float
    cost: float
    cost_bound: float

    @classmethod
    def fit(
        cls,
        uncertainty: ArrayLike,
        correct: ArrayLike,
        *,
        error_cost: float,
        question_cost: float,
        confidence: float = 0.95,
        seed: int = 0,
    ) -> CostAbstainer:
        """Choose the threshold on one half of the examples, and bound its cost by the other.

        Args:
            uncertainty: Uncertainties (n,), finite.
            correct: Whether each prediction was correct (n,).
            error_cost: Of a wrong answer, above 0.
            question_cost: Of a question, above 0. At `error_cost` or more, answering everything costs least.
            confidence: Probability in (0, 1) with which the bound must hold.
            seed: Of the halves.
        """
        scores, hits = check_selective(to_double(uncertainty, "uncertainty").cpu(), correct)
        check_share(confidence, "confidence")
        for name, value in (("error_cost", error_cost), ("question_cost", question_cost)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, but it is {value}.")
        if len(scores) < 2:
            raise ValueError("One example cannot choose and bound: give at least two.")
        order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(seed))
        first, second = order[: len(order) // 2], order[len(order) // 2 :]
        threshold = _cheapest(scores[first], hits[first], error_cost, question_cost)
        keep = scores[second] < threshold
        costs = torch.where(keep, error_cost * (1 - hits[second]), question_cost)
        largest = max(error_cost, question_cost)
        return cls(
            threshold=threshold,
            error_cost=float(error_cost),
            question_cost=float(question_cost),
            confidence=confidence,
            coverage=float(keep.double().mean()),
            cost=float(costs.mean()),
            cost_bound=largest * mean_upper_bound(costs / largest, confidence),
        )

    def __call__(self, uncertainty: ArrayLike) -> Abstention:
        """Decide for each uncertainty; infinity is never kept, NaN is an error."""
        scores = to_double(uncertainty, "uncertainty", finite=False).detach()
        keep = scores < self.threshold
        return Abstention(keep, float(keep.double().mean()), self.threshold)

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON-serialisable values; an infinite threshold is text."""
        values = asdict(self)
        if math.isinf(self.threshold):
            values["threshold"] = str(self.threshold)
        return {"kind": "CostAbstainer", "version": 1, **values}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> CostAbstainer:
        """Rebuild an abstainer from `to_dict`."""
        fields = set(cls.__dataclass_fields__)
        check_state(state, kind="CostAbstainer", fields=fields)
        return cls(**{name: float(state[name]) for name in fields})


def _cheapest(scores: Tensor, hits: Tensor, error_cost: float, question_cost: float) -> float:
    """Return the threshold of least mean cost: between two uncertainties, or at an end."""
    ordered, order = scores.sort()
    wrong = torch.cat([hits.new_zeros(1), (1 - hits[order]).cumsum(0)])
    kept = torch.arange(len(scores) + 1)
    cost = error_cost * wrong + question_cost * (len(scores) - kept)
    # Equal uncertainties are kept or not together.
    possible = torch.cat([torch.ones(1, dtype=torch.bool), ordered.diff() > 0, torch.ones(1, dtype=torch.bool)])
    best = int(cost.where(possible, torch.inf).argmin())
    if best == 0:
        return -math.inf
    return math.inf if best == len(scores) else float(ordered[best])


def mean_upper_bound(values: ArrayLike, confidence: float) -> float:
    """Return an upper bound of the mean of independent numbers from 0 to 1, the Hoeffding-Bentkus one.

    The smallest m at which the p-value of "the mean is at least m" falls to 1 - confidence, where it is, for n numbers
    of the average a < m, the lesser of exp(-n KL(a, m)) (Hoeffding 1963), KL that of two coins, and e P(Bin(n, m) <=
    ceil(n a)) (Bentkus 2004); see Bates et al. 2021.

    Args:
        values: Numbers (n,) from 0 to 1.
        confidence: Probability in (0, 1) with which the bound must hold.

    Example:
        >>> round(mean_upper_bound(torch.zeros(100), 0.95), 3)  # 1 - 0.05^(1/100)
        0.03
    """
    flat = to_double(values, "values").detach().cpu().flatten()
    level = 1 - check_share(confidence, "confidence")
    if bool(((flat < 0) | (flat > 1)).any()):
        raise ValueError("values must be from 0 to 1; divide them by the largest that is possible.")
    count, average = len(flat), float(flat.mean())
    low, high = average, 1.0
    for _ in range(45):  # to 3e-14
        middle = (low + high) / 2
        if _tail(average, count, middle) > level:
            low = middle
        else:
            high = middle
    return high


def _tail(average: float, count: int, mean: float) -> float:
    """Return the Hoeffding-Bentkus p-value of a mean of at least so much, above the average."""
    if not 0 < mean < 1:
        return float(mean <= 0)

    def term(a: float, b: float) -> float:
        return 0.0 if a == 0 else a * math.log(a / b)

    hoeffding = math.exp(-count * (term(average, mean) + term(1 - average, 1 - mean)))
    # n a may be above a whole number by rounding alone.
    bentkus = math.e * binomial_cdf(math.ceil(count * average - 1e-9), count, mean)
    return min(1.0, hoeffding, bentkus)
