"""What a network's outputs mean: log-probabilities, and predictions from samples and from moments."""

from bayesify.likelihoods.bernoulli import Bernoulli
from bayesify.likelihoods.categorical import Categorical
from bayesify.likelihoods.custom import Custom
from bayesify.likelihoods.gaussian import Gaussian
from bayesify.likelihoods.likelihood import Likelihood, Stream, as_likelihood, likelihood_from_dict
from bayesify.likelihoods.prediction import (
    ClassificationPrediction,
    FeaturePrediction,
    Prediction,
    RegressionPrediction,
)

__all__ = [
    "Bernoulli",
    "Categorical",
    "ClassificationPrediction",
    "Custom",
    "FeaturePrediction",
    "Gaussian",
    "Likelihood",
    "Prediction",
    "RegressionPrediction",
    "Stream",
    "as_likelihood",
    "likelihood_from_dict",
]
