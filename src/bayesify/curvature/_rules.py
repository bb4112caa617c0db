"""The gradient of each example in a layer's parameters, from the layer's input and its output's gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bayesify.laws.gaussian.operations import Convolution

__all__ = ["CONVOLUTIONS", "RULES", "embedding_squares", "padded", "per_example"]

Gradients = dict[str, Tensor]


def per_example(layer: nn.Module, x: Tensor, grad: Tensor) -> Gradients:
    """Return the gradient of each example in the layer's weight and bias, (B, *shape), by their names.

    Args:
        layer: Of exactly a type in `RULES`.
        x: Its input as (B, r, ...), r entries of the batch's dimension for each example.
        grad: The gradient of its output, in the same arrangement.
    """
    return RULES[type(layer)](layer, x, grad)


def linear(layer: nn.Linear, x: Tensor, grad: Tensor) -> Gradients:
    """Sum g a' over positions."""
    del layer
    x, grad = (t.reshape(len(t), -1, t.shape[-1]) for t in (x, grad))
    return {"weight": grad.mT @ x, "bias": grad.sum(1)}


def convolution(layer: Any, x: Tensor, grad: Tensor) -> Gradients:
    """Convolve each example's input with its gradient: one convolution with B times the groups."""
    whole, padding = padded(layer, x)
    output_padding = tuple(
        size - ((n - 1) * stride - 2 * pad + dilation * (kernel - 1) + 1) if layer.transposed else 0
        for size, n, stride, pad, dilation, kernel in zip(
            grad.shape[3:], whole.shape[3:], layer.stride, padding, layer.dilation, layer.kernel_size, strict=True
        )
    )
    operation = Convolution(layer.stride, padding, layer.dilation, layer.transposed, output_padding, layer.groups)
    weights = layer.weight.detach().expand(len(x), *layer.weight.shape)
    _, found = operation.each_backward(grad, whole, weights, need_x=False)
    return {"weight": found, "bias": grad.flatten(3).sum((1, 3)) if grad.ndim > 3 else grad.sum(1)}


def padded(layer: Any, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return the input (B, r, C, ...) and the zeros that remain to be added; other kinds of padding are added here."""
    if isinstance(layer.padding, str) or layer.padding_mode != "zeros":
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        whole = functional.pad(x.flatten(0, 1), layer._reversed_padding_repeated_twice, mode=mode)
        return whole.reshape(*x.shape[:2], *whole.shape[1:]), (0,) * (layer.weight.ndim - 2)
    return x, layer.padding


def embedding_squares(layer: nn.Embedding, calls: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the sum over examples of the table's squared gradients, (V, D), from all calls' (ids, gradient).

    A token's gradients in one example are added up before they are squared; only tokens that occur take memory.
    """
    rows, tokens = len(calls[0][0]), len(layer.weight)
    examples = tokens * torch.arange(rows, device=layer.weight.device)[:, None]
    pairs = torch.cat([(examples + ids.flatten(1)).flatten() for ids, _ in calls])
    flows = torch.cat([grad.reshape(-1, grad.shape[-1]) for _, grad in calls])
    found, place = torch.unique(pairs, return_inverse=True)
    squares = flows.new_zeros(len(found), flows.shape[-1]).index_add_(0, place, flows).square_()
    total = flows.new_zeros(tokens, flows.shape[-1]).index_add_(0, found % tokens, squares)
    if layer.padding_idx is not None:
        total[layer.padding_idx] = 0
    return total


def batch_norm(layer: Any, x: Tensor, grad: Tensor) -> Gradients:
    """Normalise by the running statistics."""
    flat = x.flatten(0, 1)
    y = functional.batch_norm(flat, layer.running_mean, layer.running_var, None, None, False, 0.0, layer.eps)
    return _channels(y.view_as(x), grad)


def instance_norm(layer: Any, x: Tensor, grad: Tensor) -> Gradients:
    """Normalise by the running statistics where the layer keeps them, else by the example's own."""
    tracked = layer.track_running_stats
    mean, var = (layer.running_mean, layer.running_var) if tracked else (None, None)
    y = functional.instance_norm(x.flatten(0, 1), mean, var, None, None, not tracked, 0.0, layer.eps)
    return _channels(y.view_as(x), grad)


def group_norm(layer: nn.GroupNorm, x: Tensor, grad: Tensor) -> Gradients:
    """Normalise by the statistics of groups of channels."""
    return _channels(functional.group_norm(x.flatten(0, 1), layer.num_groups, None, None, layer.eps).view_as(x), grad)


def layer_norm(layer: nn.LayerNorm, x: Tensor, grad: Tensor) -> Gradients:
    """Normalise by the statistics of the last dimensions."""
    return _trailing(functional.layer_norm(x, layer.normalized_shape, None, None, layer.eps), grad, layer)


def rms_norm(layer: Any, x: Tensor, grad: Tensor) -> Gradients:
    """Normalise by the root of the mean square."""
    return _trailing(functional.rms_norm(x, layer.normalized_shape, None, layer.eps), grad, layer)


def _channels(y: Tensor, grad: Tensor) -> Gradients:
    others = [dim for dim in range(1, y.ndim) if dim != 2]  # (B, r, C, ...)
    return {"weight": (grad * y).sum(others), "bias": grad.sum(others)}


def _trailing(y: Tensor, grad: Tensor, layer: Any) -> Gradients:
    last = y.ndim - len(layer.normalized_shape)
    flat, flow = (t.reshape(len(t), -1, *t.shape[last:]) for t in (y, grad))
    return {"weight": (flow * flat).sum(1), "bias": flow.sum(1)}


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

RULES: dict[type[nn.Module], Callable[..., Gradients]] = {
    nn.Linear: linear,
    **dict.fromkeys(CONVOLUTIONS, convolution),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), convolution),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), batch_norm),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), instance_norm),
    nn.GroupNorm: group_norm,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: rms_norm,
}
