"""Layers whose inputs are multiplied by factors of their own for each example of a pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bayesify._core.maths import scaled_channels
from bayesify.laws.input_factors.latents import Latent, Layer
from bayesify.laws.passes import BatchDim, Pass, ShapeError
from bayesify.laws.patching import swapped

__all__ = ["CommonFactors", "DrawnFactors", "Factors", "scaled_forward"]

Calls = Mapping[str, tuple[BatchDim | None, ...]]


@dataclass
class Factors:
    """The factors of one stochastic pass: a module that is called twice has the same factors in both calls.

    Attributes:
        factors: Each latent's factors for each example, (B, D).
        calls: For each layer and each of its calls, where the batch is in its activation.
    """

    factors: Mapping[Latent, Tensor]
    calls: Calls
    counted: dict[str, int] = field(default_factory=partial(defaultdict, int))

    def visit(self, layer: Layer) -> BatchDim | None:
        """Return where the batch is in the layer's present call, as far as it is known."""
        index = self.counted[layer.name]
        self.counted[layer.name] += 1
        known = self.calls.get(layer.name, ())
        return known[index] if index < len(known) else None

    def scale(self, x: Tensor, factors: Tensor, layer: Layer, batch: BatchDim | None) -> Tensor:
        """Multiply an activation by each example's factors (B, D) along the layer's dimension."""
        if factors.shape[1] != x.shape[layer.dim]:
            raise ShapeError(
                f"Layer {layer.name!r} has {factors.shape[1]} inputs, but its activation has the shape "
                f"{tuple(x.shape)}, with {x.shape[layer.dim]} in dimension {layer.dim}."
            )
        placed = self.placed(x, factors, layer, batch, layer.dim % x.ndim)
        if torch.is_grad_enabled() and placed.shape == (*x.shape[:2], *[1] * (x.ndim - 2)):
            return scaled_channels(x, placed.flatten(1))
        return x * placed

    def placed(self, x: Tensor, factors: Tensor, layer: Layer, batch: BatchDim | None, dim: int) -> Tensor:
        """Bring factors (B, D) into a shape that broadcasts against an activation with D entries in `dim`."""
        rows = len(factors)
        shape = [1] * x.ndim
        shape[dim] = factors.shape[1]
        if batch == BatchDim(None) and x.shape[0] == 1 and dim > 0:  # positions, say: each example gets its own
            shape[0] = rows
            return factors.reshape(shape).to(x.dtype)
        at = 0 if batch is None or batch.dim is None else batch.dim
        if at == dim or at >= x.ndim or not rows or x.shape[at] % rows:
            raise ShapeError(
                f"Layer {layer.name!r} saw an activation of shape {tuple(x.shape)} in a batch of {rows} examples, and "
                f"which of its dimensions is the batch is unknown. Exclude the layer: "
                f"convert(..., exclude={layer.name!r})."
            )
        times = x.shape[at] // rows
        if times > 1:
            factors = factors.repeat_interleave(times, 0)
        if at > dim:
            factors = factors.T
        shape[at] = rows * times
        return factors.reshape(shape).to(x.dtype)


@dataclass
class DrawnFactors(Factors):
    """The factors of several draws, (S B, D): an activation that has no copy for each draw yet gets one.

    Attributes:
        p: The pass.
    """

    p: Pass = field(default_factory=Pass)

    def scale(self, x: Tensor, factors: Tensor, layer: Layer, batch: BatchDim | None) -> Tensor:
        """Multiply an activation by each draw's factors along the layer's dimension."""
        if batch != BatchDim(None):
            draws = len(self.p.keys)
            dim, copies = self.p.find_batch(x, layer.name, draws, batch)
            if copies != draws:  # one row is repeated by the product itself
                x = (
                    torch.cat([x] * draws, dim)
                    if x.shape[dim] > 1
                    else x.expand(*x.shape[:dim], draws, *x.shape[dim + 1 :])
                )
        self.p.folded = True
        return super().scale(x, factors, layer, batch)


class CommonFactors(Factors):
    """A pass whose factors, (1, D), all examples have in common."""

    def placed(self, x: Tensor, factors: Tensor, layer: Layer, batch: BatchDim | None, dim: int) -> Tensor:
        """Bring factors (1, D) into a shape that broadcasts against an activation with D entries in `dim`."""
        del layer, batch
        return factors.view(-1, *(1,) * (x.ndim - 1 - dim))


def scaled_forward(module: nn.Module, layer: Layer, present: Factors) -> Callable[..., Any]:
    """Return a forward with each example's own factors."""
    if isinstance(module, nn.MultiheadAttention):
        return _attention(module, layer, present)
    forward = module.forward

    def scaled(*args: Any, **kwargs: Any) -> Tensor:
        batch = present.visit(layer)
        factors = present.factors[layer.weights[0]]
        if layer.side == "output":
            return present.scale(forward(*args, **kwargs), factors, layer, batch)
        args, kwargs = _replace_input(args, kwargs, lambda x: present.scale(x, factors, layer, batch))
        y: Tensor = forward(*args, **kwargs)
        return y if layer.bias is None else y + _bias_change(module, y, layer, layer.bias, present, batch)

    return scaled


def _replace_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = next(iter(kwargs))
    return args, {**kwargs, name: change(kwargs[name])}


def _bias_change(
    module: Any, y: Tensor, layer: Layer, latent: Latent, present: Factors, batch: BatchDim | None
) -> Tensor:
    """Return (z - 1) b for each example, which turns y + b into y + z b."""
    change = (present.factors[latent] - 1) * module.bias
    return present.placed(y, change, layer, batch, layer.dim % y.ndim)


def _attention(module: nn.MultiheadAttention, layer: Layer, present: Factors) -> Callable[..., Any]:
    forward: Callable[..., Any] = module.forward

    def scaled(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        batch = present.visit(layer)
        inputs: tuple[Tensor, ...] = (query, key, value)
        if layer.weights:
            parts = [present.factors[latent] for latent in layer.weights]
            each = parts if len(parts) == 3 else list(parts[0].chunk(3, 1))
            inputs = tuple(present.scale(x, z, layer, batch) for x, z in zip(inputs, each, strict=True))
        if layer.output is None:
            return forward(*inputs, *args, **kwargs)
        # The fused function multiplies by the projection itself: it gets the identity, and ours comes after it.
        projection = module.out_proj
        slots = {name: [(projection._parameters, name)] for name in ("weight", "bias")}
        weight, bias = projection.weight, projection.bias
        identity = torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
        with swapped(slots, {"weight": identity, "bias": None}):  # type: ignore[dict-item]
            mixed, attention = forward(*inputs, *args, **kwargs)
        y = functional.linear(present.scale(mixed, present.factors[layer.output], layer, batch), weight, bias)
        if layer.output_bias is not None:
            y = y + _bias_change(projection, y, layer, layer.output_bias, present, batch)
        return y, attention

    return scaled
