"""Inputs and output gradients of a layer at each position: what Kronecker factors are made from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from bayesify.curvature._layers import Call
from bayesify.layers import layer_type, padded

__all__ = ["has_factors", "position_gradients", "position_inputs"]

CHUNK = 2**22  # numbers of patches at a time


def has_factors(layer: nn.Module) -> bool:
    """Return whether a layer's curvature can be a Kronecker product: a linear layer or a convolution."""
    return layer_type(layer).family in ("linear", "convolution")


def position_inputs(call: Call) -> Iterator[Tensor]:
    """Give the inputs that the weight meets at each position, (N, G, D), some examples at a time."""
    x = call.batch.split(call.x)
    if layer_type(call.layer).family == "linear":
        yield x.reshape(-1, 1, x.shape[-1])
        return
    layer: Any = call.layer
    kernel = layer.weight[0, 0].numel()
    size = max(1, CHUNK // max(1, kernel * x[0].numel()))
    for start in range(0, len(x), size):
        yield _patches(layer, x[start : start + size])


def position_gradients(call: Call, grad: Tensor) -> Tensor:
    """Return the gradients of a layer's outputs at each position, (N, G, O)."""
    flow = call.batch.split(grad)
    if layer_type(call.layer).family == "linear":
        return flow.reshape(-1, 1, flow.shape[-1])
    layer: Any = call.layer
    return flow.movedim(2, -1).reshape(-1, layer.groups, flow.shape[2] // layer.groups)


def _patches(layer: Any, x: Tensor) -> Tensor:
    """Return the patches of (B, r, C, ...) under the kernel, (N, G, C/G times the kernel's size)."""
    flat, padding = padded(layer, x.flatten(0, 1))
    flat = functional.pad(flat, [amount for pad in reversed(padding) for amount in (pad, pad)])
    for dim, (kernel, stride, dilation) in enumerate(
        zip(layer.kernel_size, layer.stride, layer.dilation, strict=True), start=2
    ):
        flat = flat.unfold(dim, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
    dims = layer.weight.ndim - 2
    flat = flat.movedim(1, dims + 1)  # (B r, positions..., C, kernel...)
    return flat.reshape(-1, layer.groups, layer.weight[0].numel())
