"""Intervals that hold the right number with a promised probability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from bayesify._core.maths import as_double
from bayesify.decide._state import check_state
from bayesify.decide.conformal import as_groups, group_quantiles
from bayesify.evaluation.measures.arguments import check_same_shape, check_share, to_double
from bayesify.likelihoods.prediction import Prediction, RegressionPrediction

if TYPE_CHECKING:
    from bayesify.evaluation.measures.arguments import ArrayLike

__all__ = ["IntervalKind", "PredictionIntervals"]

IntervalKind = Literal["normalised", "absolute", "quantile"]
_FIELDS = {"interval_kind", "coverage", "by_group", "thresholds"}


@dataclass(frozen=True, eq=False)
class PredictionIntervals:
    """Intervals of numbers, by split conformal prediction, around a prediction of any network.

    q is the conformal quantile of the scores of calibration examples (`conformal_quantile`), so that a new example that
    is exchangeable with them lies in its interval with a probability of at least `coverage`, over both.

    - "normalised": s = |y - mean| / std; mean -+ q std. As wide as the prediction is unsure (Papadopoulos et al. 2008).
    - "absolute": s = |y - mean|; mean -+ q. Equally wide everywhere.
    - "quantile": s = max(low - y, y - high) of the prediction's own interval at that level, or of two quantiles that
      are given; (low - q, high + q), where q can be negative (CQR, Romano et al. 2019).

    Where an example has several outputs, s is the largest of them, and the box holds all of them together.

    Attributes:
        interval_kind: Which score.
        coverage: The probability that was promised.
        by_group: Whether each group has a quantile of its own.
        thresholds: The quantiles, (1,) or (groups,).

    Example:
        >>> one = torch.ones(9)
        >>> prediction = RegressionPrediction(0 * one, one, 0 * one)
        >>> intervals = PredictionIntervals.fit(prediction, torch.arange(9.0), coverage=0.8)
        >>> low, high = intervals(prediction[:1])
        >>> low.item(), high.item()
        (-7.0, 7.0)
    """

    interval_kind: IntervalKind
    coverage: float
    by_group: bool
    thresholds: Tensor

    @classmethod
    def fit(
        cls,
        prediction: Prediction | tuple[ArrayLike, ArrayLike],
        targets: ArrayLike,
        *,
        coverage: float = 0.9,
        kind: IntervalKind = "normalised",
        groups: ArrayLike | None = None,
    ) -> PredictionIntervals:
        """Find the quantiles from calibration examples.

        Args:
            prediction: Of numbers; or, for "quantile", two quantiles (low, high) of any model, (N, ...) each.
            targets: The numbers (N, ...).
            coverage: The probability with which an interval must hold the target, in (0, 1).
            kind: "normalised", "absolute" or "quantile".
            groups: Whole numbers (N,) from 0 on; the coverage is then promised for each group.
        """
        if kind not in get_args(IntervalKind):
            raise ValueError(f"kind must be one of {list(get_args(IntervalKind))}, but it is {kind!r}.")
        coverage = check_share(coverage, "coverage")
        low, high, unit = _ends(prediction, kind, coverage)
        if isinstance(prediction, RegressionPrediction):
            wanted = prediction.aligned(torch.as_tensor(targets))
        else:
            wanted = to_double(targets, "targets").to(low.device)
        check_same_shape(targets=wanted, prediction=low)
        if not bool(wanted.isfinite().all()):
            raise ValueError("targets contain NaN or infinite values; leave those examples out.")
        scores = (torch.maximum(low - wanted, wanted - high) / unit).flatten(1 if low.ndim > 1 else 0)
        scores = (scores.amax(1) if scores.ndim > 1 else scores).cpu()
        which = torch.zeros(len(scores), dtype=torch.long) if groups is None else as_groups(groups, len(scores))
        found = group_quantiles(scores, which, int(which.max()) + 1, coverage)
        return cls(kind, coverage, groups is not None, found)

    def __call__(
        self, prediction: Prediction | tuple[ArrayLike, ArrayLike], *, groups: ArrayLike | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the ends of the intervals, (N, ...) each, in float64.

        Args:
            prediction: As in `fit`.
            groups: The group of each example, where the quantiles are groups'; one that was never seen has the line.
        """
        if (groups is None) == self.by_group:
            raise ValueError("Give groups= to intervals that were fitted to groups, and only to them.")
        low, high, unit = _ends(prediction, self.interval_kind, self.coverage)
        quantiles = self.thresholds.to(low.device)
        if groups is not None:
            which = as_groups(groups, len(low)).to(low.device)
            own = quantiles[which.clamp_max(len(quantiles) - 1)].where(which < len(quantiles), torch.inf)
            quantiles = own.view(-1, *(1,) * (low.ndim - 1))
        return low - quantiles * unit, high + quantiles * unit

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON-serialisable values; an infinite quantile becomes None."""
        values = {name: getattr(self, name) for name in sorted(_FIELDS)}
        finite = [None if value == float("inf") else value for value in self.thresholds.tolist()]
        return {"kind": "PredictionIntervals", "version": 1, **values, "thresholds": finite}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> PredictionIntervals:
        """Rebuild intervals from `to_dict`."""
        check_state(state, kind="PredictionIntervals", fields=_FIELDS)
        values = {name: state[name] for name in _FIELDS}
        quantiles = [float("inf") if value is None else value for value in values["thresholds"]]
        return cls(**{**values, "thresholds": torch.tensor(quantiles, dtype=torch.float64)})


def _ends(prediction: Any, kind: str, coverage: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return low, high and the unit of scores, so that scores are max(low - y, y - high) / unit."""
    if isinstance(prediction, tuple):
        if kind != "quantile":
            raise TypeError(f"Two quantiles are for kind='quantile', and kind is {kind!r}.")
        low, high = (to_double(values, "prediction").detach() for values in prediction)
        check_same_shape(low=low, high=high)
        return low, high, torch.ones((), dtype=torch.float64, device=low.device)
    if not isinstance(prediction, RegressionPrediction):
        raise TypeError(f"A {type(prediction).__name__} has no numbers to make intervals of. Use PredictionSets.")
    mean = as_double(prediction.mean.detach())
    one = torch.ones((), dtype=torch.float64, device=mean.device)
    if kind == "quantile":
        low, high = prediction.interval(coverage)
        return as_double(low.detach()), as_double(high.detach()), one
    return mean, mean, as_double(prediction.std.detach()) if kind == "normalised" else one
