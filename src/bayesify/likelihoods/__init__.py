"""What a network's outputs mean: log-probabilities, and predictions from samples and from moments."""

from bayesify.likelihoods._base import Likelihood, Stream, as_likelihood, likelihood_from_dict
from bayesify.likelihoods._bernoulli import Bernoulli
from bayesify.likelihoods._categorical import Categorical
from bayesify.likelihoods._custom import Custom
from bayesify.likelihoods._gaussian import Gaussian

__all__ = [
    "Bernoulli",
    "Categorical",
    "Custom",
    "Gaussian",
    "Likelihood",
    "Stream",
    "as_likelihood",
    "likelihood_from_dict",
]
