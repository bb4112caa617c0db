"""How a posterior is built and learned: one file for each method."""

from bayesify.methods._apd import Generator, Mixture
from bayesify.methods._bank import Bank, inherit, sample_bank
from bayesify.methods._base import Method, Stage, as_method, method_from_dict, methods, register
from bayesify.methods._deep_ensemble import DeepEnsemble, ensemble
from bayesify.methods._map import MAP
from bayesify.methods._mc_dropout import MCDropout
from bayesify.methods._sgld import SGLD
from bayesify.methods._swag import SWAG

__all__ = [
    "MAP",
    "SGLD",
    "SWAG",
    "Bank",
    "DeepEnsemble",
    "Generator",
    "MCDropout",
    "Method",
    "Mixture",
    "Stage",
    "as_method",
    "ensemble",
    "inherit",
    "method_from_dict",
    "methods",
    "register",
    "sample_bank",
]
