"""The gradients of convolutions and of pooling as operations that every runtime has, for passes that are traced.

torch's own backward operation is not in ONNX, and a group for each example would fix the size of a batch there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bayesify.laws.gaussian.operations import Convolution

__all__ = ["POOLING", "transposed_input", "weight_gradients"]


def transposed_input(grad: Tensor, x: Tensor, weight: Tensor, operation: Convolution) -> Tensor:
    """Return the gradient of the input, a transposed convolution; `x` says how large it is."""
    o, dims = operation, weight.ndim - 2
    extra = [
        x.shape[2 + i] - ((grad.shape[2 + i] - 1) * o.stride[i] - 2 * o.padding[i] + _reach(weight.shape, o, i))
        for i in range(dims)
    ]
    return torch.convolution(grad, weight, None, o.stride, o.padding, o.dilation, True, extra, o.groups)


def weight_gradients(flow: Tensor, inputs: Tensor, shape: torch.Size, operation: Convolution) -> Tensor:
    """Return each example's gradient of the weight, (B, *weight), from (B, r, O, ...) and (B, r, C, ...).

    Each offset of the kernel meets a part of the padded input.
    """
    o, dims = operation, len(shape) - 2
    rows, entries = flow.shape[0], shape[1] * math.prod(shape[2:])
    if dims == 2:  # one operation in the program instead of one for each offset
        met = functional.unfold(inputs.flatten(0, 1), tuple(shape[2:]), o.dilation, o.padding, o.stride)
        met = met.reshape(rows, -1, *met.shape[1:])  # (B, r, C kernel, T)
    else:
        met = _offsets(flow, inputs, shape, o).flatten(2, 3)
    columns = met.transpose(1, 2).reshape(rows, o.groups, entries, -1)
    moved = flow.flatten(3).transpose(1, 2).reshape(rows, o.groups, shape[0] // o.groups, -1)
    return (moved @ columns.mT).reshape(rows, *shape)


def _offsets(flow: Tensor, inputs: Tensor, shape: torch.Size, o: Convolution) -> Tensor:
    """Return what each offset of the kernel meets, (B, r, C, kernel, T)."""
    dims = len(shape) - 2
    pads = [size for i in reversed(range(dims)) for size in (o.padding[i], o.padding[i])]
    wide = functional.pad(inputs, pads) if any(pads) else inputs
    sizes = flow.shape[3:]
    parts = []
    for offsets in product(*(range(size) for size in shape[2:])):
        part = wide
        for i, offset in enumerate(offsets):
            first = offset * o.dilation[i]
            along = slice(first, first + (sizes[i] - 1) * o.stride[i] + 1, o.stride[i])
            part = part[(slice(None),) * (3 + i) + (along,)]
        parts.append(part)
    return torch.stack(parts, 3).flatten(4)


def _reach(shape: torch.Size, operation: Convolution, dim: int) -> int:
    return operation.dilation[dim] * (shape[2 + dim] - 1) + 1


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
    return transposed_input(flat, x.reshape(-1, 1, *x.shape[2:]), weight, pool).reshape(x.shape)


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
