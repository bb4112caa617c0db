"""Laplace's approximation: Gaussians around trained weights, from the curvature of the loss."""

from bayesify.laws.laplace.diagonal import DiagonalLaw
from bayesify.laws.laplace.evidence import Residuals, Spectrum, choose, log_evidence
from bayesify.laws.laplace.kronecker import Block, KroneckerLaw
from bayesify.laws.laplace.laplace import LaplaceLaw, as_groups
from bayesify.laws.laplace.last_layer import LastLayerLaw, last_features, last_linear
from bayesify.laws.laplace.validation import choose_on_validation, prior_without_effect

__all__ = [
    "Block",
    "DiagonalLaw",
    "KroneckerLaw",
    "LaplaceLaw",
    "LastLayerLaw",
    "Residuals",
    "Spectrum",
    "as_groups",
    "choose",
    "choose_on_validation",
    "last_features",
    "last_linear",
    "log_evidence",
    "prior_without_effect",
]
