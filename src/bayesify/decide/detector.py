"""Decide whether an input is foreign to the data that a score was calibrated on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify.decide._state import check_state
from bayesify.evaluation.measures.arguments import ceil_share, check_share, to_double
from bayesify.likelihoods.prediction import Prediction

if TYPE_CHECKING:
    from bayesify.evaluation.measures.arguments import ArrayLike

__all__ = ["Detection", "Detector"]


@dataclass(frozen=True, eq=False)
class Detection:
    """What a ``Detector`` decided.

    Attributes:
        is_foreign: Whether each score lies above the threshold, in the shape of the scores.
        p_value: Conformal p-value of each score, small = foreign, in the shape of the scores.
        threshold: The threshold applied.
    """

    is_foreign: Tensor
    p_value: Tensor
    threshold: float


@dataclass(frozen=True, eq=False)
class Detector:
    """Accept a fixed share of in-distribution inputs and call the rest foreign.

    With n calibration scores the threshold is the k-th smallest, k = ceil((n + 1) tpr), which is
    the conformal quantile of level ceil((n + 1) tpr) / n. If a new in-distribution input is
    exchangeable with the calibration inputs, it is accepted (score <= threshold) with a
    probability of at least tpr, and below tpr + 1 / (n + 1) if scores are never equal. The
    probability is over calibration set and new input together; nothing else is assumed about
    the score. Vovk et al., "Algorithmic Learning in a Random World", 2005.

    The p-value of a score s is (1 + #{calibration >= s}) / (n + 1): for an in-distribution input
    P(p <= a) <= a for every a. An input is foreign exactly when p <= 1 - tpr.

    Build it with ``Detector.fit``, on inputs that were not used for training.

    Attributes:
        calibration: Sorted in-distribution scores (n,), float64.
        tpr: Share of in-distribution inputs to accept.

    Example:
        >>> detector = Detector.fit(torch.arange(1, 20), tpr=0.9)
        >>> result = detector([5.0, 30.0])
        >>> result.is_foreign.tolist(), result.p_value.tolist(), result.threshold
        ([False, True], [0.8, 0.05], 18.0)
    """

    calibration: Tensor
    tpr: float

    @classmethod
    def fit(cls, id_scores: ArrayLike, *, tpr: float = 0.95) -> Detector:
        """Choose the threshold from the scores of in-distribution inputs.

        Args:
            id_scores: Scores (n,) or any shape, higher = more suspicious, finite.
            tpr: Share of in-distribution inputs to accept, in (0, 1).

        Returns:
            The fitted detector.

        Raises:
            ValueError: If n < tpr / (1 - tpr): so few scores cannot promise the share.
        """
        tpr = check_share(tpr, "tpr")
        if isinstance(id_scores, Prediction):
            raise TypeError('Detector.fit takes scores: prediction.score("total"), not the prediction itself.')
        scores = to_double(id_scores, "id_scores").detach().cpu().flatten().sort().values
        if ceil_share(tpr, len(scores) + 1) > len(scores):
            share = Fraction(str(tpr))
            raise ValueError(
                f"{len(scores)} scores cannot promise to accept a share of {tpr}: give at least "
                f"{math.ceil(share / (1 - share))} in-distribution scores or a lower tpr."
            )
        return cls(calibration=scores, tpr=tpr)

    @property
    def threshold(self) -> float:
        """Highest score that is accepted."""
        return float(self.calibration[ceil_share(self.tpr, len(self.calibration) + 1) - 1])

    def __call__(self, scores: ArrayLike) -> Detection:
        """Decide for each score; infinite scores are allowed, NaN is an error.

        Args:
            scores: Scores of new inputs, any shape.

        Returns:
            The decisions and p-values, on the device of the scores. Cost: n log n once, log n
            per score.
        """
        new = to_double(scores, "scores", finite=False).detach()
        calibration = self.calibration.to(new.device)
        smaller = torch.searchsorted(calibration, new.contiguous())
        count = len(calibration)
        p_value = (1 + count - smaller).double() / (count + 1)
        return Detection(new > self.threshold, p_value, self.threshold)

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON-serialisable values; numbers survive exactly.

        Example:
            >>> Detector.fit([1.0, 2.0], tpr=0.5).to_dict()
            {'kind': 'Detector', 'version': 1, 'tpr': 0.5, 'calibration': [1.0, 2.0]}
        """
        return {
            "kind": "Detector",
            "version": 1,
            "tpr": self.tpr,
            "calibration": self.calibration.tolist(),
        }

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Detector:
        """Rebuild a detector from ``to_dict``."""
        check_state(state, kind="Detector", fields={"tpr", "calibration"})
        return cls.fit(state["calibration"], tpr=state["tpr"])
