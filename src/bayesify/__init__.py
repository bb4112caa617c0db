"""Make a trained PyTorch network Bayesian, and turn its uncertainty into decisions."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from bayesify import layers, methods
from bayesify._core.deprecation import moved_modules, moved_names
from bayesify._core.processes import one_process
from bayesify._moved import missing
from bayesify.choosing import Candidate, Choice, choose
from bayesify.conversion import convert, ensemble
from bayesify.evaluation import measures as measure
from bayesify.evaluation.checking import Check, check
from bayesify.evaluation.diagnosis import Diagnosis, diagnose
from bayesify.evaluation.differences import Comparison, compare
from bayesify.evaluation.evaluation import Evaluation, evaluate
from bayesify.evaluation.intervals import Interval
from bayesify.fitting import History, Learner, NonFiniteError, Objective, fit
from bayesify.fitting.updating import update
from bayesify.laws import Component, Posterior
from bayesify.layers import register_type
from bayesify.likelihoods import (
    Bernoulli,
    Categorical,
    CountPrediction,
    Custom,
    Gaussian,
    Likelihood,
    NegativeBinomial,
    Ordinal,
    Poisson,
    StudentPrediction,
    StudentT,
)
from bayesify.likelihoods.prediction import (
    ClassificationPrediction,
    FeaturePrediction,
    Prediction,
    RegressionPrediction,
)
from bayesify.members import fit_members
from bayesify.methods import (
    ABNN,
    APD,
    IBNN,
    IVON,
    MAP,
    SGLD,
    SWAG,
    BayesAdapter,
    DeepEnsemble,
    Laplace,
    MCDropout,
    Method,
    OODRegularizer,
    join_banks,
    list_methods,
    register,
    sample_bank,
)
from bayesify.prediction import Linearised, Mean, Sampling, Streamlined, View, Views, capabilities, predict
from bayesify.prediction.calibration import calibrate
from bayesify.prediction.exporting import export
from bayesify.prediction.widening import Widening, widen
from bayesify.storage import load, save
from bayesify.students import distill, distill_network

if TYPE_CHECKING:
    from bayesify import data, decide, files, report
    from bayesify.prediction import Moments, fit_variance_scale, moment_rule
    from bayesify.prediction.sensitivity import input_sensitivity

__all__ = [
    "ABNN",
    "APD",
    "IBNN",
    "IVON",
    "MAP",
    "SGLD",
    "SWAG",
    "BayesAdapter",
    "Bernoulli",
    "Candidate",
    "Categorical",
    "Check",
    "Choice",
    "ClassificationPrediction",
    "Comparison",
    "Component",
    "CountPrediction",
    "Custom",
    "DeepEnsemble",
    "Diagnosis",
    "Evaluation",
    "FeaturePrediction",
    "Gaussian",
    "History",
    "Interval",
    "Laplace",
    "Learner",
    "Likelihood",
    "Linearised",
    "MCDropout",
    "Mean",
    "Method",
    "Moments",
    "NegativeBinomial",
    "NonFiniteError",
    "OODRegularizer",
    "Objective",
    "Ordinal",
    "Poisson",
    "Posterior",
    "Prediction",
    "RegressionPrediction",
    "Sampling",
    "Streamlined",
    "StudentPrediction",
    "StudentT",
    "View",
    "Views",
    "Widening",
    "calibrate",
    "capabilities",
    "check",
    "choose",
    "compare",
    "convert",
    "data",
    "decide",
    "diagnose",
    "distill",
    "distill_network",
    "ensemble",
    "evaluate",
    "export",
    "files",
    "fit",
    "fit_members",
    "fit_variance_scale",
    "input_sensitivity",
    "join_banks",
    "layers",
    "list_methods",
    "load",
    "measure",
    "methods",
    "moment_rule",
    "one_process",
    "predict",
    "register",
    "register_type",
    "report",
    "sample_bank",
    "save",
    "update",
    "widen",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the parts that a training or a prediction does not need when they are asked for."""
    if name in ("data", "decide", "files", "report"):
        return import_module(f"bayesify.{name}")
    if name == "input_sensitivity":
        return import_module("bayesify.prediction.sensitivity").input_sensitivity
    if name in ("Moments", "fit_variance_scale", "moment_rule"):
        return getattr(import_module("bayesify.prediction"), name)
    if name in ("posteriors", "sensitivity"):
        return sys.modules[f"bayesify.{name}"]
    if name in _OLD:
        return _old_name(name)
    raise missing(__name__, name)


_OLD = {
    "Law": "bayesify.laws.Component",
    "UncertaintyRegulariser": "bayesify.methods.OODRegularizer",
}
_old_name = moved_names("bayesify", _OLD, stacklevel=4)
moved_modules(
    {
        "bayesify.calibrate": "bayesify.prediction.calibration",
        "bayesify.check": "bayesify.evaluation.checking",
        "bayesify.convert": "bayesify.conversion",
        "bayesify.diagnose": "bayesify.evaluation.diagnosis",
        "bayesify.distill": "bayesify.methods.distillation",
        "bayesify.evaluate": "bayesify.evaluation.evaluation",
        "bayesify.export": "bayesify.prediction.exporting",
        "bayesify.fit": "bayesify.fitting",
        "bayesify.posteriors": "bayesify.laws",
        "bayesify.predict": "bayesify.prediction",
        "bayesify.sensitivity": "bayesify.prediction.sensitivity",
    }
)
