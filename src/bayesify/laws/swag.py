"""A Gaussian fitted to the path of SGD: diagonal plus low rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bayesify._core.random import Key, keyed_rows
from bayesify.laws.components import Component
from bayesify.laws.law import Rescaling
from bayesify.laws.low_rank import low_rank_component
from bayesify.laws.noise_scale import ScaledNoise
from bayesify.laws.passes import Refusal
from bayesify.laws.trace import Trace
from bayesify.laws.vectors import VectorLaw

__all__ = ["LowRankLaw"]


class LowRankLaw(ScaledNoise, VectorLaw):
    """N(mean, scale^2/2 (diag + D D' / (K - 1))), the moments of snapshots of the weights.

    A draw is w = mean + scale/sqrt(2) (diag^(1/2) z1 + D z2 / sqrt(K - 1)), z1, z2 ~ N(0, I), where diag is the
    variance of the snapshots and D holds the last K deviations from the running mean (Maddox et al. 2019, eq. 1).
    The diagonal alone (K = 0) is w = mean + scale diag^(1/2) z1. The network's own weights are the SGD iterate; the
    mean and the moments are buffers.

    Args:
        network: The network.
        names: The random parameters.
        rank: The number K of deviations kept; 0 is the diagonal alone.
        scale: Multiplies the standard deviations.
        num_bn_draws: The number of draws that get batch-normalisation statistics.
    """

    name = "low-rank"
    average: Tensor
    square: Tensor
    deviations: Tensor
    snapshots: Tensor

    def __init__(self, network: nn.Module, *, names: Sequence[str], rank: int, scale: float, num_bn_draws: int) -> None:
        super().__init__(network, names=names, num_bn_draws=num_bn_draws)
        self.rank = rank
        self.scale = scale
        weights = self.codec.flatten(network)
        self.register_buffer("average", weights)
        self.register_buffer("square", torch.zeros_like(weights))
        self.register_buffer("deviations", weights.new_zeros(rank, weights.numel()))
        self.register_buffer("snapshots", torch.zeros((), dtype=torch.long))

    # -- learning ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def collect(self, weights: Tensor | None = None) -> None:
        """Add weights, by default the network's present ones, to the moments (Welford's update, exact in one pass).

        In a loop of your own with batch normalisation, call `posterior.refresh_statistics(loader)` at its end.
        """
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
        self.changed()

    @property
    def learned(self) -> Any:
        """True once snapshots differ; before, what to call."""
        if int(self.snapshots) > 1:
            return True
        return Refusal(
            f"the spread of {int(self.snapshots)} snapshots of the weights is zero. bayesify.fit(posterior, loader) "
            "collects them over its epochs; in a loop of your own bayesify.Learner does in its after_step()."
        )

    # -- prediction -------------------------------------------------------------------------------------------

    def variance(self) -> Tensor:
        """Return the variances of the snapshots, the diagonal of SWAG, as a vector."""
        return self.square / self.snapshots.clamp_min(1)

    def width(self) -> Tensor | float:
        """Return what the standard deviations are multiplied by: the setting, and what `rescale` made of it."""
        return self.scale if self.noise_scale is None else self.scale * self.noise_scale.to(self.average.dtype)

    def rescaling(self) -> Rescaling | Refusal:
        """Return what multiplies `scale`; refuse where draws have batch-normalisation statistics."""
        if (reason := self.learned) is not True:
            return Refusal(reason)
        stale = self.stale_if_rescaled()
        return super().rescaling() if stale is None else stale

    def centre(self) -> Tensor:
        """Return the mean of the snapshots, (D,)."""
        return self.average

    def sample(self, key: Key) -> Tensor:
        """Return the weights of a draw, (D,)."""
        return self.samples([key])[0]

    def samples(self, keys: Sequence[Key]) -> Tensor:
        """Return the weights of several draws, (S, D), whose low rank is one product."""
        mean = self.average
        scale = self.width() / (2**0.5 if self.rank else 1.0)
        drawn = keyed_rows(keys, "diagonal", mean.shape, mean).to(mean.dtype)
        drawn.mul_(self.variance().sqrt_()).mul_(scale).add_(mean)
        if self.rank:
            z = keyed_rows(keys, "low rank", [self.rank], mean).to(mean.dtype)
            columns = (self.snapshots - 1).clamp(max=self.rank)  # as many as were collected
            drawn.addmm_(z * scale / (columns - 1).clamp_min(1).sqrt(), self.deviations)
        return drawn

    def components(self, trace: Trace | None = None) -> list[Component] | Refusal:
        """Return one component, with the deviations as directions that all weights share."""
        del trace
        if not self.rank:
            return [Component(self.codec.split(self.average), self.codec.split(self.variance() * self.width() ** 2))]
        scale = self.width() / 2**0.5
        columns = (self.snapshots - 1).clamp(max=self.rank)  # as many as were collected
        shared = self.deviations * (scale / (columns - 1).clamp_min(1).to(self.average.dtype).sqrt())
        return [low_rank_component(self.codec, self.average, self.variance() * scale**2, shared)]
