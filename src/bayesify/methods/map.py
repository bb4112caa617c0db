"""The plain network."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from bayesify.laws import PointLaw
from bayesify.methods.method import Method, register
from bayesify.selection import Conversion, Selection, select_parameters

__all__ = ["MAP"]


@register
@dataclass(frozen=True, kw_only=True)
class MAP(Method):
    """The network as it is: the baseline of every comparison.

    Weights that minimise mean NLL + weight_decay/2 |w|^2 are the mode of the posterior under the prior
    N(0, 1/(weight_decay n)). Costs one plain pass; its epistemic uncertainty is zero.
    """

    name = "map"
    trains_draws = False

    def build(self, network: nn.Module, selection: Selection) -> tuple[PointLaw, Conversion]:
        """Take the network as it is."""
        law = PointLaw(network)
        law.default_draws = 1
        _, table = select_parameters(network, selection, how="")
        reason = "the plain network is not random"
        return law, Conversion(tuple(replace(row, converted=False, reason=reason) for row in table.rows))
