"""Make a trained PyTorch network Bayesian, and turn its uncertainty into decisions."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bayesify import measure
from bayesify.calibrate import calibrate
from bayesify.check import Check, check
from bayesify.convert import convert
from bayesify.diagnose import Diagnosis, diagnose
from bayesify.distill import distill
from bayesify.evaluate import Evaluation, evaluate
from bayesify.export import export
from bayesify.fit import History, NonFiniteError, fit
from bayesify.likelihoods import Bernoulli, Categorical, Custom, Gaussian, Likelihood
from bayesify.methods import (
    ABNN,
    APD,
    IBNN,
    MAP,
    SGLD,
    SWAG,
    BayesAdapter,
    DeepEnsemble,
    Laplace,
    MCDropout,
    Method,
    UncertaintyRegulariser,
    ensemble,
    join_banks,
    methods,
    register,
    sample_bank,
)
from bayesify.posteriors import Posterior
from bayesify.predict import predict
from bayesify.prediction import ClassificationPrediction, FeaturePrediction, Prediction, RegressionPrediction
from bayesify.storage import load, save

if TYPE_CHECKING:
    from bayesify import components, data, decide, report
    from bayesify.predict import Law, Moments, fit_variance_scale, laws, moment_rule
    from bayesify.sensitivity import input_sensitivity

__all__ = [
    "ABNN",
    "APD",
    "IBNN",
    "MAP",
    "SGLD",
    "SWAG",
    "BayesAdapter",
    "Bernoulli",
    "Categorical",
    "Check",
    "ClassificationPrediction",
    "Custom",
    "DeepEnsemble",
    "Diagnosis",
    "Evaluation",
    "FeaturePrediction",
    "Gaussian",
    "History",
    "Laplace",
    "Law",
    "Likelihood",
    "MCDropout",
    "Method",
    "Moments",
    "NonFiniteError",
    "Posterior",
    "Prediction",
    "RegressionPrediction",
    "UncertaintyRegulariser",
    "calibrate",
    "check",
    "components",
    "convert",
    "data",
    "decide",
    "diagnose",
    "distill",
    "ensemble",
    "evaluate",
    "export",
    "fit",
    "fit_variance_scale",
    "input_sensitivity",
    "join_banks",
    "laws",
    "load",
    "measure",
    "methods",
    "moment_rule",
    "predict",
    "register",
    "report",
    "sample_bank",
    "save",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the parts that a training or a prediction does not need when they are asked for."""
    if name in ("components", "data", "decide", "report"):
        return import_module(f"bayesify.{name}")
    if name == "input_sensitivity":
        return import_module("bayesify.sensitivity").input_sensitivity
    if name in ("Law", "Moments", "fit_variance_scale", "laws", "moment_rule"):
        # The function `predict` hides the module of this name, so what else is in it is found here.
        return getattr(import_module("bayesify.predict"), name)
    raise AttributeError(f"module 'bayesify' has no attribute {name!r}")
