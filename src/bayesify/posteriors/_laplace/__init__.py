"""Laplace's approximation: Gaussians around trained weights, from the curvature of the loss."""

from bayesify.posteriors._laplace._base import LaplacePosterior, as_groups
from bayesify.posteriors._laplace._diagonal import DiagonalLaplacePosterior
from bayesify.posteriors._laplace._evidence import Residuals, Spectrum, choose, log_evidence
from bayesify.posteriors._laplace._kronecker import Block, KroneckerLaplacePosterior
from bayesify.posteriors._laplace._last_layer import LastLayerLaplacePosterior, last_linear
from bayesify.posteriors._laplace._validation import choose_on_validation, prior_without_effect

__all__ = [
    "Block",
    "DiagonalLaplacePosterior",
    "KroneckerLaplacePosterior",
    "LaplacePosterior",
    "LastLayerLaplacePosterior",
    "Residuals",
    "Spectrum",
    "as_groups",
    "choose",
    "choose_on_validation",
    "last_linear",
    "log_evidence",
    "prior_without_effect",
]
