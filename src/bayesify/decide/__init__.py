"""Fit-then-decide objects: turn a score per input into a decision with a stated guarantee."""

from __future__ import annotations

from typing import Any

from bayesify._moved import missing
from bayesify.decide.abstainer import Abstainer, Abstention
from bayesify.decide.acquisition import acquire, batch_bald
from bayesify.decide.attacks import (
    PredictiveNetwork,
    disagreement_avoided,
    features_moved,
    fgsm,
    pgd,
    surprise,
)
from bayesify.decide.class_abstainer import ClassAbstainer
from bayesify.decide.conformal import conformal_quantile
from bayesify.decide.costs import CostAbstainer, mean_upper_bound
from bayesify.decide.detector import Detection, Detector
from bayesify.decide.distances import KNN, Mahalanobis, ViM
from bayesify.decide.guard import Guard
from bayesify.decide.loop import ActiveLearning, Round, active_learning
from bayesify.decide.monitor import Monitor
from bayesify.decide.prediction_intervals import PredictionIntervals
from bayesify.decide.reporting import guard_sections, operating_points
from bayesify.decide.scores import Score
from bayesify.decide.sets import PredictionSets
from bayesify.decide.verdicts import Verdicts

__all__ = [
    "KNN",
    "Abstainer",
    "Abstention",
    "ActiveLearning",
    "ClassAbstainer",
    "CostAbstainer",
    "Detection",
    "Detector",
    "Guard",
    "Mahalanobis",
    "Monitor",
    "PredictionIntervals",
    "PredictionSets",
    "PredictiveNetwork",
    "Round",
    "Score",
    "Verdicts",
    "ViM",
    "acquire",
    "active_learning",
    "batch_bald",
    "conformal_quantile",
    "disagreement_avoided",
    "features_moved",
    "fgsm",
    "guard_sections",
    "mean_upper_bound",
    "operating_points",
    "pgd",
    "surprise",
]


def __getattr__(name: str) -> Any:
    """Say where a name went that is no longer here."""
    raise missing(__name__, name)
