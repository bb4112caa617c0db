"""Gradients of layers that are not random, as operations that every runtime has, for passes that are traced.

torch's own backward operations are not in ONNX. That of a convolution is a transposed convolution; that of a map of
each side of an image, as pooling and interpolation are, is its transpose, as a matrix for each side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from bayesify.layers import Convolution
from bayesify.prediction.linearised.pooling import POOLING

__all__ = ["BACKWARD", "PlainPooling"]


def _convolution(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> Any:
    """Return the gradient of the input alone, as a transposed convolution."""
    del bias_sizes
    if output_mask[1] or output_mask[2]:
        return NotImplemented
    dims = weight.ndim - 2
    steps, pads, gaps, extra = (
        tuple(value) * (dims // len(value)) for value in (stride, padding, dilation, output_padding)
    )
    operation = Convolution(steps, pads, gaps, transposed, extra, groups)
    return operation.input_by_transpose(grad, x, weight), None, None


def _transposed(grad: Tensor, inputs: Sequence[int], along: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Return the gradient of y = (W_1 x ... x W_d) x along the last d dimensions, W_1' x ... x W_d' of it.

    Args:
        grad: The gradient of y.
        inputs: The sides of x.
        along: From x (1, n, n), n unit vectors, and a dimension's index to y (1, n, m), which is W_i'.
    """
    for index, side in enumerate(inputs):
        unit = torch.eye(side, dtype=grad.dtype, device=grad.device)[None]
        dim = index - len(inputs)
        grad = (grad.movedim(dim, -1) @ along(unit, index)[0].mT).movedim(-1, dim)
    return grad


def _each(value: Sequence[int], dims: int) -> list[int]:
    return list(value) * (dims // len(value))


def _average(dims: int) -> Callable[..., Any]:
    def backward(
        grad: Tensor,
        x: Tensor,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        ceil_mode: bool,
        count_include_pad: bool,
        divisor: int | None,
    ) -> Any:
        """Return the gradient of average pooling, with any windows."""
        options = (kernel, stride, padding, ceil_mode, count_include_pad, divisor)
        shorter = (
            POOLING[torch.ops.aten.avg_pool2d_backward.default](grad, x, *options) if dims == 2 else NotImplemented
        )
        if shorter is not NotImplemented or divisor is not None:
            return shorter
        sizes, pads = _each(kernel, dims), _each(padding, dims)
        steps = _each(stride, dims) if stride else sizes

        def along(unit: Tensor, index: int) -> Tensor:
            return functional.avg_pool1d(unit, sizes[index], steps[index], pads[index], ceil_mode, count_include_pad)

        return _transposed(grad, x.shape[-dims:], along)

    return backward


def _adaptive(dims: int) -> Callable[..., Any]:
    def backward(grad: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of average pooling to a given size."""
        sizes = grad.shape[-dims:]
        return _transposed(
            grad, x.shape[-dims:], lambda unit, index: functional.adaptive_avg_pool1d(unit, sizes[index])
        )

    return backward


def _nearest(operation: Callable[..., Tensor]) -> Callable[..., Any]:
    def backward(
        grad: Tensor,
        output_size: Sequence[int],
        input_size: Sequence[int],
        *scales: float | None,
        **named: float | None,
    ) -> Tensor:
        """Return the gradient of the nearest neighbour's interpolation."""
        factors = [*scales, *named.values()] or [None] * len(output_size)
        return _transposed(
            grad, input_size[2:], lambda unit, index: operation(unit, [output_size[index]], factors[index])
        )

    return backward


def _picked(grad: Tensor, x: Tensor, *args: Any) -> Any:
    """Return the gradient of max pooling: each window's goes to where its largest entry is."""
    indices = args[-1]
    start = torch.zeros_like(x).flatten(2)
    return start.scatter_add(2, indices.flatten(2), grad.flatten(2)).reshape(x.shape)


class PlainPooling(TorchFunctionMode):
    """Average pooling to a given size sees inputs with their channels first in memory.

    With channels last torch gives the result other strides, by an operation whose gradient no other runtime has.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation."""
        if func in _POOLING_TO_SIZE and args and isinstance(args[0], Tensor):
            args = (args[0].contiguous(), *args[1:])
        return func(*args, **(kwargs or {}))


_POOLING_TO_SIZE = (
    *(functional.adaptive_avg_pool2d, functional.adaptive_avg_pool3d),  # which end there, unseen by a mode
    *(torch._C._nn.adaptive_avg_pool2d, torch._C._nn.adaptive_avg_pool3d),
)
_aten = torch.ops.aten
BACKWARD: dict[Any, Callable[..., Any]] = {
    **POOLING,
    _aten.convolution_backward.default: _convolution,
    _aten.avg_pool2d_backward.default: _average(2),
    _aten.avg_pool3d_backward.default: _average(3),
    _aten._adaptive_avg_pool2d_backward.default: _adaptive(2),
    _aten._adaptive_avg_pool3d_backward.default: _adaptive(3),
    _aten.adaptive_max_pool2d_backward.default: _picked,
    _aten.adaptive_max_pool3d_backward.default: _picked,
    _aten.max_pool3d_with_indices_backward.default: _picked,
    _aten.upsample_nearest2d_backward.default: _nearest(_aten.upsample_nearest1d.default),
    _aten._upsample_nearest_exact2d_backward.default: _nearest(_aten._upsample_nearest_exact1d.default),
}
