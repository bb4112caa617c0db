"""What a network's outputs mean: log-probabilities, and predictions from samples and from moments."""

from bayesify.likelihoods.bernoulli import Bernoulli
from bayesify.likelihoods.categorical import Categorical
from bayesify.likelihoods.count_prediction import CountPrediction
from bayesify.likelihoods.custom import Custom
from bayesify.likelihoods.gaussian import Gaussian
from bayesify.likelihoods.likelihood import Likelihood, Stream
from bayesify.likelihoods.naming import as_likelihood, likelihood_from_dict
from bayesify.likelihoods.negative_binomial import NegativeBinomial
from bayesify.likelihoods.ordinal import Ordinal
from bayesify.likelihoods.poisson import Poisson
from bayesify.likelihoods.prediction import (
    ClassificationPrediction,
    FeaturePrediction,
    Prediction,
    RegressionPrediction,
)
from bayesify.likelihoods.student_prediction import StudentPrediction
from bayesify.likelihoods.student_t import StudentT

__all__ = [
    "Bernoulli",
    "Categorical",
    "ClassificationPrediction",
    "CountPrediction",
    "Custom",
    "FeaturePrediction",
    "Gaussian",
    "Likelihood",
    "NegativeBinomial",
    "Ordinal",
    "Poisson",
    "Prediction",
    "RegressionPrediction",
    "Stream",
    "StudentPrediction",
    "StudentT",
    "as_likelihood",
    "likelihood_from_dict",
]
