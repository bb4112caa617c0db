"""A Gaussian fitted to the path of SGD: diagonal plus low rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bayesify.posteriors._base import Posterior
from bayesify.posteriors._noise import Key, generator_for
from bayesify.posteriors._row_statistics import estimate_statistics, statistics_rows, statistics_tree
from bayesify.posteriors._weights import Codec, owners

if TYPE_CHECKING:
    from bayesify.methods import Method

__all__ = ["SWAGPosterior"]


class SWAGPosterior(Posterior):
    """N(mean, scale^2/2 (diag + D D' / (K - 1))), the moments of snapshots of the weights.

    A draw is w = mean + scale/sqrt(2) (diag^(1/2) z1 + D z2 / sqrt(K - 1)), z1, z2 ~ N(0, I), where diag is the
    variance of the snapshots and D holds the last K deviations from the running mean (Maddox et al. 2019, eq. 1).
    The diagonal alone (K = 0) is w = mean + scale diag^(1/2) z1. The network's own weights are the SGD iterate; the
    mean and the moments are buffers.

    Batch-normalisation statistics belong to weights. They are re-estimated for the mean and for `num_draws` fixed
    draws by `refresh_statistics`, and kept; a network with such layers then has that many functions. One without
    has as many as are asked for.

    Args:
        network: A copy of the user's network.
        method: How it is learned.
        names: The random parameters.
        rank: The number K of deviations kept; 0 is the diagonal alone.
        scale: Multiplies the standard deviations.
        num_draws: The number of draws that get batch-normalisation statistics.
    """

    average: Tensor
    square: Tensor
    deviations: Tensor
    snapshots: Tensor
    fresh_statistics: Tensor

    def __init__(
        self,
        network: nn.Module,
        method: Method,
        *,
        names: list[str],
        rank: int,
        scale: float,
        num_draws: int,
    ) -> None:
        super().__init__(network, method)
        self.rank = rank
        self.scale = scale
        self.num_draws = num_draws
        self.codec = Codec(network, names)
        weights = self.codec.flatten(network)
        self.register_buffer("average", weights)
        self.register_buffer("square", torch.zeros_like(weights))
        self.register_buffer("deviations", weights.new_zeros(rank, weights.numel()))
        self.statistics = statistics_tree(network, num_draws + 1)
        self.register_buffer("snapshots", torch.zeros((), dtype=torch.long))
        self.register_buffer("fresh_statistics", torch.ones((), dtype=torch.bool))

    # -- learning ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def collect(self, weights: Tensor | None = None) -> None:
        """Add weights, by default the network's present ones, to the moments (Welford's update, exact in one pass)."""
        count = int(self.snapshots) + 1
        weights = self.codec.flatten(self.network) if weights is None else weights.to(self.average)
        step = weights - self.average
        if count == 1:  # the pretrained weights were a placeholder
            self.average.copy_(weights)
        else:
            self.average.add_(step, alpha=1 / count)
            self.square.add_(step * (weights - self.average))
            if self.rank:
                self.deviations.copy_(self.deviations.roll(-1, 0))
                self.deviations[-1] = weights - self.average
        self.snapshots.fill_(count)
        self.fresh_statistics.fill_(not self.statistics.as_dict())

    @torch.no_grad()
    def refresh_statistics(
        self,
        loader: Iterable[Any],
        *,
        max_batches: int | None = None,
        progress: Callable[[Iterable[int]], Iterable[int]] = iter,
    ) -> None:
        """Re-estimate batch-normalisation statistics for the mean and for each of the fixed draws.

        Costs `num_draws + 1` passes over the loader, or over its first `max_batches` batches.
        """
        if not self.statistics.as_dict():
            return
        for draw in progress(range(-1, self.num_draws)):
            estimate_statistics(
                self.network,
                self._weights(Key(0, draw) if draw >= 0 else None),
                {name: rows[draw + 1] for name, rows in self.statistics.as_dict().items()},
                loader,
                max_batches=max_batches,
            )
        self.fresh_statistics.fill_(True)

    # -- prediction -------------------------------------------------------------------------------------------

    def variance(self) -> Tensor:
        """Return the variances of the snapshots, the diagonal of SWAG, as a vector."""
        return self.square / self.snapshots.clamp_min(1)

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights, and their statistics, for the present mode."""
        noise = self.noise
        if noise.silent:
            return self._weights(None) | self._statistics(0)
        key = noise.keys[0] if noise.keys else self.keys(1, int(torch.randint(2**31, ())))[0]
        return self._weights(key) | self._statistics(key.index + 1)

    def _statistics(self, row: int) -> dict[str, Tensor]:
        return statistics_rows(self.network, self.statistics, row)

    def _weights(self, key: Key | None) -> dict[str, Tensor]:
        if key is None:
            return self.codec.split(self.average)
        mean = self.average
        scale = self.scale / (2**0.5 if self.rank else 1.0)
        drawn = torch.empty_like(mean).normal_(generator=generator_for(key, "diagonal", mean.device))
        drawn.mul_(self.variance().sqrt_()).mul_(scale).add_(mean)
        if self.rank:
            z = mean.new_empty(self.rank).normal_(generator=generator_for(key, "low rank", mean.device))
            columns = (self.snapshots - 1).clamp(max=self.rank)  # as many as were collected
            drawn.addmv_(self.deviations.T, z * scale / (columns - 1).clamp_min(1).sqrt())
        return self.codec.split(drawn)

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
                f"{self.num_draws}. Ask for at most that many, or convert with SWAG(num_draws={count}) and fit again."
            )
        order = torch.randperm(self.num_draws, generator=torch.Generator().manual_seed(seed))
        return [Key(0, int(index)) for index in order[:count]]

    def sites(self) -> set[nn.Module]:
        """Return the modules that own a random parameter or re-estimated statistics."""
        return owners(self.network, [*self.codec.names, *self.statistics.as_dict()])
