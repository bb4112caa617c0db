"""Fit-then-decide objects: turn a score per input into a decision with a stated guarantee."""

from __future__ import annotations

from bayesify.decide.abstainer import Abstainer, Abstention
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
    "disagreement_avoided",
    "features_moved",
    "fgsm",
    "pgd",
    "surprise",
]
