"""How a posterior is built and learned: one file for each method."""

import sys
from types import ModuleType

from bayesify._core.deprecation import moved_names, warn_renamed
from bayesify.methods.abnn import ABNN
from bayesify.methods.apd import APD
from bayesify.methods.banks import inherit, join_banks, require_bank, sample_bank, source_of
from bayesify.methods.bayes_adapter import BayesAdapter
from bayesify.methods.deep_ensemble import DeepEnsemble
from bayesify.methods.ibnn import IBNN
from bayesify.methods.ivon import IVON
from bayesify.methods.laplace import Laplace
from bayesify.methods.map import MAP
from bayesify.methods.mc_dropout import MCDropout
from bayesify.methods.method import Method, Stage, Survey, as_method, list_methods, method_from_dict, register
from bayesify.methods.ood_regularizer import OODRegularizer
from bayesify.methods.sgld import SGLD
from bayesify.methods.swag import SWAG

__all__ = [
    "ABNN",
    "APD",
    "IBNN",
    "IVON",
    "MAP",
    "SGLD",
    "SWAG",
    "BayesAdapter",
    "DeepEnsemble",
    "Laplace",
    "MCDropout",
    "Method",
    "OODRegularizer",
    "Stage",
    "Survey",
    "as_method",
    "inherit",
    "join_banks",
    "list_methods",
    "method_from_dict",
    "register",
    "require_bank",
    "sample_bank",
    "source_of",
]


class _Callable(ModuleType):
    """A module that answers as the function `bayesify.methods` did."""

    def __call__(self) -> dict[str, type[Method]]:
        """Return the registered methods by name."""
        warn_renamed("bayesify.methods()", "bayesify.list_methods()")
        return list_methods()


sys.modules[__name__].__class__ = _Callable
__getattr__ = moved_names(
    __name__,
    {
        "UncertaintyRegulariser": "bayesify.methods.OODRegularizer",
        "methods": "bayesify.methods.list_methods",
    },
)
