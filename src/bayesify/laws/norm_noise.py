"""Noise in normalisation layers as the random part of a network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bayesify._core.deprecation import warn_renamed
from bayesify.laws.components import NoiseTerms, NoisySite
from bayesify.laws.passes import BatchDim, Pass
from bayesify.laws.trace import Call, Trace
from bayesify.layers import NormLayer, layer_type, register_by_old_name

__all__ = ["NoiseShape", "NormSite", "norm_kind", "register_norm"]

NoiseShape = Literal["sample-channel", "element", "channel"]


@dataclass(frozen=True)
class NormSite(NoisySite):
    """Noise on what a normalisation layer scaled: u = gamma (1 + alpha eps) xhat + beta, eps ~ N(0, 1).

    Computed from the layer's own output y = gamma xhat + beta as u = y (1 + alpha eps) - alpha eps beta: a scale and a
    shift. A draw has one eps for all examples, so with noise per channel it is the network with the scales
    gamma (1 + alpha eps), and torch's own layers are run with those where a draw is evaluated by itself: at the cost of
    a plain pass. A fresh pass has eps for each example, or with "channel" for the batch.

    Attributes:
        name: The layer's name.
        alpha: The standard deviation of the noise.
        shape: "sample-channel" and "channel" have one eps for each channel, "element" one for each number.
        channel_dims: The dimensions along which gamma varies.
        before: The name of a submodule that takes the scaled output, where an activation follows inside the layer.
        scales: Whether the layer's output is known to be weight xhat + bias, so that noise is a scale of its weight.
    """

    name: str
    alpha: float
    shape: NoiseShape
    channel_dims: tuple[int, ...]
    before: str | None = None
    scales: bool = False

    @property
    def by_position(self) -> bool:
        """Whether positions have noise of their own."""
        return self.shape == "element" and self.alpha != 0

    @property
    def scales_weight(self) -> bool:
        """Whether a draw is the layer with another scale."""
        return self.scales and self.shape != "element"

    def around(self, network: nn.Module, act: Callable[..., Tensor]) -> tuple[nn.Module, Callable[..., Any]]:
        """Return the layer, or the module inside it that takes the scaled output, and its forward."""
        norm = network.get_submodule(self.name)
        module = norm if self.before is None else norm.get_submodule(self.before)
        forward = module.forward

        def after(*args: Any, **kwargs: Any) -> Any:
            return act(forward(*args, **kwargs), getattr(norm, "bias", None))

        def inside(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            return forward(act(x, getattr(norm, "bias", None)), *args, **kwargs)

        return module, after if self.before is None else inside

    def in_pass(self, network: nn.Module, p: Pass) -> tuple[nn.Module, Callable[..., Any]]:
        """Return the layer, and its forward: with another scale where one draw is evaluated by itself."""
        norm: nn.Module = network.get_submodule(self.name)
        if len(p.keys) != 1 or not self.scales_weight or self.alpha == 0:
            return super().in_pass(network, p)
        forward = norm.forward

        def scaled(*args: Any, **kwargs: Any) -> Any:
            held = norm._parameters
            gamma = held["weight"]
            assert gamma is not None
            scales = self.scaled(p, gamma)
            assert scales is not None
            held["weight"] = scales[0]  # type: ignore[assignment]
            try:
                return forward(*args, **kwargs)
            finally:
                held["weight"] = gamma

        return norm, scaled

    def act(self, p: Pass, x: Tensor, *more: Any) -> Tensor:
        """Add noise to a normalised output; `more` is the layer's shift beta."""
        if self.alpha == 0:
            return x
        site = p.called(self.name)
        return p.perturb(
            x,
            partial(self._combine, self._aligned(more[0], x.ndim)),
            site=site,
            distribution="normal",
            batch=self.batch(p),
            channel_dim=None if self.shape == "element" else self.channel_dims,
            per_example=self.shape != "channel",
        )

    def scaled(self, p: Pass, gamma: Tensor) -> Tensor | None:
        """Return gamma (1 + alpha eps) of each of the pass's draws; None where the noise is no scale of the layer's."""
        if self.alpha == 0:
            return gamma.expand(len(p.keys), *gamma.shape)
        if not self.scales_weight:
            return None
        eps = p.noise.drawn(p.keys, p.called(self.name), list(gamma.shape), "normal", gamma)
        wide = torch.promote_types(gamma.dtype, torch.float32)
        return (gamma * (1 + self.alpha * eps.to(wide))).to(gamma.dtype)

    def rescaled(self, factor: float) -> NormSite:
        """Return the layer with a multiple of alpha."""
        return replace(self, alpha=factor * self.alpha)

    def terms(self, x: Tensor, *more: Any) -> NoiseTerms:
        """Return u = y + alpha (y - beta) e."""
        beta = self._aligned(more[0], x.ndim)
        shift = 0.0 if beta is None else -self.alpha * beta
        return NoiseTerms(1.0, self.alpha, shift, None if self.shape == "element" else self.channel_dims)

    def batch(self, p: Pass) -> BatchDim | None:
        """Return where the batch is in the activation of the present call."""
        index = p.calls[self.name] - 1
        call = None if p.trace is None else p.trace.call(self._path, index)
        return None if call is None else self._dim(call)

    def batches(self, trace: Trace) -> list[BatchDim | None]:
        """Return where the batch is in the activation of each call."""
        return [self._dim(call) for call in trace.calls.get(self._path, ())]

    @property
    def _path(self) -> str:
        return self.name if self.before is None else f"{self.name}.{self.before}".removeprefix(".")

    def _dim(self, call: Call) -> BatchDim | None:
        return call.output if self.before is None else call.input

    def _aligned(self, beta: Tensor | None, ndim: int) -> Tensor | None:
        if beta is not None and self.channel_dims == (1,):
            return beta.reshape(-1, *(1,) * (ndim - 2))
        return beta

    def _combine(self, beta: Tensor | None, y: Tensor, eps: Tensor) -> Tensor:
        # One plus a small number has no room for it in half precision.
        wide = torch.promote_types(y.dtype, torch.float32)
        scaled = self.alpha * eps.to(wide)
        # Two operations with one broadcast factor each: torch's fused ones (lerp, addcmul) are several times slower. A
        # norm's output is its own, so without gradients it is changed in place: new memory would cost more than that.
        fits = y.dtype == wide and all(e in (1, s) for e, s in zip(eps.shape, y.shape, strict=True))
        u = y * (1 + scaled) if torch.is_grad_enabled() or not fits else y.mul_(1 + scaled)
        if beta is not None:
            u = u.sub_(scaled * beta.to(wide))
        return u.to(y.dtype)


def norm_kind(kind: type[nn.Module]) -> NormLayer | None:
    """Return what is known of a type; the old name of `bayesify.layers.layer_type(kind).norm`."""
    warn_renamed("norm_kind(kind)", "bayesify.layers.layer_type(kind).norm")
    return layer_type(kind).norm


def register_norm(kind: type[nn.Module], found: NormLayer) -> None:
    """Make a type of normalisation layer known; the old name of `bayesify.register_type`."""
    register_by_old_name("register_norm", kind, found)
