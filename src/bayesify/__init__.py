"""Make a trained PyTorch network Bayesian, and turn its uncertainty into decisions."""

from bayesify import data, decide, measure
from bayesify.calibrate import calibrate
from bayesify.convert import convert
from bayesify.diagnose import Diagnosis, diagnose
from bayesify.distill import distill
from bayesify.evaluate import Evaluation, evaluate
from bayesify.fit import History, fit
from bayesify.likelihoods import Bernoulli, Categorical, Custom, Gaussian, Likelihood
from bayesify.methods import MAP, SGLD, SWAG, DeepEnsemble, MCDropout, Method, ensemble, methods, sample_bank
from bayesify.posteriors import Posterior
from bayesify.predict import predict
from bayesify.prediction import ClassificationPrediction, Prediction, RegressionPrediction
from bayesify.storage import load, save

__all__ = [
    "MAP",
    "SGLD",
    "SWAG",
    "Bernoulli",
    "Categorical",
    "ClassificationPrediction",
    "Custom",
    "DeepEnsemble",
    "Diagnosis",
    "Evaluation",
    "Gaussian",
    "History",
    "Likelihood",
    "MCDropout",
    "Method",
    "Posterior",
    "Prediction",
    "RegressionPrediction",
    "calibrate",
    "convert",
    "data",
    "decide",
    "diagnose",
    "distill",
    "ensemble",
    "evaluate",
    "fit",
    "load",
    "measure",
    "methods",
    "predict",
    "sample_bank",
    "save",
]

__version__ = "0.1.0"
