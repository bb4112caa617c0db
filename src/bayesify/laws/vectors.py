"""Posteriors that draw all random weights at once, as a vector."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from bayesify.laws.noise import Key, generator_for, keyed_numbers, shuffled
from bayesify.laws.posterior import Posterior
from bayesify.laws.statistics import estimate_statistics, statistics_rows, statistics_tree
from bayesify.laws.tensors import Codec, owners

if TYPE_CHECKING:
    from bayesify.methods import Method

__all__ = ["GeneratorPosterior", "MixturePosterior", "VectorPosterior", "make_generator"]


class VectorPosterior(Posterior):
    """A distribution over the vector of random weights.

    With batch normalisation it has `num_draws` fixed draws, because statistics belong to weights; without, as many as
    are asked for.

    Args:
        network: A copy of the user's network.
        method: How it was made.
        names: The random parameters, in the order of the vector.
        num_draws: The number of draws that get batch-normalisation statistics.
    """

    fresh_statistics: Tensor

    def __init__(self, network: nn.Module, method: Method, *, names: list[str], num_draws: int) -> None:
        super().__init__(network, method)
        self.codec = Codec(network, names)
        self.num_draws = num_draws
        self.statistics = statistics_tree(network, num_draws + 1)
        self.register_buffer("fresh_statistics", torch.ones((), dtype=torch.bool))

    def outdate_statistics(self) -> None:
        """Say that the weights have changed, so that their batch-normalisation statistics are not theirs."""
        self.fresh_statistics.fill_(not self.statistics.as_dict())

    @abstractmethod
    def sample(self, key: Key) -> Tensor:
        """Return the weights of a draw, (D,)."""

    @abstractmethod
    def centre(self) -> Tensor:
        """Return the mean of the weights, (D,)."""

    @torch.no_grad()
    def refresh_statistics(
        self,
        loader: Iterable[Any],
        *,
        max_batches: int | None = None,
        progress: Callable[[Iterable[int]], Iterable[int]] = iter,
    ) -> None:
        """Re-estimate batch-normalisation statistics for the mean and the fixed draws: a pass over the loader each."""
        if not self.statistics.as_dict():
            return
        for draw in progress(range(-1, self.num_draws)):
            weights = self.sample(Key(0, draw)) if draw >= 0 else self.centre()
            statistics = {name: rows[draw + 1] for name, rows in self.statistics.as_dict().items()}
            estimate_statistics(self.network, self.codec.split(weights), statistics, loader, max_batches=max_batches)
        self.fresh_statistics.fill_(True)

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights, and their statistics, for the present mode."""
        noise = self.noise
        if noise.silent:
            return self.codec.split(self.centre()) | self.statistics_of(0)
        key = noise.keys[0] if noise.keys else self.keys(1, int(torch.randint(2**31, ())))[0]
        return self.codec.split(self.sample(key)) | self.statistics_of(key.index + 1)

    def statistics_of(self, row: int) -> dict[str, Tensor]:
        """Return the batch-normalisation statistics of the mean (row 0) or of a fixed draw, by name."""
        return statistics_rows(self.network, self.statistics, row)

    def keys(self, num_samples: int | None, seed: int) -> list[Key]:
        """Name the draws; with batch normalisation these are taken from the fixed ones, without replacement."""
        if not self.statistics.as_dict():
            return super().keys(num_samples, seed)
        if not bool(self.fresh_statistics):
            raise ValueError(
                "The batch-normalisation statistics are older than the weights. Call "
                "posterior.refresh_statistics(train_loader), which fit does at its end."
            )
        count = min(self.default_samples, self.num_draws) if num_samples is None else self._count(num_samples)
        if count > self.num_draws:
            raise ValueError(
                f"{count} draws were asked for, but batch-normalisation statistics were re-estimated for "
                f"{self.num_draws}. Ask for at most that many, or begin anew: convert with "
                f"{type(self.method).__name__}(num_draws={count}) and fit, or distill(..., num_draws={count})."
            )
        return [Key(0, index) for index in shuffled(self.num_draws, seed)[:count]]

    def sites(self) -> set[nn.Module]:
        """Return the modules that own a random parameter or re-estimated statistics."""
        return owners(self.network, [*self.codec.names, *self.statistics.as_dict()])


class GeneratorPosterior(VectorPosterior):
    """Weights from a small network: w = G(z) + residual_std e, z ~ N(0, I), e ~ N(0, I).

    G has ReLU layers and a linear one to all D weights, so draws lie in an affine space of H + 1 dimensions, H the last
    hidden size, and it costs (H + 1) D numbers: as many networks. Without hidden layers it is a Gaussian of
    low rank.

    Args:
        network: A copy of the user's network.
        method: How it was made.
        names: The random parameters.
        latent: The size of z.
        hidden: Sizes of the hidden layers.
        num_draws: The number of draws that get batch-normalisation statistics.
        residual: Whether there is noise beside G, of one size for each weight.
    """

    residual_std: Tensor

    def __init__(
        self,
        network: nn.Module,
        method: Method,
        *,
        names: list[str],
        latent: int,
        hidden: tuple[int, ...],
        num_draws: int,
        residual: bool = False,
    ) -> None:
        super().__init__(network, method, names=names, num_draws=num_draws)
        self.latent, self.residual = latent, residual
        first = self.codec.flatten(network)
        with torch.random.fork_rng(devices=[]):  # its first weights are written over
            self.generator = make_generator(latent, hidden, first.numel()).to(first.device, first.dtype)
        with torch.no_grad():  # until it has learned, the network as it is
            last = self.generator[-1]
            assert isinstance(last, nn.Linear)
            last.weight.zero_()
            last.bias.copy_(first)
        self.register_buffer("residual_std", torch.zeros_like(first if residual else first[:1]))

    @property
    def learned(self) -> Literal[True] | str:
        """True once draws differ; before, what to call."""
        last = self.generator[-1]
        assert isinstance(last, nn.Linear)
        if bool(last.weight.any()) or bool(self.residual_std.any()):
            return True
        return "the generator has not learned. bayesify.fit(posterior, loader) runs the chains that it learns from."

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
        *layers, last = self.generator
        like = self.residual_std
        hidden = keyed_numbers(Key(0), "centre", [4096, self.latent], like).to(like.dtype)
        hidden = hidden - hidden.mean(0)
        with torch.autocast(like.device.type, enabled=False):
            for layer in layers:
                hidden = layer(hidden)
            weights: Tensor = last(hidden.mean(0))
        return weights


class MixturePosterior(VectorPosterior):
    """A mixture of K Gaussians with diagonal covariances over the weights.

    Args:
        network: A copy of the user's network.
        method: How it was made.
        names: The random parameters.
        components: The number K.
        num_draws: The number of draws that get batch-normalisation statistics.
    """

    shares: Tensor
    means: Tensor
    stds: Tensor

    def __init__(
        self, network: nn.Module, method: Method, *, names: list[str], components: int, num_draws: int
    ) -> None:
        super().__init__(network, method, names=names, num_draws=num_draws)
        first = self.codec.flatten(network)
        self.register_buffer("shares", first.new_full((components,), 1 / components))
        self.register_buffer("means", first.expand(components, -1).clone())
        self.register_buffer("stds", torch.zeros_like(self.means))

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
