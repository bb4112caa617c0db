"""What is random: one file for each kind of posterior."""

from bayesify.posteriors._bank import BankPosterior
from bayesify.posteriors._base import Draw, LossTerms, Posterior, ShapeError
from bayesify.posteriors._batch_dims import evaluation_mode
from bayesify.posteriors._dropout import AlphaDropoutNoise, DropoutNoise, NoisePosterior
from bayesify.posteriors._members import MembersPosterior
from bayesify.posteriors._noise import Key, Noise, generator_for
from bayesify.posteriors._plain import PointPosterior
from bayesify.posteriors._swag import SWAGPosterior
from bayesify.posteriors._vectors import GeneratorPosterior, MixturePosterior, VectorPosterior, make_generator
from bayesify.posteriors._weights import Codec, TensorTree, owners, statistics_names

__all__ = [
    "AlphaDropoutNoise",
    "BankPosterior",
    "Codec",
    "Draw",
    "DropoutNoise",
    "GeneratorPosterior",
    "Key",
    "LossTerms",
    "MembersPosterior",
    "MixturePosterior",
    "Noise",
    "NoisePosterior",
    "PointPosterior",
    "Posterior",
    "SWAGPosterior",
    "ShapeError",
    "TensorTree",
    "VectorPosterior",
    "evaluation_mode",
    "generator_for",
    "make_generator",
    "owners",
    "statistics_names",
]
