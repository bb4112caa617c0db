"""Laplace's approximation: Gaussians around trained weights, from the curvature of the loss."""

from bayesify.posteriors._laplace._base import LaplacePosterior, as_groups
from bayesify.posteriors._laplace._diagonal import DiagonalLaplacePosterior
from bayesify.posteriors._laplace._evidence import LEAST, MOST, Residuals, Spectrum, choose, log_evidence
from bayesify.posteriors._laplace._kronecker import Block, KroneckerLaplacePosterior
from bayesify.posteriors._laplace._last_layer import LastLayerLaplacePosterior, last_linear

__all__ = [
    "LEAST",
    "MOST",
    "Block",
    "DiagonalLaplacePosterior",
    "KroneckerLaplacePosterior",
    "LaplacePosterior",
    "LastLayerLaplacePosterior",
    "Residuals",
    "Spectrum",
    "as_groups",
    "choose",
    "last_linear",
    "log_evidence",
]
