"""Operations with random tensors whose backward pass also adds up variances.

Each call knows three things: its output, the gradient of its input, and what its random tensors add to the ledger.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from bayesify.laws import NoiseTerms
from bayesify.laws.gaussian.operations import Convolution
from bayesify.laws.gaussian.site import Arrangement
from bayesify.prediction.kronecker import Rotated
from bayesify.prediction.linearised.accumulator import Factors, Ledger, Part
from bayesify.prediction.linearised.convolutions import transposed_input, weight_gradients

__all__ = ["AffineCall", "Call", "ConvolutionCall", "EmbeddingCall", "ExpandCall", "LinearCall", "NoiseCall", "run"]

CHUNK = 2**20  # numbers: the derivatives of a chunk of examples should stay in the cache


@dataclass(frozen=True)
class Random:
    """A random tensor in a call.

    `factors` are those of its variances, if a matrix has them. With `rotated` it is a weight and its bias together, and
    the variances are those of the independent numbers behind them.
    """

    variance: Tensor
    part: Part
    factors: Factors = None
    rotated: Rotated | None = None


class Call(ABC):
    """One operation in one place."""

    ledger: Ledger
    rows: Arrangement

    @abstractmethod
    def output(self, x: Tensor) -> Tensor:
        """Return the operation at the means."""

    @abstractmethod
    def of_input(self, grad: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of the input."""

    @abstractmethod
    def account(self, grad: Tensor, x: Tensor) -> None:
        """Add what the random tensors cause."""


def run(call: Call, x: Tensor) -> Tensor:
    """Run an operation so that its backward pass accounts for its random tensors."""
    result: Tensor = _Run.apply(x, call.ledger.anchor, call)  # type: ignore[no-untyped-call]
    return result


def _is_traced(x: Tensor) -> bool:
    """Return whether a pass is being traced for batches of every size."""
    return not isinstance(x.shape[0], int)


