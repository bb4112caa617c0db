"""Dropout masks as the random part of a network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from bayesify._core.random import Mask, Noise
from bayesify.laws.components import NoiseTerms, NoisySite
from bayesify.laws.passes import BatchDim, Pass
from bayesify.laws.trace import Trace

__all__ = ["DropoutSite"]

HIGHEST = 1 - 1e-6  # rate of noise that was made wider: at 1 nothing would be left
_LIMIT = -1.7580993408473766  # of SELU, -lambda alpha


@dataclass(frozen=True)
class DropoutSite(NoisySite):
    """Dropout that the posterior's pass switches, not `train()`: y = x m / (1 - p), m ~ Bernoulli(1 - p).

    A draw has one mask for every example, so that it is a function of the input (Gal and Ghahramani 2016, eq. 3);
    a fresh pass has a mask per example. The predictive of one example is the same.

    For SELU networks (`alpha`) y = a (x m + t (1 - m)) + b keeps mean zero and variance one: t = -lambda alpha is
    SELU's limit, a = ((1 - p)(1 + p t^2))^(-1/2), b = -a p t (Klambauer et al. 2017).

    Attributes:
        name: The layer's name.
        p: The probability that an entry is dropped.
        channel_dim: None drops entries; 1 drops whole channels, as Dropout1d, 2d and 3d do.
        features: Whether a mask is the same at every position: one number for each feature of (B, T, D) or (B, D), and
            for each of the C in (B, C, H, W), which of attention weights are the heads.
        alpha: Whether it is alpha dropout.
        inserted: Whether the layer is none of dropout, and its input is masked.
    """

    name: str
    p: float
    channel_dim: int | None = None
    alpha: bool = False
    inserted: bool = False
    features: bool = False

    @property
    def by_position(self) -> bool:
        """Whether positions have masks of their own."""
        return self.p not in (0, 1) and self.channel_dim is None and not self.features

    def _channel(self, ndim: int) -> int | None:
        """Return the dimension along which a mask varies; None for all of them."""
        return (-1 if ndim <= 3 else 1) if self.features and self.channel_dim is None else self.channel_dim

    @property
    def site(self) -> str:
        """Return the name under which the masks are drawn."""
        return f"{self.name}#input" if self.inserted else self.name

    @property
    def rate_name(self) -> str:
        """Return what files call the place."""
        return f"{self.name}.input_dropout".removeprefix(".") if self.inserted else self.name

    def rescaled(self, factor: float) -> DropoutSite:
        """Return dropout whose noise, of the standard deviation sqrt(p / (1 - p)) x, is a factor times as wide.

        That is p' / (1 - p') = factor^2 p / (1 - p); rates of 0 and 1 have no noise and stay.
        """
        if self.p in (0, 1) or factor == 1:
            return self
        odds = factor**2 * self.p / (1 - self.p)
        return replace(self, p=min(odds / (1 + odds), max(HIGHEST, self.p)))

    def around(self, network: nn.Module, act: Callable[..., Tensor]) -> tuple[nn.Module, Callable[..., Any]]:
        """Return the layer, and its forward."""
        module = network.get_submodule(self.name)
        if not self.inserted:
            return module, act
        forward = module.forward

        def masked(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            return forward(act(x), *args, **kwargs)

        return module, masked

    def act(self, p: Pass, x: Tensor, *more: Any) -> Tensor:
        """Drop."""
        del more
        if self.p == 0:
            return x
        site = p.called(self.site)
        channel = self._channel(x.ndim)
        batch, mask = self.batch(p), self._mask
        return p.perturb(x, self._combine, site=site, distribution=mask, batch=batch, channel_dim=channel)

    def at_mean(self, network: nn.Module) -> tuple[nn.Module, Callable[..., Any]] | None:
        """Return the identity for a layer that would drop by itself."""
        module = network.get_submodule(self.name)
        return None if self.inserted or not module.training else (module, _same)

    def again(self, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return arguments with new masks; None where whole channels are dropped, which have to know the batch."""
        x = args[0]
        if self._channel(x.ndim) is not None:
            return None
        return (x if self.p == 0 else self._combine(x, Noise().fresh(list(x.shape), self._mask, x)), *args[1:])

    def batch(self, p: Pass) -> BatchDim | None:
        """Return where the batch is in the present call's input."""
        call = None if p.trace is None else p.trace.call(self.name, p.calls[self.site] - 1)
        return None if call is None else call.input

    def batches(self, trace: Trace) -> list[BatchDim | None]:
        """Return where the batch is in each call."""
        return [call.input for call in trace.calls.get(self.name, ())]

    @cached_property
    def _mask(self) -> Mask:
        return Mask(self.p, 1.0 if self.alpha or self.p == 1 else 1 - self.p)

    def _combine(self, x: Tensor, keep: Tensor) -> Tensor:
        if not self.alpha or self.p == 1:
            return x * keep
        scale = self._scale()
        return scale * (x * keep + _LIMIT * (1 - keep)) - scale * self.p * _LIMIT

    def _scale(self) -> float:
        scale: float = ((1 - self.p) * (1 + self.p * _LIMIT**2)) ** -0.5
        return scale

    def terms(self, x: Tensor, *more: Any) -> NoiseTerms:
        """Return y = x (1 + sqrt(p / (1 - p)) e); alpha dropout y = a (1 - p) x + a sqrt(p (1 - p)) (x - t) e."""
        del more
        channel = self._channel(x.ndim)
        dims = None if channel is None else (channel,)
        if self.p == 1:
            return NoiseTerms(0.0, 0.0)
        if not self.alpha:
            return NoiseTerms(1.0, (self.p / (1 - self.p)) ** 0.5, channel_dims=dims)
        std = self._scale() * (self.p * (1 - self.p)) ** 0.5
        return NoiseTerms(self._scale() * (1 - self.p), std, -std * _LIMIT, dims)


def _same(x: Tensor) -> Tensor:
    return x
