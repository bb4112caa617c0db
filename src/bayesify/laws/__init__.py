"""What is random: one file for each kind of posterior."""

from bayesify.laws.apd import DistilledPosterior, Workshop
from bayesify.laws.bank import BankPosterior
from bayesify.laws.dropout import AlphaDropoutNoise, DropoutNoise, NoisePosterior
from bayesify.laws.gaussian import GaussianPosterior, NoiseKind
from bayesify.laws.input_factors import InputMixturePosterior, register_layer
from bayesify.laws.laplace import (
    DiagonalLaplacePosterior,
    KroneckerLaplacePosterior,
    LaplacePosterior,
    LastLayerLaplacePosterior,
)
from bayesify.laws.members import MembersPosterior
from bayesify.laws.noise import Key, Noise, NoiseTerms, generator_for, keyed_numbers
from bayesify.laws.norm_members import NormMembersPosterior
from bayesify.laws.norm_noise import NoiseShape, NormKind, NormNoise, attach_noise, norm_kind, register_norm
from bayesify.laws.norm_statistics import tracking_norms
from bayesify.laws.point import PointPosterior
from bayesify.laws.posterior import Draw, LossTerms, Posterior, ShapeError, require_posterior, warn_unless_learned
from bayesify.laws.swag import SWAGPosterior
from bayesify.laws.tensors import Codec, TensorTree, owners, statistics_names
from bayesify.laws.vectors import GeneratorPosterior, MixturePosterior, VectorPosterior, make_generator

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
