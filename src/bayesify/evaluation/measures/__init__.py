"""Pure functions that measure predictions: uncertainty, quality, calibration, detection.

Inputs are tensors or anything that converts to one, computed in float64. Classes are the last
dimension, samples the first. A scalar result is a Python float, a per-example result a tensor.
"""

from __future__ import annotations

from typing import Any

from bayesify._moved import missing
from bayesify.evaluation.measures.calibration import (
    Reliability,
    adaptive_ece,
    classwise_ece,
    ece,
    reliability,
)
from bayesify.evaluation.measures.classification import accuracy, brier, nll
from bayesify.evaluation.measures.detection import aupr, auroc, average_precision, fpr_at_tpr
from bayesify.evaluation.measures.regression import (
    crps_gaussian,
    crps_samples,
    gaussian_nll,
    interval_coverage,
    interval_width,
    rmse,
)
from bayesify.evaluation.measures.selective import (
    RiskCoverage,
    accuracy_after_rejection,
    accuracy_by_bucket,
    aurc,
    coverage_at_risk,
    risk_coverage,
)
from bayesify.evaluation.measures.uncertainty import (
    entropy,
    expected_entropy,
    model_variance,
    mutual_information,
    variation_ratio,
)

__all__ = [
    "Reliability",
    "RiskCoverage",
    "accuracy",
    "accuracy_after_rejection",
    "accuracy_by_bucket",
    "adaptive_ece",
    "aupr",
    "aurc",
    "auroc",
    "average_precision",
    "brier",
    "classwise_ece",
    "coverage_at_risk",
    "crps_gaussian",
    "crps_samples",
    "ece",
    "entropy",
    "expected_entropy",
    "fpr_at_tpr",
    "gaussian_nll",
    "interval_coverage",
    "interval_width",
    "model_variance",
    "mutual_information",
    "nll",
    "reliability",
    "risk_coverage",
    "rmse",
    "variation_ratio",
]


def __getattr__(name: str) -> Any:
    """Say where a name went that is no longer here."""
    raise missing(__name__, name)
