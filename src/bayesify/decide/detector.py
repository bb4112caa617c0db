"""Decide whether an input is out of the distribution of the data that a score was calibrated on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify._core.deprecation import renamed, renamed_fields
from bayesify.decide._state import check_state
from bayesify.evaluation.measures.arguments import ceil_share, check_share, to_double
from bayesify.likelihoods.prediction import Prediction

if TYPE_CHECKING:
    from bayesify.evaluation.measures.arguments import ArrayLike

__all__ = ["Detection", "Detector"]


@renamed_fields(is_foreign="is_ood")
@dataclass(frozen=True, eq=False)
class Detection:
    """What a ``Detector`` decided.

    Attributes:
        is_ood: Whether each score lies above the threshold, in the shape of the scores.
        p_value: Conformal p-value of each score, small = OOD, in the shape of the scores.
        threshold: The threshold applied.
    """

    is_ood: Tensor
    p_value: Tensor
    threshold: float


@renamed_fields(tpr="id_acceptance")
@dataclass(frozen=True, eq=False)
class Detector:
    """Accept a fixed share of in-distribution inputs and call the rest OOD.

    With n calibration scores the threshold is the k-th smallest, k = ceil((n + 1) id_acceptance), which is
    the conformal quantile of level ceil((n + 1) id_acceptance) / n. If a new in-distribution input is
    exchangeable with the calibration inputs, it is accepted (score <= threshold) with a
    probability of at least id_acceptance, and below id_acceptance + 1 / (n + 1) if scores are never equal. The
    probability is over calibration set and new input together; nothing else is assumed about
    the score. Vovk et al., "Algorithmic Learning in a Random World", 2005.

    The p-value of a score s is (1 + #{calibration >= s}) / (n + 1): for an in-distribution input
    P(p <= a) <= a for every a. An input is OOD exactly when p <= 1 - id_acceptance.

    Build it with ``Detector.fit``, on inputs that were not used for training.

    Attributes:
        calibration: Sorted in-distribution scores (n,), float64.
        id_acceptance: Share of in-distribution inputs to accept.

    Example:
        >>> detector = Detector.fit(torch.arange(1, 20), id_acceptance=0.9)
        >>> result = detector([5.0, 30.0])
        >>> result.is_ood.tolist(), result.p_value.tolist(), result.threshold
        ([False, True], [0.8, 0.05], 18.0)
    """

    calibration: Tensor
    id_acceptance: float

    @classmethod
    @renamed(tpr="id_acceptance")
    def fit(cls, id_scores: ArrayLike, *, id_acceptance: float = 0.95) -> Detector:
        """Choose the threshold from the scores of in-distribution inputs.

        Args:
            id_scores: Scores (n,) or any shape, higher = more suspicious, finite.
            id_acceptance: Share of in-distribution inputs to accept, in (0, 1).

        Returns:
            The fitted detector.

        Raises:
            ValueError: If n < id_acceptance / (1 - id_acceptance): so few scores cannot promise the share.
        """
        id_acceptance = check_share(id_acceptance, "id_acceptance")
        if isinstance(id_scores, Prediction):
            raise TypeError('Detector.fit takes scores: prediction.score("total"), not the prediction itself.')
        scores = to_double(id_scores, "id_scores").detach().cpu().flatten().sort().values
        if ceil_share(id_acceptance, len(scores) + 1) > len(scores):
            share = Fraction(str(id_acceptance))
            raise ValueError(
                f"{len(scores)} scores cannot promise to accept a share of {id_acceptance}: give at least "
                f"{math.ceil(share / (1 - share))} in-distribution scores or a lower id_acceptance."
            )
        return cls(calibration=scores, id_acceptance=id_acceptance)

    @property
    def threshold(self) -> float:
        """Highest score that is accepted."""
        return float(self.calibration[ceil_share(self.id_acceptance, len(self.calibration) + 1) - 1])

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
            >>> Detector.fit([1.0, 2.0], id_acceptance=0.5).to_dict()
            {'kind': 'Detector', 'version': 1, 'tpr': 0.5, 'calibration': [1.0, 2.0]}
        """
        return {
            "kind": "Detector",
            "version": 1,
            "tpr": self.id_acceptance,
            "calibration": self.calibration.tolist(),
        }

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Detector:
        """Rebuild a detector from ``to_dict``."""
        check_state(state, kind="Detector", fields={"tpr", "calibration"})
        return cls.fit(state["calibration"], id_acceptance=state["tpr"])
