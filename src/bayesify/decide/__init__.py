"""Fit-then-decide objects: turn a score per input into a decision with a stated guarantee."""

from __future__ import annotations

from typing import Any

from bayesify._moved import missing
from bayesify.decide.abstainer import Abstainer, Abstention
from bayesify.decide.acquisition import Round, acquire, active_learning, batch_bald
from bayesify.decide.attacks import (
    PredictiveNetwork,
    disagreement_avoided,
    features_moved,
    fgsm,
    pgd,
    surprise,
)
from bayesify.decide.detector import Detection, Detector

__all__ = [
    "Abstainer",
    "Abstention",
    "Detection",
    "Detector",
    "PredictiveNetwork",
    "Round",
    "acquire",
    "active_learning",
    "batch_bald",
    "disagreement_avoided",
    "features_moved",
    "fgsm",
    "pgd",
    "surprise",
]


def __getattr__(name: str) -> Any:
    """Say where a name went that is no longer here."""
    raise missing(__name__, name)
