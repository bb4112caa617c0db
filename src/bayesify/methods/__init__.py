"""How a posterior is built and learned: one file for each method."""

from bayesify.methods._abnn import ABNN
from bayesify.methods._adapter import BayesAdapter
from bayesify.methods._apd import APD
from bayesify.methods._bank import Bank, inherit, join_banks, sample_bank
from bayesify.methods._base import Method, Stage, Survey, as_method, method_from_dict, methods, register
from bayesify.methods._deep_ensemble import DeepEnsemble, ensemble
from bayesify.methods._distilled import Generator, Mixture
from bayesify.methods._ibnn import IBNN
from bayesify.methods._laplace import Laplace
from bayesify.methods._map import MAP
from bayesify.methods._mc_dropout import MCDropout
from bayesify.methods._sgld import SGLD
from bayesify.methods._swag import SWAG
from bayesify.methods._uncertainty import UncertaintyRegulariser

__all__ = [
    "ABNN",
    "APD",
    "IBNN",
    "MAP",
    "SGLD",
    "SWAG",
    "Bank",
    "BayesAdapter",
    "DeepEnsemble",
    "Generator",
    "Laplace",
    "MCDropout",
    "Method",
    "Mixture",
    "Stage",
    "Survey",
    "UncertaintyRegulariser",
    "as_method",
    "ensemble",
    "inherit",
    "join_banks",
    "method_from_dict",
    "methods",
    "register",
    "sample_bank",
]
