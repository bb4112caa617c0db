"""An error rate for each class that is answered."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify.decide._state import check_state
from bayesify.decide.abstainer import Abstainer, Abstention
from bayesify.decide.conformal import as_groups
from bayesify.evaluation.measures.arguments import check_selective, check_share, to_double

if TYPE_CHECKING:
    from bayesify.evaluation.measures.arguments import ArrayLike

__all__ = ["ClassAbstainer"]


@dataclass(frozen=True)
class ClassAbstainer:
    """Keep predictions so that the error rate among those that say class c is low, for each c.

    P(wrong | answered, predicted c) <= max_risk for all classes together with a probability of at least 1 - delta:
    each class has an `Abstainer` of its own at delta / C, without the monotone assumption. A class of which the
    examples cannot show its risk is never answered, and is in `refused`.

    Build it with `ClassAbstainer.fit`, on examples that were not used for training.

    Attributes:
        abstainers: By class; None where it is refused.
        confidence: Probability of all guarantees together.

    Example:
        >>> u = torch.linspace(0, 1, 2000)
        >>> label = torch.arange(2000) % 2
        >>> abstainer = ClassAbstainer.fit(u, (u < 0.5) | (label == 0), label, max_risk=0.1, confidence=0.9)
        >>> abstainer([0.9, 0.9], [0, 1]).keep.tolist(), abstainer.refused
        ([True, False], ())
    """

    abstainers: tuple[Abstainer | None, ...]
    confidence: float

    @classmethod
    def fit(
        cls,
        uncertainty: ArrayLike,
        correct: ArrayLike,
        label: ArrayLike,
        *,
        max_risk: float | Mapping[int, float] = 0.05,
        confidence: float = 0.95,
        num_classes: int | None = None,
        seed: int = 0,
    ) -> ClassAbstainer:
        """Choose a threshold for each predicted class.

        Args:
            uncertainty: Uncertainties (n,), finite.
            correct: Whether each prediction was correct (n,).
            label: The predicted classes (n,).
            max_risk: Error rate allowed among answers of a class; by class, where they differ: classes that are not
                named are never answered.
            confidence: Probability in (0, 1) with which all must hold.
            num_classes: How many classes there are; None takes the largest label's.
            seed: Which quarter of the examples orders the tests.

        Raises:
            ValueError: If no class reaches its risk.
        """
        scores, hits = check_selective(to_double(uncertainty, "uncertainty").cpu(), correct)
        classes = as_groups(label, len(scores))
        check_share(confidence, "confidence")
        number = int(classes.max()) + 1 if num_classes is None else num_classes
        risks = dict(max_risk) if isinstance(max_risk, Mapping) else dict.fromkeys(range(number), max_risk)
        each = 1 - (1 - confidence) / max(1, len(risks))
        found: list[Abstainer | None] = []
        problem = "no class is named"
        for one in range(number):
            own = classes == one
            if one not in risks or not bool(own.any()):
                found.append(None)
                continue
            try:
                options: dict[str, Any] = {"max_risk": risks[one], "confidence": each, "monotone": False, "seed": seed}
                found.append(Abstainer.fit(scores[own], hits[own], **options))
            except ValueError as error:
                problem = f"of class {one}: {error}"
                found.append(None)
        if not any(found):
            raise ValueError(f"No class reaches its risk with confidence {confidence} ({problem})")
        return cls(tuple(found), confidence)

    @property
    def refused(self) -> tuple[int, ...]:
        """The classes that are never answered."""
        return tuple(index for index, one in enumerate(self.abstainers) if one is None)

    def __call__(self, uncertainty: ArrayLike, label: ArrayLike) -> Abstention:
        """Decide for each uncertainty and predicted class; the threshold that is returned is the largest."""
        scores = to_double(uncertainty, "uncertainty", finite=False).detach()
        classes = as_groups(label, len(scores))
        limits = self.thresholds
        own = limits[classes.clamp_max(len(limits) - 1)].where(classes < len(limits), -math.inf)
        keep = scores < own.to(scores.device)
        return Abstention(keep, float(keep.double().mean()), float(limits.max()))

    @property
    def thresholds(self) -> Tensor:
        """The threshold of each class, minus infinity where it is refused."""
        found = [-math.inf if one is None else one.threshold for one in self.abstainers]
        return torch.tensor(found, dtype=torch.float64)

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON-serialisable values."""
        each = [None if one is None else one.to_dict() for one in self.abstainers]
        return {"kind": "ClassAbstainer", "version": 1, "confidence": self.confidence, "abstainers": each}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> ClassAbstainer:
        """Rebuild an abstainer from `to_dict`."""
        check_state(state, kind="ClassAbstainer", fields={"confidence", "abstainers"})
        each = (None if one is None else Abstainer.from_dict(one) for one in state["abstainers"])
        return cls(tuple(each), state["confidence"])
