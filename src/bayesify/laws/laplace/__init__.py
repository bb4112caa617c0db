"""Laplace's approximation: Gaussians around trained weights, from the curvature of the loss."""

from bayesify.laws.laplace.diagonal import DiagonalLaplacePosterior
from bayesify.laws.laplace.evidence import Residuals, Spectrum, choose, log_evidence
from bayesify.laws.laplace.kronecker import Block, KroneckerLaplacePosterior
from bayesify.laws.laplace.laplace import LaplacePosterior, as_groups
from bayesify.laws.laplace.last_layer import LastLayerLaplacePosterior, last_linear
from bayesify.laws.laplace.validation import choose_on_validation, prior_without_effect

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
