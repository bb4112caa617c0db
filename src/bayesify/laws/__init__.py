"""What is random: a law for each kind of randomness, and the posterior that carries one."""

import sys
from types import ModuleType

from bayesify._core.deprecation import moved_names, warn_renamed
from bayesify._core.random import Key, Noise, generator_for, keyed_numbers
from bayesify.laws.bank import STORAGE, BankLaw
from bayesify.laws.components import Component, Dense, NoiseTerms, NoisySite
from bayesify.laws.dropout import DropoutSite
from bayesify.laws.gaussian import Estimator, GaussianLaw
from bayesify.laws.input_factors import InputFactorLaw, register_layer
from bayesify.laws.laplace import DiagonalLaw, KroneckerLaw, LaplaceLaw, LastLayerLaw
from bayesify.laws.law import Law, Rescaling, law_class, register_law
from bayesify.laws.members import MemberLaw
from bayesify.laws.noisy_layers import NoisyLayerLaw
from bayesify.laws.norm_noise import NoiseShape, NormSite, norm_kind, register_norm
from bayesify.laws.norm_statistics import tracking_norms
from bayesify.laws.passes import BatchDim, Pass, Patch, Refusal, ShapeError
from bayesify.laws.point import PointLaw
from bayesify.laws.posterior import Draw, LossTerms, Posterior, require_posterior, warn_unless_learned
from bayesify.laws.statistics import Statistics
from bayesify.laws.student import StudentLaw
from bayesify.laws.swag import LowRankLaw
from bayesify.laws.tensors import Codec, TensorTree, owners, statistics_names
from bayesify.laws.trace import Trace
from bayesify.laws.vectors import GaussianMixtureLaw, GeneratorLaw, VectorLaw, make_generator

__all__ = [
    "STORAGE",
    "BankLaw",
    "BatchDim",
    "Codec",
    "Component",
    "Dense",
    "DiagonalLaw",
    "Draw",
    "DropoutSite",
    "Estimator",
    "GaussianLaw",
    "GaussianMixtureLaw",
    "GeneratorLaw",
    "InputFactorLaw",
    "Key",
    "KroneckerLaw",
    "LaplaceLaw",
    "LastLayerLaw",
    "Law",
    "LossTerms",
    "LowRankLaw",
    "MemberLaw",
    "Noise",
    "NoiseShape",
    "NoiseTerms",
    "NoisyLayerLaw",
    "NoisySite",
    "NormSite",
    "Pass",
    "Patch",
    "PointLaw",
    "Posterior",
    "Refusal",
    "Rescaling",
    "ShapeError",
    "Statistics",
    "StudentLaw",
    "TensorTree",
    "Trace",
    "VectorLaw",
    "generator_for",
    "keyed_numbers",
    "law_class",
    "make_generator",
    "norm_kind",
    "owners",
    "register_law",
    "register_layer",
    "register_norm",
    "require_posterior",
    "statistics_names",
    "tracking_norms",
    "warn_unless_learned",
]


class _Callable(ModuleType):
    """A module that answers as the function `bayesify.laws` did."""

    def __call__(self, posterior: Posterior) -> list[Component]:
        """Return the components of a posterior, or raise where it has none."""
        warn_renamed("bayesify.laws()", "posterior.components()")
        found = posterior.components()
        if isinstance(found, Refusal):
            raise ValueError(found)
        return found


sys.modules[__name__].__class__ = _Callable
__getattr__ = moved_names(__name__, {"NormKind": "bayesify.layers.NormLayer"})
