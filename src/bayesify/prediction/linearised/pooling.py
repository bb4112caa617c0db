"""The gradients of pooling as operations that every runtime has, for passes that are traced.

torch's own backward operations are not in ONNX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bayesify.layers import Convolution

__all__ = ["POOLING"]


def _average_input(
    grad: Tensor,
    x: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> Any:
    """Return the gradient of average pooling: a transposed convolution with equal weights."""
    if divisor is not None or (any(padding) and not count_include_pad) or x.ndim != 4:
        return NotImplemented
    sizes, steps, pads = (tuple(value) * (2 // len(value)) for value in (kernel, stride or kernel, padding))
    if ceil_mode and any((x.shape[2 + i] + 2 * pads[i] - sizes[i]) % steps[i] for i in range(2)):
        return NotImplemented  # a window that reaches beyond the input has fewer entries
    weight = torch.full((1, 1, *sizes), 1 / (sizes[0] * sizes[1]), dtype=grad.dtype, device=grad.device)
    pool = Convolution(steps, pads, (1, 1), False, (0, 0), 1)
    flat = grad.reshape(-1, 1, *grad.shape[2:])
    return pool.input_by_transpose(flat, x.reshape(-1, 1, *x.shape[2:]), weight).reshape(x.shape)


def _maximum_input(grad: Tensor, x: Tensor, *args: Any) -> Any:
    """Return the gradient of max pooling: each window's goes to where its largest entry is."""
    if x.ndim != 4:
        return NotImplemented
    indices = args[-1]
    start = torch.zeros_like(x).flatten(2)
    return start.scatter_add(2, indices.flatten(2), grad.flatten(2)).reshape(x.shape)


POOLING: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.avg_pool2d_backward.default: _average_input,
    torch.ops.aten.max_pool2d_with_indices_backward.default: _maximum_input,
}
