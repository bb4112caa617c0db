"""What `distill` leaves behind: configurations that files name, and `fit` does not learn."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from bayesify.conversion import Selection, select_parameters
from bayesify.laws import GeneratorPosterior, MixturePosterior
from bayesify.methods.banks import Made
from bayesify.methods.method import register

__all__ = ["Generator", "Mixture"]


@register
@dataclass(frozen=True, kw_only=True)
class Generator(Made):
    """A generator of weights, which `distill` learns from a bank (Wang et al. 2018).

    Attributes:
        latent: The size of z.
        hidden: Sizes of the hidden layers.
        how: "wgan-gp", "wgan", "gan", or "pca", which has no hidden layers.
        num_draws: For networks with batch normalisation: how many draws have their own statistics.
        residual: Whether weights have independent noise beside the generator's.
    """

    name = "generator"

    latent: int = 32
    hidden: tuple[int, ...] = (100, 100, 100)
    how: str = "wgan-gp"
    num_draws: int = 50
    residual: bool = False

    def build(self, network: nn.Module, selection: Selection) -> GeneratorPosterior:
        """Make a generator that returns the network's own weights."""
        names, table = select_parameters(network, selection, how=f"generated, {self.how}")
        posterior = GeneratorPosterior(
            network,
            self,
            names=list(self.names) or names,
            latent=self.latent,
            hidden=self.hidden,
            num_draws=self.num_draws,
            residual=self.residual,
        )
        posterior.conversion = table
        return posterior


@register
@dataclass(frozen=True, kw_only=True)
class Mixture(Made):
    """A mixture of diagonal Gaussians, which `distill` fits to a bank by expectation maximisation.

    Attributes:
        components: How many.
        num_draws: For networks with batch normalisation: how many draws have their own statistics.
    """

    name = "mixture"

    components: int = 10
    num_draws: int = 50

    def build(self, network: nn.Module, selection: Selection) -> MixturePosterior:
        """Make a mixture at the network's own weights."""
        names, table = select_parameters(network, selection, how=f"a mixture of {self.components}")
        posterior = MixturePosterior(
            network, self, names=list(self.names) or names, components=self.components, num_draws=self.num_draws
        )
        posterior.conversion = table
        return posterior