def _chunks(flow: Tensor, inputs: Tensor, numbers: int) -> list[tuple[Tensor, Tensor]]:
    """Return a few examples at a time, as many as have derivatives of a moderate size.

    A traced pass takes all at once: how many chunks there are would fix the size of a batch.
    """
    if _is_traced(flow):
        return [(flow, inputs)]
    size = max(1, CHUNK // numbers)
    return list(zip(torch.split(flow, size), torch.split(inputs, size), strict=True))


class _Run(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, call: Call) -> Tensor:
        del anchor
        ctx.call = call
        ctx.save_for_backward(x)
        return call.output(x).detach()  # no view, so that an activation may change it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:
        (x,) = ctx.saved_tensors
        ctx.call.account(grad, x)
        of_x = ctx.call.of_input(grad, x) if ctx.needs_input_grad[0] else None
        return of_x, grad.new_zeros(()), None


@dataclass
class LinearCall(Call):
    """y = x W' + b: dy/dW of example b is sum_t g_t x_t', over its positions t."""

    ledger: Ledger
    rows: Arrangement
    weight: Tensor
    bias: Tensor | None
    random_weight: Random | None
    random_bias: Random | None
    caused: Tensor | None = None
    turned: Tensor | None = None

    def output(self, x: Tensor) -> Tensor:
        """Return the product."""
        return functional.linear(x, self.weight, self.bias)

    def of_input(self, grad: Tensor, x: Tensor) -> Tensor:
        """Return g W."""
        del x
        return grad @ self.weight

    def account(self, grad: Tensor, x: Tensor) -> None:
        """Add sum_ij u_ij (sum_t g_ti x_tj)^2: with one position, sum_ij u_ij g_i^2 x_j^2.

        With u = r c' it is sum_tt' (g_t . r g_t') (x_t . c x_t'), which is cheaper for a few positions. Else the
        derivatives are formed, a few examples at a time. Correlated weights (W, b) = V_B E V_A' have V_B' g and
        V_A' (x, 1) in the places of g and x, and so the derivatives in E.
        """
        flow = self.rows.split(grad).flatten(1, -2)
        if self.random_bias is not None:
            self.ledger.add_gradient(self.random_bias.part, flow.sum(1), self.random_bias.variance)
        if self.random_weight is None:
            return
        inputs, part, variance = self.rows.split(x).flatten(1, -2), self.random_weight.part, self.random_weight.variance
        if self.random_weight.rotated is not None:
            flow, inputs = flow @ self.random_weight.rotated.left[0], self._turned(inputs)
        if not self.ledger.once(part):
            self.ledger.add_gradient(part, flow.mT @ inputs, variance)
        elif flow.shape[1] == 1:
            if self.caused is None:  # the same for every backward pass
                self.caused = self._caused(inputs[:, 0].square())
            self.ledger.add((flow[:, 0].square() * self.caused).sum(-1))
        elif self.random_weight.factors is not None and flow.shape[1] * sum(variance.shape) < variance.numel():
            row, column = self.random_weight.factors
            if self.caused is None:
                self.caused = (inputs * column) @ inputs.mT
            self.ledger.add(((flow * row) @ flow.mT).mul_(self.caused).sum((1, 2)))
        else:
            weights = variance.reshape(-1)
            pieces = [(f.mT @ i).square_().flatten(1) @ weights for f, i in _chunks(flow, inputs, variance.numel())]
            self.ledger.add(torch.cat(pieces))

    def _turned(self, inputs: Tensor) -> Tensor:
        assert self.random_weight is not None
        rotated = self.random_weight.rotated
        assert rotated is not None
        if self.turned is None:  # the same for every backward pass
            self.turned = functional.linear(inputs, rotated.kernel(self.weight.shape), rotated.offset)
        return self.turned

    def _caused(self, squares: Tensor) -> Tensor:
        assert self.random_weight is not None
        if self.random_weight.factors is None:
            return squares @ self.random_weight.variance.mT
        row, column = self.random_weight.factors
        return (squares @ column)[:, None] * row


@dataclass
class ConvolutionCall(Call):
    """A convolution; its derivative for each example is that of one with as many groups as there are examples."""

    ledger: Ledger
    rows: Arrangement
    operation: Convolution
    weight: Tensor
    bias: Tensor | None
    random_weight: Random | None
    random_bias: Random | None

    def output(self, x: Tensor) -> Tensor:
        """Return the convolution."""
        o = self.operation
        return torch.convolution(
            x, self.weight, self.bias, o.stride, o.padding, o.dilation, o.transposed, o.output_padding, o.groups
        )

    def of_input(self, grad: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of the input."""
        o = self.operation
        if _is_traced(grad) and not o.transposed:
            return transposed_input(grad, x, self.weight, o)
        of_x: Tensor = torch.ops.aten.convolution_backward(
            grad, x, self.weight, None, o.stride, o.padding, o.dilation, o.transposed, o.output_padding, o.groups,
            [True, False, False],
        )[0]  # fmt: skip
        return of_x

    def account(self, grad: Tensor, x: Tensor) -> None:
        """Form the derivatives for a few examples at a time."""
        flow = self.rows.split(grad)
        if self.random_bias is not None:
            sums = flow.flatten(3).sum((1, 3))
            self.ledger.add_gradient(self.random_bias.part, sums, self.random_bias.variance)
        if self.random_weight is None:
            return
        inputs, part, variance = self.rows.split(x), self.random_weight.part, self.random_weight.variance
        weights = variance.reshape(-1)
        pieces = []
        for f, i in _chunks(flow, inputs, self.weight.numel()):
            if _is_traced(f) and not self.operation.transposed:
                gradient = weight_gradients(f, i, self.weight.shape, self.operation)
            else:
                like = self.weight.expand(f.shape[0], *self.weight.shape)
                gradient = self.operation.each_backward(f, i, like, need_x=False)[1]
            if self.random_weight.rotated is not None:
                gradient = self.random_weight.rotated.turned(gradient, f.flatten(3).sum((1, 3)))
            gradient = gradient.flatten(1)
            pieces.append(gradient.square_() @ weights if self.ledger.once(part) else gradient)
        found = torch.cat(pieces)
        if self.ledger.once(part):
            self.ledger.add(found)
        else:
            self.ledger.add_gradient(part, found.view(-1, *variance.shape), variance)


@dataclass
class AffineCall(Call):
    """y = a (x - m) r + c along some dimensions, as the end of a normalisation: dy/da is sum_t g_t (x_t - m) r.

    `dims` are the dimensions that a and c vary along, of an input with the batch first; m and r are numbers per channel
    of batch normalisation, and None where x is normalised already.
    """

    ledger: Ledger
    rows: Arrangement
    dims: tuple[int, ...]
    scale: Tensor | None
    shift: Tensor | None
    centre: Tensor | None
    factor: Tensor | None
    random_scale: Random | None
    random_shift: Random | None

    def _aligned(self, tensor: Tensor, x: Tensor) -> Tensor:
        return tensor.reshape(-1, *(1,) * (x.ndim - 2)) if self.dims == (1,) else tensor

    def _slope(self, x: Tensor) -> Tensor | None:
        slope = self.scale
        if self.factor is not None:
            slope = self.factor if slope is None else slope * self.factor
        return None if slope is None else self._aligned(slope, x)

    def output(self, x: Tensor) -> Tensor:
        """Return the affine map."""
        slope = self._slope(x)
        offset = self.shift
        if self.centre is not None and self.factor is not None:
            moved = -self.centre * (self.factor if self.scale is None else self.scale * self.factor)
            offset = moved if offset is None else offset + moved
        y = x if slope is None else x * slope
        return y if offset is None else y + self._aligned(offset, x)

    def of_input(self, grad: Tensor, x: Tensor) -> Tensor:
        """Return the gradient times the slope."""
        slope = self._slope(x)
        return grad if slope is None else grad * slope

    def account(self, grad: Tensor, x: Tensor) -> None:
        """Sum over positions, then square."""
        sums = self._summed(grad)
        if self.random_shift is not None:
            self.ledger.add_gradient(self.random_shift.part, sums, self.random_shift.variance)
        if self.random_scale is not None:
            products = self._summed(grad, x)
            if self.centre is not None and self.factor is not None:
                products = (products - self.centre * sums) * self.factor
            self.ledger.add_gradient(self.random_scale.part, products, self.random_scale.variance)

    def _summed(self, grad: Tensor, x: Tensor | None = None) -> Tensor:
        flow = self.rows.split(grad)
        if self.dims == (1,):  # (B, r, C, ...)
            flat = flow.flatten(3) if flow.ndim > 3 else flow[..., None]
            if x is None:
                return flat.sum((1, 3))
            inputs = self.rows.split(x).reshape(flat.shape)
            return (flat * inputs).sum((1, 3))
        features = len(self.dims)
        flat = flow.flatten(1, -1 - features)
        if x is None:
            return flat.sum(1)
        return (flat * self.rows.split(x).flatten(1, -1 - features)).sum(1)


@dataclass
class EmbeddingCall(Call):
    """Rows of a table: what several positions of an example read from one row adds up before it is squared."""

    ledger: Ledger
    rows: Arrangement
    table: Tensor
    random: Random

    def output(self, x: Tensor) -> Tensor:
        """Return the rows."""
        return functional.embedding(x, self.table)

    def of_input(self, grad: Tensor, x: Tensor) -> Tensor:
        """Numbers of rows have no gradient."""
        raise NotImplementedError

    def account(self, grad: Tensor, x: Tensor) -> None:
        """Return sum_k s_k^2 (sum_{t: id_t = k} g_t)^2 as sum_t s^2 g_t sum_{t': id_t' = id_t} g_t'."""
        ids = self.rows.split(x).flatten(1)
        flow = self.rows.split(grad).reshape(*ids.shape, -1)
        if self.ledger.once(self.random.part):
            same = (ids[:, :, None] == ids[:, None, :]).to(flow.dtype)
            self.ledger.add((flow * (same @ flow) * self.random.variance[ids]).sum((1, 2)))
            return
        gradient = flow.new_zeros(ids.shape[0], *self.table.shape)
        gradient.scatter_add_(1, ids[..., None].expand_as(flow), flow)
        self.ledger.add_gradient(self.random.part, gradient, self.random.variance)


@dataclass
class ExpandCall(Call):
    """A tensor repeated for each example, (B, *w), from which on autograd does the rest."""

    ledger: Ledger
    value: Tensor
    random: Random

    def output(self, x: Tensor) -> Tensor:
        """Return a copy for each example."""
        del x
        return self.value.expand(self.ledger.rows, *self.value.shape).clone()

    def of_input(self, grad: Tensor, x: Tensor) -> Tensor:
        """There is no input."""
        raise NotImplementedError

    def account(self, grad: Tensor, x: Tensor) -> None:
        """The gradient of each copy is the derivative of its example."""
        del x
        self.ledger.add_gradient(self.random.part, grad, self.random.variance)


@dataclass
class NoiseCall(Call):
    """A noisy layer, y = a x + (d x + s) e: dy/de is g (d x + s), summed where e is shared."""

    ledger: Ledger
    rows: Arrangement
    terms: NoiseTerms

    def output(self, x: Tensor) -> Tensor:
        """Return the mean."""
        return self.terms.scale * x

    def of_input(self, grad: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of the mean."""
        del x
        return self.terms.scale * grad

    def account(self, grad: Tensor, x: Tensor) -> None:
        """Sum over what shares a number, then square."""
        moved = grad * (self.terms.std_scale * x + self.terms.std_shift)
        dims = self.terms.channel_dims
        if dims is not None:
            assert self.rows.dim is not None
            kept = {dim % x.ndim for dim in dims}
            order = [self.rows.dim, *(dim for dim in range(x.ndim) if dim != self.rows.dim)]
            # (B, r, rest): r belongs to no channel, and the rest are the other dimensions in their order.
            gone = [position + 1 for position, dim in enumerate(order) if position and dim not in kept]
            moved = self.rows.split(moved).sum((1, *gone))
        else:
            moved = self.rows.split(moved)
        self.ledger.add(moved.flatten(1).square().sum(1))
