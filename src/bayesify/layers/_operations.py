"""Products with a weight: with one weight for a whole batch, and with one for each example.

Activations are in one arrangement here: (B, T, D) for linear maps, with T positions or tokens for each example, and
(B, r, C, ...) for convolutions, with r maps for each example.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["Convolution", "LinearMap", "Operation", "is_traced"]

Gradients = tuple[Tensor | None, Tensor]
FEW_CHANNELS = 4  # of an input, up to which copies for each entry of a kernel and a product beat a grouped convolution


def is_traced(x: Tensor) -> bool:
    """Return whether a pass is being traced for batches of every size."""
    return not isinstance(x.shape[0], int)


class Operation(ABC):
    """A function that is linear in its input and in its weight."""

    @abstractmethod
    def shared(self, x: Tensor, weight: Tensor) -> Tensor:
        """Apply one weight to all examples."""

    @abstractmethod
    def shared_backward(self, grad: Tensor, x: Tensor, weight: Tensor, *, need_x: bool) -> Gradients:
        """Return the gradients of the input and of the one weight."""

    def arranged(self, x: Tensor) -> Tensor:
        """Return an activation as it should lie in memory for several products with one weight."""
        return x

    @abstractmethod
    def each(self, x: Tensor, weights: Tensor) -> Tensor:
        """Apply to each example its own weight, (B, *weight)."""

    @abstractmethod
    def each_backward(self, grad: Tensor, x: Tensor, weights: Tensor, *, need_x: bool) -> Gradients:
        """Return the gradients of the input and of each example's weight."""

    @abstractmethod
    def sign_shapes(self, x: Tensor, weight: Tensor) -> tuple[list[int], list[int]]:
        """Return the shapes of one sign per example and input channel, and per output channel."""

    @abstractmethod
    def weight_signs(self, of_inputs: Tensor, of_outputs: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the signs as they meet in each example's weight, (B, G, A, 1) and (B, G, 1, R), |W| = G A R."""


@dataclass(frozen=True)
class LinearMap(Operation):
    """y = x W', with W (O, D)."""

    def shared(self, x: Tensor, weight: Tensor) -> Tensor:
        """Apply one weight to all examples."""
        return x @ weight.T

    def shared_backward(self, grad: Tensor, x: Tensor, weight: Tensor, *, need_x: bool) -> Gradients:
        """Return the gradients of the input and of the one weight."""
        return (grad @ weight if need_x else None), grad.flatten(0, 1).T @ x.flatten(0, 1)

    def each(self, x: Tensor, weights: Tensor) -> Tensor:
        """Apply to each example its own weight."""
        return x @ weights.mT

    def each_backward(self, grad: Tensor, x: Tensor, weights: Tensor, *, need_x: bool) -> Gradients:
        """Return the gradients of the input and of each example's weight."""
        return (grad @ weights if need_x else None), self.each_gradient(grad, x)

    def each_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of each example's weight, sum_t g_t x_t'."""
        return grad.mT @ x

    def sign_shapes(self, x: Tensor, weight: Tensor) -> tuple[list[int], list[int]]:
        """Return the shapes of the signs of inputs and outputs."""
        return [x.shape[0], 1, weight.shape[1]], [x.shape[0], 1, weight.shape[0]]

    def weight_signs(self, of_inputs: Tensor, of_outputs: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the signs of outputs and of inputs."""
        del weight
        return of_outputs.mT[:, None], of_inputs[:, None]


@dataclass(frozen=True)
class Convolution(Operation):
    """A convolution in any number of dimensions, or its transpose; each example's own weight is a group of its own."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    def _run(self, x: Tensor, weight: Tensor, groups: int) -> Tensor:
        return torch.convolution(
            x, weight, None, self.stride, self.padding, self.dilation, self.transposed, self.output_padding, groups
        )

    def _backward(self, grad: Tensor, x: Tensor, weight: Tensor, groups: int, need_x: bool) -> Gradients:
        of_x, of_weight, _ = torch.ops.aten.convolution_backward(
            grad, x, weight, None, self.stride, self.padding, self.dilation, self.transposed, self.output_padding,
            groups, [need_x, True, False],
        )  # fmt: skip
        return of_x, of_weight

    def arranged(self, x: Tensor) -> Tensor:
        """Return images with their channels last, where a CPU's convolutions would copy them in each call."""
        if x.ndim != 5 or x.device.type != "cpu":
            return x
        return x.flatten(0, 1).contiguous(memory_format=torch.channels_last).view(x.shape)

    def shared(self, x: Tensor, weight: Tensor) -> Tensor:
        """Apply one weight to all examples."""
        y = self._run(x.flatten(0, 1), weight, self.groups)
        return y.view(*x.shape[:2], *y.shape[1:])

    def shared_backward(self, grad: Tensor, x: Tensor, weight: Tensor, *, need_x: bool) -> Gradients:
        """Return the gradients of the input and of the one weight."""
        of_x, of_weight = self._backward(grad.flatten(0, 1), x.flatten(0, 1), weight, self.groups, need_x)
        return (of_x.view_as(x) if of_x is not None else None), of_weight

    def each(self, x: Tensor, weights: Tensor) -> Tensor:
        """Apply to each example its own weight: one convolution with B times the groups."""
        return _apart(self._run(_together(x), weights.flatten(0, 1), x.shape[0] * self.groups), x.shape[0])

    def each_backward(self, grad: Tensor, x: Tensor, weights: Tensor, *, need_x: bool) -> Gradients:
        """Return the gradients of the input and of each example's weight."""
        groups = x.shape[0] * self.groups
        of_x, of_weights = self._backward(_together(grad), _together(x), weights.flatten(0, 1), groups, need_x)
        return (_apart(of_x, x.shape[0]) if of_x is not None else None), of_weights.view_as(weights)

    # -- the gradient of the input alone, and of each example's weight alone ------------------------------------------

    def input_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of an input (N, C, ...) to which one weight was applied."""
        if is_traced(grad):
            return self.input_by_transpose(grad, x, weight)
        of_x: Tensor = torch.ops.aten.convolution_backward(
            grad, x, weight, None, self.stride, self.padding, self.dilation, self.transposed, self.output_padding,
            self.groups, [True, False, False],
        )[0]  # fmt: skip
        return of_x

    def each_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of each example's weight, (B, *weight)."""
        if is_traced(grad):  # the transpose maps outputs to inputs, so that these change places
            return self.each_by_patches(*((x, grad) if self.transposed else (grad, x)), weight.shape)
        if self._narrow(x, weight):
            return self.each_by_copies(grad, x, weight.shape)
        # Only the shape of the weights matters to their gradient.
        return self.each_backward(grad, x, weight.new_empty(x.shape[0], *weight.shape), need_x=False)[1]

    def _narrow(self, x: Tensor, weight: Tensor) -> bool:
        """Return whether what a kernel meets is so small that a product with it is faster than a convolution."""
        if self.transposed or x.shape[1] != 1:
            return False
        whole = set(weight.shape[2:]) | set(self.stride) == {1} and not any(self.padding)
        return whole or weight.shape[1] <= FEW_CHANNELS

    def each_by_copies(self, grad: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        """Return each example's gradient of the weight from copies of what each offset of the kernel meets.

        For one map for each example, (B, 1, C, ...), and a convolution that is not transposed.
        """
        met, rows = self.copies(x, shape, grad.shape[3:]), x.shape[0]
        flow = grad[:, 0].reshape(rows, self.groups, shape[0] // self.groups, -1)
        return (met @ flow.mT).mT.reshape(rows, *shape)

    def copies(self, x: Tensor, shape: torch.Size, sizes: torch.Size) -> Tensor:
        """Return what each offset of a kernel meets in (B, 1, C, ...): (B, groups, C kernel, T), T of the output."""
        pads = [size for pad in reversed(self.padding) for size in (pad, pad)]
        wide = (functional.pad(x[:, 0], pads) if any(pads) else x[:, 0]).contiguous()
        steps = wide.stride()[2:]
        strides = (
            *wide.stride()[:2],
            *(step * self.dilation[i] for i, step in enumerate(steps)),
            *(step * self.stride[i] for i, step in enumerate(steps)),
        )
        met = wide.as_strided((*wide.shape[:2], *shape[2:], *sizes), strides)
        return met.reshape(x.shape[0], self.groups, math.prod(shape[1:]), -1)

    # torch's own backward operation is not in ONNX, and a group for each example would fix the size of a batch there: a
    # pass that is traced has operations that every runtime has.

    def input_by_transpose(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the input as a transposed convolution; `x` says how large it is.

        That of a transposed convolution is a plain one.
        """
        if self.transposed:
            none = [0] * len(self.stride)
            return torch.convolution(
                grad, weight, None, self.stride, self.padding, self.dilation, False, none, self.groups
            )
        extra = [
            x.shape[2 + i]
            - ((grad.shape[2 + i] - 1) * self.stride[i] - 2 * self.padding[i] + self.dilation[i] * (size - 1) + 1)
            for i, size in enumerate(weight.shape[2:])
        ]
        return torch.convolution(grad, weight, None, self.stride, self.padding, self.dilation, True, extra, self.groups)

    def each_by_patches(self, grad: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        """Return each example's gradient of the weight: each offset of the kernel meets a part of the padded input."""
        rows, entries = grad.shape[0], shape[1] * math.prod(shape[2:])
        if len(shape) == 4:  # one operation in the program instead of one for each offset
            met = functional.unfold(x.flatten(0, 1), tuple(shape[2:]), self.dilation, self.padding, self.stride)
            met = met.reshape(rows, -1, *met.shape[1:])  # (B, r, C kernel, T)
        else:
            met = self._offsets(grad, x, shape).flatten(2, 3)
        columns = met.transpose(1, 2).reshape(rows, self.groups, entries, -1)
        moved = grad.flatten(3).transpose(1, 2).reshape(rows, self.groups, shape[0] // self.groups, -1)
        return (moved @ columns.mT).reshape(rows, *shape)

    def _offsets(self, grad: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        """Return what each offset of the kernel meets, (B, r, C, kernel, T)."""
        pads = [size for pad in reversed(self.padding) for size in (pad, pad)]
        wide = functional.pad(x, pads) if any(pads) else x
        sizes = grad.shape[3:]
        parts = []
        for offsets in product(*(range(size) for size in shape[2:])):
            part = wide
            for i, offset in enumerate(offsets):
                first = offset * self.dilation[i]
                along = slice(first, first + (sizes[i] - 1) * self.stride[i] + 1, self.stride[i])
                part = part[(slice(None),) * (3 + i) + (along,)]
            parts.append(part)
        return torch.stack(parts, 3).flatten(4)

    def sign_shapes(self, x: Tensor, weight: Tensor) -> tuple[list[int], list[int]]:
        """Return the shapes of the signs of inputs and outputs."""
        outputs = weight.shape[1] * self.groups if self.transposed else weight.shape[0]
        ones = [1] * (x.ndim - 3)
        return [x.shape[0], 1, x.shape[2], *ones], [x.shape[0], 1, outputs, *ones]

    def weight_signs(self, of_inputs: Tensor, of_outputs: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the signs of a weight's first dimension, and of all others, where a kernel's entries share one."""
        first, second = (of_inputs, of_outputs) if self.transposed else (of_outputs, of_inputs)
        rows, entries = first.shape[0], math.prod(weight.shape[2:])
        rest = second.reshape(rows, self.groups, 1, -1).repeat_interleave(entries, -1)
        return first.reshape(rows, self.groups, -1, 1), rest


def _together(x: Tensor) -> Tensor:
    """Turn (B, r, C, ...) into (r, B C, ...): examples become groups of channels."""
    return x.transpose(0, 1).flatten(1, 2)


def _apart(y: Tensor, rows: int) -> Tensor:
    return y.reshape(y.shape[0], rows, -1, *y.shape[2:]).transpose(0, 1)
