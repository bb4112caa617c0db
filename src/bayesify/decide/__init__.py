"""Fit-then-decide objects: turn a score per input into a decision with a stated guarantee."""

from __future__ import annotations

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
from bayesify.decide.protocols import Separation, anomaly_table, attack_table, separation

__all__ = [
    "Abstainer",
    "Abstention",
    "Detection",
    "Detector",
    "PredictiveNetwork",
    "Round",
    "Separation",
    "acquire",
    "active_learning",
    "anomaly_table",
    "attack_table",
    "batch_bald",
    "disagreement_avoided",
    "features_moved",
    "fgsm",
    "pgd",
    "separation",
    "surprise",
]
