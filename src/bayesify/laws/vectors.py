"""Laws that draw all random weights at once, as a vector."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayesify._core.random import Key, generator_for, keyed_numbers, shuffled
from bayesify.laws.components import Component
from bayesify.laws.law import Law, Rescaling, check_count, register_law
from bayesify.laws.low_rank import leading, low_rank_component
from bayesify.laws.passes import Pass, Patch, Refusal
from bayesify.laws.stacking import Stack
from bayesify.laws.tensors import Codec, batch_norms
from bayesify.laws.trace import Trace

__all__ = ["GaussianMixtureLaw", "GeneratorLaw", "VectorLaw", "make_generator"]


class VectorLaw(Law):
    """A distribution over the vector of random weights.

    With batch normalisation it has `num_bn_draws` fixed draws, because statistics belong to weights; without, as many
    as are asked for.

    Args:
        network: The network.
        names: The random parameters, in the order of the vector.
        num_bn_draws: The number of draws that get batch-normalisation statistics.
    """

    stacks = True

    def __init__(self, network: nn.Module, *, names: Sequence[str], num_bn_draws: int) -> None:
        super().__init__(network)
        self.codec = Codec(network, names)
        self.statistics_rows = num_bn_draws

    @property
    def names(self) -> Sequence[str]:
        """Return the names of the random parameters."""
        return self.codec.names

    def sites(self) -> set[nn.Module]:
        """Return the modules that own a random parameter, and those with statistics of their own for each draw."""
        return super().sites() | set(batch_norms(self.network).values())

    @abstractmethod
    def sample(self, key: Key) -> Tensor:
        """Return the weights of a draw, (D,)."""

    def samples(self, keys: Sequence[Key]) -> Tensor:
        """Return the weights of several draws, (S, D)."""
        return torch.stack([self.sample(key) for key in keys])

    def stacked(self, keys: Sequence[Key]) -> dict[str, Stack]:
        """Return the weights of several draws by name."""
        return {name: piece.contiguous() for name, piece in self.codec.split(self.samples(keys)).items()}

    @abstractmethod
    def centre(self) -> Tensor:
        """Return the mean of the weights, (D,)."""

    def patch(self, p: Pass) -> Patch:
        """Return the weights; a fresh pass takes a draw at random."""
        if p.kind == "mean":
            return self._placed(self.centre())
        if not p.keys:
            p.keys = (self.keys(1, int(torch.randint(2**31, ())))[0],)
        return self._placed(self.sample(p.key))

    def _placed(self, weights: Tensor) -> Patch:
        return Patch({**self.own.as_dict(), **self.codec.split(weights)})

    def row_weights(self, row: int) -> dict[str, Tensor]:
        """Return the weights that a row of the statistics belongs to."""
        return self.codec.split(self.sample(Key(0, row - 1)) if row else self.centre())

    def keys(self, num_draws: int | None, seed: int) -> list[Key]:
        """Name the draws; with batch normalisation these are taken from the fixed ones, without replacement."""
        fixed = self.statistics_rows
        if not batch_norms(self.network):
            return super().keys(num_draws, seed)
        count = min(self.default_draws, fixed) if num_draws is None else check_count(num_draws, fixed)
        if count > fixed:
            raise ValueError(
                f"{count} draws were asked for, but batch-normalisation statistics were re-estimated for {fixed}. Ask "
                f"for at most that many, or begin anew: convert with a method that has num_bn_draws={count} and fit, "
                f"or distill(..., num_bn_draws={count})."
            )
        return [Key(0, index) for index in shuffled(fixed, seed)[:count]]

    def stale_if_rescaled(self) -> Refusal | None:
        """Return why weights cannot be drawn wider without training data, where that is so."""
        if self.statistics is None:
            return None
        return Refusal(
            "The draws have batch-normalisation statistics of their own, which are estimated from training data and "
            "would be those of narrower weights. Set the width before: fit a posterior of convert(network, "
            "SWAG(scale=...)), or fit the temperature alone: bayesify.calibrate(posterior, val_loader)."
        )


@register_law
class GeneratorLaw(VectorLaw):
    """Weights from a small network: w = G(z) + residual_std e, z ~ N(0, I), e ~ N(0, I).

    G has ReLU layers and a linear one to all D weights, so draws lie in an affine space of H + 1 dimensions, H the last
    hidden size, and it costs (H + 1) D numbers: as many networks. Without hidden layers it is a Gaussian of
    low rank.

    Args:
        network: The network.
        names: The random parameters.
        latent: The size of z.
        hidden: Sizes of the hidden layers.
        num_bn_draws: The number of draws that get batch-normalisation statistics.
        residual: Whether there is noise beside G, of one size for each weight.
        algorithm: How it was learned, for files.
        source: The method that it was learned from, for files.
    """

    name = "generator"
    old_settings: ClassVar[dict[str, str]] = {"how": "algorithm", "num_draws": "num_bn_draws"}
    settings: ClassVar[dict[str, Any]] = {
        "latent": int,
        "hidden": list[int],
        "algorithm": str,
        "num_bn_draws": int,
        "residual": bool,
        "names": list[str],
        "source": str,
    }
    residual_std: Tensor

    def __init__(
        self,
        network: nn.Module,
        *,
        names: Sequence[str],
        latent: int,
        hidden: Sequence[int],
        num_bn_draws: int,
        residual: bool = False,
        algorithm: str = "wgan-gp",
        source: str = "",
    ) -> None:
        super().__init__(network, names=names, num_bn_draws=num_bn_draws)
        self.latent, self.hidden, self.residual = latent, tuple(hidden), residual
        self.algorithm, self.source = algorithm, source
        first = self.codec.flatten(network)
        with torch.random.fork_rng(devices=[]):  # its first weights are written over
            self.generator = make_generator(latent, self.hidden, first.numel()).to(first.device, first.dtype)
        with torch.no_grad():  # until it has learned, the network as it is
            last = self.generator[-1]
            assert isinstance(last, nn.Linear)
            last.weight.zero_()
            last.bias.copy_(first)
        self.register_buffer("residual_std", torch.zeros_like(first if residual else first[:1]))

    def config(self) -> dict[str, Any]:
        """Return the settings."""
        return {
            "latent": self.latent,
            "hidden": list(self.hidden),
            "algorithm": self.algorithm,
            "num_bn_draws": self.statistics_rows,
            "residual": self.residual,
            "names": list(self.names),
            "source": self.source,
        }

    @property
    def learned(self) -> Any:
        """True once draws differ; before, what to call."""
        last = self.generator[-1]
        assert isinstance(last, nn.Linear)
        if bool(last.weight.any()) or bool(self.residual_std.any()):
            return True
        return Refusal(
            "the generator has not learned. bayesify.fit(posterior, loader) runs the chains that it learns from."
        )

    @torch.no_grad()
    def sample(self, key: Key) -> Tensor:
        """Return the weights of a draw, (D,)."""
        like = self.residual_std
        z = keyed_numbers(key, "latent", [self.latent], like).to(like.dtype)
        with torch.autocast(like.device.type, enabled=False):  # weights are made in their own type
            weights: Tensor = self.generator(z)
        if self.residual:
            weights = weights.addcmul_(keyed_numbers(key, "residual", weights.shape, like).to(like.dtype), like)
        return weights

    @torch.no_grad()
    def centre(self) -> Tensor:
        """Return the mean of the weights, (D,): the last layer at the mean of its inputs over 4,096 fixed draws."""
        with torch.autocast(self.residual_std.device.type, enabled=False):
            weights: Tensor = self.generator[-1](self._hidden().mean(0))
        return weights

    def _hidden(self) -> Tensor:
        """Return the inputs of the last layer for fixed draws, (4096, H)."""
        like = self.residual_std
        hidden = keyed_numbers(Key(0), "centre", [4096, self.latent], like).to(like.dtype)
        hidden = hidden - hidden.mean(0)
        with torch.autocast(like.device.type, enabled=False):
            for layer in list(self.generator)[:-1]:
                hidden = layer(hidden)
        return hidden

    @torch.no_grad()
    def components(self, trace: Trace | None = None) -> list[Component] | Refusal:
        """Return one Gaussian with the weights' moments: the last layer is linear in hidden numbers of some covariance.

        That of the hidden numbers is over 4,096 fixed draws; without hidden layers it is exact.
        """
        del trace
        last = self.generator[-1]
        assert isinstance(last, nn.Linear)
        hidden = self._hidden() if self.hidden else None
        if hidden is None:
            columns = last.weight.mT
        else:
            values, vectors = torch.linalg.eigh((hidden - hidden.mean(0)).mT.double().cov(correction=0))
            columns = (vectors * values.clamp_min(0).sqrt()).mT.to(last.weight.dtype) @ last.weight.mT
        columns, left = leading(columns)
        return [low_rank_component(self.codec, self.centre(), left + self.residual_std.square(), columns)]

    def described(self) -> str:
        """Return what the law is called in sentences."""
        return "A generator of weights"


@register_law
class GaussianMixtureLaw(VectorLaw):
    """A mixture of K Gaussians with diagonal covariances over the weights.

    Args:
        network: The network.
        names: The random parameters.
        components: The number K.
        num_bn_draws: The number of draws that get batch-normalisation statistics.
        source: The method that it was made from, for files.
    """

    name = "mixture"
    old_settings: ClassVar[dict[str, str]] = {"num_draws": "num_bn_draws"}
    settings: ClassVar[dict[str, Any]] = {"components": int, "num_bn_draws": int, "names": list[str], "source": str}
    shares: Tensor
    means: Tensor
    stds: Tensor

    def __init__(
        self, network: nn.Module, *, names: Sequence[str], components: int, num_bn_draws: int, source: str = ""
    ) -> None:
        super().__init__(network, names=names, num_bn_draws=num_bn_draws)
        first = self.codec.flatten(network)
        self.source = source
        self.register_buffer("shares", first.new_full((components,), 1 / components))
        self.register_buffer("means", first.expand(components, -1).clone())
        self.register_buffer("stds", torch.zeros_like(self.means))

    def config(self) -> dict[str, Any]:
        """Return the settings."""
        return {
            "components": len(self.shares),
            "num_bn_draws": self.statistics_rows,
            "names": list(self.names),
            "source": self.source,
        }

    @torch.no_grad()
    def sample(self, key: Key) -> Tensor:
        """Return the weights of a draw, (D,)."""
        shares = self.shares.double().cpu()
        component = int(torch.multinomial(shares, 1, generator=generator_for(key, "component")))
        noise = keyed_numbers(key, "weights", self.means[0].shape, self.means).to(self.means.dtype)
        return noise.mul_(self.stds[component]).add_(self.means[component])

    def centre(self) -> Tensor:
        """Return the mean of the weights, (D,)."""
        return self.shares @ self.means

    def rescaling(self) -> Rescaling | Refusal:
        """Return what multiplies the standard deviations, and leaves the means apart as they are."""
        if (refused := self.stale_if_rescaled()) is not None:
            return refused
        before = self.stds.clone()

        def rescale(factor: float) -> None:
            self.stds.copy_(before * factor)

        return rescale

    def components(self, trace: Trace | None = None) -> list[Component] | Refusal:
        """Return the Gaussians, with their shares."""
        del trace
        if batch_norms(self.network):
            return Refusal(
                "A mixture of Gaussians in a network with batch normalisation has statistics for draws, and none for "
                "its components. Use how='sampling'."
            )
        return [
            Component(self.codec.split(mean), self.codec.split(std.square()), weight=share)
            for mean, std, share in zip(self.means, self.stds, self.shares.tolist(), strict=True)
            if share > 0
        ]

    def described(self) -> str:
        """Return what the law is called in sentences."""
        return "A mixture of Gaussians"


def make_generator(latent: int, hidden: tuple[int, ...], size: int) -> nn.Sequential:
    """Return the generator: He-uniform hidden layers, a Glorot-uniform last one, no biases at first.

    >>> sum(p.numel() for p in make_generator(32, (20, 20, 20), 79510).parameters())
    1671210
    """
    sizes = [latent, *hidden]
    layers: list[nn.Module] = []
    for inputs, outputs in zip(sizes, hidden, strict=False):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        nn.init.kaiming_uniform_(layers[-2].weight, nonlinearity="relu")  # type: ignore[arg-type]
        nn.init.zeros_(layers[-2].bias)  # type: ignore[arg-type]
    last = nn.Linear(sizes[-1], size)
    nn.init.xavier_uniform_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, last)
