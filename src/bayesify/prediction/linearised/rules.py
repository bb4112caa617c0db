"""Operations with random tensors whose backward pass also adds up variances.

Each call knows three things: its output, the gradient of its input, and what its random tensors add to the ledger.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from bayesify.laws import NoiseTerms
from bayesify.laws.gaussian.site import Arrangement
from bayesify.laws.kronecker import Rotated
from bayesify.layers import (
    AffineGradients,
    EmbeddingGradients,
    ExampleGradients,
    Factors,
    LinearGradients,
    is_traced,
)
from bayesify.prediction.linearised.accumulator import Ledger, Part
from bayesify.prediction.linearised.sketch import Sketch

__all__ = ["AffineCall", "Call", "EmbeddingCall", "ExpandCall", "LayerCall", "LinearCall", "NoiseCall", "Random", "run"]


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

    # -- of several functions of the outputs, the first dimension of their gradients --

    def of_inputs(self, grads: Tensor, x: Tensor) -> Tensor:
        """Return the gradients of the input."""
        return self.of_input(grads, x)

    def account_all(self, grads: Tensor, x: Tensor) -> None:
        """Add what the random tensors cause in each function."""
        for turn in self.ledger.turns():
            self.account(grads[turn], x)


def run(call: Call, x: Tensor) -> Tensor:
    """Run an operation so that its backward pass accounts for its random tensors."""
    result: Tensor = _Run.apply(x, call.ledger.anchor, call)  # type: ignore[no-untyped-call]
    return result


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
        call, needed = ctx.call, ctx.needs_input_grad[0]
        if call.ledger.number > 1:
            of_x = _Several.apply(grad, x, call, needed)  # type: ignore[no-untyped-call]
        else:
            call.account(grad, x)
            of_x = call.of_input(grad, x) if needed else None
        return of_x, grad.new_zeros(()), None


class _Several(Function):
    """The backward pass of a call for several functions of the outputs, which `torch.vmap` hides but here."""

    @staticmethod
    def forward(grad: Tensor, x: Tensor, call: Call, needed: bool) -> Tensor | None:
        raise NotImplementedError("This backward pass is for several functions of the outputs at a time.")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del ctx, inputs, output

    @staticmethod
    def vmap(info: Any, in_dims: Any, grad: Tensor, x: Tensor, call: Call, needed: bool) -> tuple[Tensor | None, Any]:
        dim = in_dims[0]
        grads = grad.expand(info.batch_size, *grad.shape) if dim is None else grad.movedim(dim, 0)
        call.account_all(grads, x)
        return (call.of_inputs(grads, x), 0) if needed else (None, None)


class LayerCall(Call):
    """An operation with a weight and a bias, which may be random."""

    random_weight: Random | None
    random_bias: Random | None

    @abstractmethod
    def gradients(self, x: Tensor, grad: Tensor) -> ExampleGradients:
        """Return the derivatives of each example, from the input and the output's gradient as (B, r, ...)."""

    def account(self, grad: Tensor, x: Tensor) -> None:
        """Add what the weight and the bias cause."""
        if self.random_weight is None and self.random_bias is None:
            return
        found = self.gradients(self.rows.split(x), self.rows.split(grad))
        if self.random_bias is not None:
            self.ledger.add_gradient(self.random_bias.part, found.bias, self.random_bias.variance)
        if self.random_weight is not None:
            part, variance = self.random_weight.part, self.random_weight.variance
            if not self.ledger.once(part):
                self.ledger.add_gradient(part, found.weight(), variance)
            elif (columns := self.ledger.columns_of(part)) is not None:
                squares, products = found.projected(variance, columns)
                self.ledger.add(squares)
                self.ledger.add_along(products)
            else:
                self.ledger.add(self.squares(found, self.random_weight))

    def squares(self, found: ExampleGradients, random: Random) -> Tensor:
        """Return the weighted squares of the weight's derivatives, (B,)."""
        return found.weighted_squares(random.variance)


