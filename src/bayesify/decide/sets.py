"""Sets of classes that hold the right one with a promised probability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from bayesify.decide._state import check_state
from bayesify.decide.conformal import as_groups, group_quantiles
from bayesify.evaluation.measures.arguments import check_probs, check_share, flatten
from bayesify.likelihoods.prediction import ClassificationPrediction, Prediction

if TYPE_CHECKING:
    from bayesify.evaluation.measures.arguments import ArrayLike

__all__ = ["PredictionSets", "SetKind"]

SetKind = Literal["split", "aps", "raps"]
_FIELDS = {"set_kind", "coverage", "condition", "thresholds", "penalty", "free"}


@dataclass(frozen=True, eq=False)
class PredictionSets:
    """Sets of classes, by split conformal prediction: {c : s(x, c) <= q}.

    q is the conformal quantile of the scores s(x_i, y_i) of calibration examples, so that P(y in set) >= coverage for a
    new example that is exchangeable with them, whatever the network; the probability is over both. What s is decides
    how large the sets are and where they are large, p_c being the predictive probabilities:

    - "split": 1 - p_c. The smallest sets on average; they can be empty, where nothing fits (Sadinle et al. 2019).
    - "aps": the sum of the probabilities down to that of c, of the classes in the order of their probabilities. Sets
      grow with how hard the input is (Romano et al. 2020). With a seed, c's own probability counts by a uniform share,
      which makes sets smaller and random; without, they are never empty but for a quantile below the largest
      probability, and the same each time.
    - "raps": that, plus `penalty` for each class beyond the first `free` (Angelopoulos et al. 2021).

    With `condition="class"` every class has a quantile of its own: P(y in set | y = c) >= coverage for each c. With
    groups (whole numbers that are known of a new input as well) the same holds in each. A class or group with fewer
    than coverage / (1 - coverage) examples is in every set, or has all classes: nothing less can be promised.

    Build it with `PredictionSets.fit`, on examples that were neither trained nor calibrated on.

    Attributes:
        set_kind: Which score.
        coverage: The probability that was promised.
        condition: None, "class" or "group".
        thresholds: The quantiles, (1,), (C,) or (groups,).
        penalty: Of "raps".
        free: Of "raps".

    Example:
        >>> probs = torch.tensor([[0.7, 0.2, 0.1]]).repeat(9, 1)
        >>> sets = PredictionSets.fit(probs, torch.tensor([0] * 7 + [1] * 2), coverage=0.8)
        >>> sets(torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.25, 0.25]])).tolist()
        [[True, True, False], [True, True, True]]
    """

    set_kind: SetKind
    coverage: float
    condition: Literal["class", "group"] | None
    thresholds: Tensor
    penalty: float = 0.0
    free: int = 0

    @classmethod
    def fit(
        cls,
        prediction: Prediction | ArrayLike,
        targets: ArrayLike,
        *,
        coverage: float = 0.9,
        kind: SetKind = "split",
        condition: Literal["class"] | None = None,
        groups: ArrayLike | None = None,
        penalty: float = 0.01,
        free: int = 5,
        seed: int | None = None,
    ) -> PredictionSets:
        """Find the quantiles from calibration examples.

        Args:
            prediction: Of classes, or probabilities (N, C); dense ones are taken position by position, which are not
                independent within an example.
            targets: Labels (N, ...); those that are -100 do not count.
            coverage: The probability with which a set must hold the label, in (0, 1).
            kind: "split", "aps" or "raps".
            condition: "class" promises the coverage for each class.
            groups: Whole numbers (N,) from 0 on; the coverage is then promised for each group.
            penalty: Of "raps".
            free: Of "raps".
            seed: Of the uniform shares of "aps" and "raps"; None counts a class's own probability whole.
        """
        if kind not in get_args(SetKind):
            raise ValueError(f"kind must be one of {list(get_args(SetKind))}, but it is {kind!r}.")
        if condition not in (None, "class"):
            raise ValueError(f"condition must be None or 'class', but it is {condition!r}; for groups give groups=.")
        if condition is not None and groups is not None:
            raise ValueError("condition='class' and groups= are two promises: give one of them.")
        if penalty < 0 or free < 0:
            raise ValueError(f"penalty and free must be at least 0, but they are {penalty} and {free}.")
        whole = _probs(prediction)
        probs, labels = flatten(whole, targets, -100)
        made = cls(
            set_kind=kind,
            coverage=check_share(coverage, "coverage"),
            condition="group" if groups is not None else condition,
            thresholds=torch.empty(0),
            penalty=float(penalty) if kind == "raps" else 0.0,
            free=int(free) if kind == "raps" else 0,
        )
        scores = made.scores(probs, seed=seed).gather(-1, labels[:, None])[:, 0]
        classes = probs.shape[-1]
        if groups is not None:
            if len(labels) != len(whole):
                raise ValueError("groups are for one label for each example, none of which is -100. Leave those out.")
            which = as_groups(groups, len(labels))
            number = int(which.max()) + 1
        else:
            which, number = (labels, classes) if condition == "class" else (torch.zeros_like(labels), 1)
        object.__setattr__(made, "thresholds", group_quantiles(scores, which, number, coverage))
        return made

    def scores(self, probs: Tensor, *, seed: int | None = None) -> Tensor:
        """Return s(x, c) of every class, (..., C), in float64; higher fits worse."""
        if self.set_kind == "split":
            return 1 - probs
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        total = ordered.cumsum(-1)
        if seed is None:
            total[..., -1] = 1  # which rounding would make many numbers
        else:
            share = torch.rand(ordered.shape[:-1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            total = total - ordered * (1 - share[..., None]).to(ordered.device)
        ranks = torch.arange(1, probs.shape[-1] + 1, device=probs.device)
        total = total + self.penalty * (ranks - self.free).clamp_min(0)
        return torch.empty_like(total).scatter(-1, order, total)

    def __call__(
        self, prediction: Prediction | ArrayLike, *, groups: ArrayLike | None = None, seed: int | None = None
    ) -> Tensor:
        """Return which classes are in each set, (N, ..., C).

        Args:
            prediction: Of classes, or probabilities (N, C).
            groups: The group of each example, where the quantiles are groups'; one that was never seen has all classes.
            seed: As in `fit`, and another one.
        """
        probs = _probs(prediction)
        scores, quantiles = self.scores(probs, seed=seed), self.thresholds.to(probs.device)
        if (groups is None) != (self.condition != "group"):
            raise ValueError("Give groups= to sets that were fitted to groups, and only to them.")
        if self.condition == "class" and len(quantiles) != probs.shape[-1]:
            raise ValueError(f"The sets are of {len(quantiles)} classes, and the prediction has {probs.shape[-1]}.")
        if groups is not None:
            which = as_groups(groups, len(probs)).to(probs.device)
            known = which < len(quantiles)
            own = quantiles[which.clamp_max(len(quantiles) - 1)].where(known, torch.inf)
            quantiles = own.view(-1, *(1,) * (probs.ndim - 1))
        return scores <= quantiles

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON-serialisable values; an infinite quantile becomes None."""
        values = {name: getattr(self, name) for name in sorted(_FIELDS)}
        finite = [None if value == float("inf") else value for value in self.thresholds.tolist()]
        return {"kind": "PredictionSets", "version": 1, **values, "thresholds": finite}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> PredictionSets:
        """Rebuild sets from `to_dict`."""
        check_state(state, kind="PredictionSets", fields=_FIELDS)
        values = {name: state[name] for name in _FIELDS}
        quantiles = [float("inf") if value is None else value for value in values["thresholds"]]
        return cls(**{**values, "thresholds": torch.tensor(quantiles, dtype=torch.float64)})


def _probs(prediction: Any) -> Tensor:
    if isinstance(prediction, ClassificationPrediction):
        prediction = prediction.probs
    elif isinstance(prediction, Prediction):
        raise TypeError(f"A {type(prediction).__name__} has no classes to make sets of. Use PredictionIntervals.")
    return check_probs(prediction).detach()
