"""Gaussian weights: the posterior, and the layers whose noise differs between examples."""

from bayesify.laws.gaussian.law import GaussianPosterior
from bayesify.laws.gaussian.site import NoiseKind

__all__ = ["GaussianPosterior", "NoiseKind"]