@dataclass
class LinearCall(LayerCall):
    """y = x W' + b."""

    ledger: Ledger
    rows: Arrangement
    weight: Tensor
    bias: Tensor | None
    random_weight: Random | None
    random_bias: Random | None
    kept: dict[str, Tensor] = field(default_factory=dict)
    turned: Tensor | None = None

    def output(self, x: Tensor) -> Tensor:
        """Return the product."""
        return functional.linear(x, self.weight, self.bias)

    def of_input(self, grad: Tensor, x: Tensor) -> Tensor:
        """Return g W."""
        del x
        return grad @ self.weight

    def gradients(self, x: Tensor, grad: Tensor) -> ExampleGradients:
        """Return sum_t g_t x_t'.

        Correlated weights (W, b) = V_B E V_A' have V_B' g and V_A' (x, 1) in the places of g and x, and so the
        derivatives in E.
        """
        inputs, flow = x.flatten(1, -2), grad.flatten(1, -2)
        random = self.random_weight
        if random is None or random.rotated is None:
            return LinearGradients(inputs, flow, None if random is None else random.factors, self.kept)
        if self.turned is None:  # the same for every backward pass
            self.turned = functional.linear(inputs, random.rotated.kernel(self.weight.shape), random.rotated.offset)
        return LinearGradients(self.turned, flow @ random.rotated.left[0], random.factors, self.kept)

    def squares(self, found: ExampleGradients, random: Random) -> Tensor:
        """Return the weighted squares, from a few mixtures of features where that is asked for."""
        positions, features = found.x.shape[1:]
        if random.rotated is not None or not Sketch.pays(features, positions, self.ledger.signs):
            return super().squares(found, random)
        return self.ledger.sketch_of(random.part, random.variance, None).squares(found, self.kept)


@dataclass
class AffineCall(LayerCall):
    """y = a (x - m) r + c along some dimensions, as the end of a normalisation.

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
    random_weight: Random | None
    random_bias: Random | None

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
        if slope is None or offset is None:
            y = x if slope is None else x * slope
            return y if offset is None else y + self._aligned(offset, x)
        if self.dims == (1,) and not is_traced(x):  # normalisation's own kernel is faster than broadcasting
            flat = slope.reshape(-1)
            return functional.batch_norm(x, torch.zeros_like(flat), torch.ones_like(flat), flat, offset, eps=0.0)
        return torch.addcmul(self._aligned(offset, x), x, slope)

    def of_input(self, grad: Tensor, x: Tensor) -> Tensor:
        """Return the gradient times the slope."""
        slope = self._slope(x)
        return grad if slope is None else grad * slope

    def account_all(self, grads: Tensor, x: Tensor) -> None:
        """Add what scale and shift cause in each function; channels of maps are summed up for all of them at once."""
        if self.dims != (1,) or self.rows.dim != 0 or self.rows.rows != len(x) or x.ndim < 3:
            super().account_all(grads, x)
            return
        sums, found = grads.flatten(3).sum(3), self.gradients(x[:, None], grads[0, :, None])
        if self.random_bias is not None:
            self.ledger.add_gradients(self.random_bias.part, sums, self.random_bias.variance)
        if self.random_weight is not None:
            products = found.centred((grads * x).flatten(3).sum(3), sums)
            self.ledger.add_gradients(self.random_weight.part, products, self.random_weight.variance)

    def gradients(self, x: Tensor, grad: Tensor) -> AffineGradients:
        """Return sum_t g_t (x_t - m) r."""
        return AffineGradients(x, grad, 0 if self.dims == (1,) else len(self.dims), self.centre, self.factor)


@dataclass
class EmbeddingCall(LayerCall):
    """Rows of a table."""

    ledger: Ledger
    rows: Arrangement
    table: Tensor
    random_weight: Random
    random_bias: None = None

    def output(self, x: Tensor) -> Tensor:
        """Return the rows."""
        return functional.embedding(x, self.table)

    def of_input(self, grad: Tensor, x: Tensor) -> Tensor:
        """Numbers of rows have no gradient."""
        raise NotImplementedError

    def gradients(self, x: Tensor, grad: Tensor) -> ExampleGradients:
        """Return what each row of the table got."""
        ids = x.flatten(1)
        return EmbeddingGradients(ids, grad.reshape(*ids.shape, -1), len(self.table))


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
