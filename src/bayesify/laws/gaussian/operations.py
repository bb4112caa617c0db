"""Products with a weight: with one weight for a whole batch, and with one for each example.

Activations are in one arrangement here: (B, T, D) for linear maps, with T positions or tokens for each example, and
(B, r, C, ...) for convolutions, with r maps for each example.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Convolution", "LinearMap", "Operation"]

Gradients = tuple[Tensor | None, Tensor]


class Operation(ABC):
    """A function that is linear in its input and in its weight."""

    @abstractmethod
    def shared(self, x: Tensor, weight: Tensor) -> Tensor:
        """Apply one weight to all examples."""

    @abstractmethod
    def shared_backward(self, grad: Tensor, x: Tensor, weight: Tensor, *, need_x: bool) -> Gradients:
        """Return the gradients of the input and of the one weight."""

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
        return (grad @ weights if need_x else None), grad.mT @ x

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
