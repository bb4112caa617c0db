"""What is random: one file for each kind of posterior."""

from bayesify.posteriors._bank import BankPosterior
from bayesify.posteriors._base import Draw, LossTerms, Posterior, ShapeError, require_posterior, warn_unless_learned
from bayesify.posteriors._distilled import DistilledPosterior, Workshop
from bayesify.posteriors._dropout import AlphaDropoutNoise, DropoutNoise, NoisePosterior
from bayesify.posteriors._gaussian import GaussianPosterior, NoiseKind
from bayesify.posteriors._inputs import InputMixturePosterior, register_layer
from bayesify.posteriors._laplace import (
    DiagonalLaplacePosterior,
    KroneckerLaplacePosterior,
    LaplacePosterior,
    LastLayerLaplacePosterior,
)
from bayesify.posteriors._members import MembersPosterior
from bayesify.posteriors._noise import Key, Noise, NoiseTerms, generator_for, keyed_numbers
from bayesify.posteriors._norm_members import NormMembersPosterior
from bayesify.posteriors._norm_noise import NoiseShape, NormKind, NormNoise, attach_noise, norm_kind, register_norm
from bayesify.posteriors._plain import PointPosterior
from bayesify.posteriors._statistics import tracking_norms
from bayesify.posteriors._swag import SWAGPosterior
from bayesify.posteriors._vectors import GeneratorPosterior, MixturePosterior, VectorPosterior, make_generator
from bayesify.posteriors._weights import Codec, TensorTree, owners, statistics_names

__all__ = [
    "AlphaDropoutNoise",
    "BankPosterior",
    "Codec",
    "DiagonalLaplacePosterior",
    "DistilledPosterior",
    "Draw",
    "DropoutNoise",
    "GaussianPosterior",
    "GeneratorPosterior",
    "InputMixturePosterior",
    "Key",
    "KroneckerLaplacePosterior",
    "LaplacePosterior",
    "LastLayerLaplacePosterior",
    "LossTerms",
    "MembersPosterior",
    "MixturePosterior",
    "Noise",
    "NoiseKind",
    "NoisePosterior",
    "NoiseShape",
    "NoiseTerms",
    "NormKind",
    "NormMembersPosterior",
    "NormNoise",
    "PointPosterior",
    "Posterior",
    "SWAGPosterior",
    "ShapeError",
    "TensorTree",
    "VectorPosterior",
    "Workshop",
    "attach_noise",
    "generator_for",
    "keyed_numbers",
    "make_generator",
    "norm_kind",
    "owners",
    "register_layer",
    "register_norm",
    "require_posterior",
    "statistics_names",
    "tracking_norms",
    "warn_unless_learned",
]
