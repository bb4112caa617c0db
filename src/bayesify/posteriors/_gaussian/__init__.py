"""Gaussian weights: the posterior, and the layers whose noise differs between examples."""

from bayesify.posteriors._gaussian._posterior import GaussianPosterior
from bayesify.posteriors._gaussian._site import NoiseKind

__all__ = ["GaussianPosterior", "NoiseKind"]
