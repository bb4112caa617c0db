"""Gaussian weights: the law, and the layers whose noise differs between examples."""

from bayesify.laws.gaussian.law import GaussianLaw
from bayesify.laws.gaussian.site import Estimator

__all__ = ["Estimator", "GaussianLaw"]
