"""The plain network."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from bayesify.conversion import Conversion, Selection, select_parameters
from bayesify.laws import PointPosterior
from bayesify.methods.method import Method, register

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

    def build(self, network: nn.Module, selection: Selection) -> PointPosterior:
        """Wrap the network."""
        posterior = PointPosterior(network, self)
        _, table = select_parameters(network, selection, how="")
        posterior.conversion = Conversion(
            tuple(
                type(row)(row.name, row.type, row.parameters, False, "the plain network is not random")
                for row in table.rows
            )
        )
        posterior.default_samples = 1
        return posterior
