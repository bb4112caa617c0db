"""The gradient of each example in a layer's parameters, from the layer's input and its output's gradient.

Two sums of its squares are wanted: over examples, which is the diagonal of a curvature, and over parameters with their
variances, which is what they cause in an example's output. Both are found here, without forming the gradients where
there is a shorter way, and else for a few examples at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bayesify.layers._operations import Convolution, LinearMap, is_traced
from bayesify.layers._types import Family, layer_type

__all__ = [
    "AffineGradients",
    "ConvolutionGradients",
    "EmbeddingGradients",
    "ExampleGradients",
    "Factors",
    "LinearGradients",
    "example_gradients",
    "normalised",
    "padded",
]

CHUNK = 2**20  # numbers: the gradients of a chunk of examples should stay in the cache
Factors = tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class ExampleGradients(ABC):
    """The gradients G_b of each example b in the weight and the bias of one call.

    Attributes:
        x: What the weight meets, (B, r, ...), r entries of the batch's dimension for each example.
        grad: The gradient of the output, in the same arrangement.
    """

    x: Tensor
    grad: Tensor

    @property
    @abstractmethod
    def numbers(self) -> int:
        """Return how many numbers an example's gradient in the weight has."""

    @abstractmethod
    def weight(self) -> Tensor:
        """Return G_b of the weight, (B, *weight)."""

    @cached_property
    def bias(self) -> Tensor:
        """Return G_b of the bias, (B, *bias)."""
        raise NotImplementedError("There is no bias.")

    def weighted_squares(self, variance: Tensor) -> Tensor:
        """Return sum_p v_p G_bp^2 over the weight's entries, (B,)."""
        weights = variance.reshape(-1)
        return torch.cat([part.weight().square_().flatten(1) @ weights for part in self._parts()])

    def projected(self, variance: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Return sum_p v_p G_bp^2, (B,), and the products of G_b with columns (K, *weight), (B, K)."""
        weights, directions, squares, products = variance.reshape(-1), columns.flatten(1), [], []
        for part in self._parts():
            gradient = part.weight().flatten(1)
            products.append(gradient @ directions.mT)
            squares.append(gradient.square_() @ weights)
        return torch.cat(squares), torch.cat(products)

    def summed_squares(self, *others: ExampleGradients) -> Tensor:
        """Return sum_b G_b^2, (*weight), where G_b is the sum of this call's and the others'."""
        total: Tensor | None = None
        for part, *rest in zip(self._parts(), *(other._parts() for other in others), strict=True):
            gradient = part.weight()
            for other in rest:
                gradient = gradient.add_(other.weight())
            squares = gradient.square_().sum(0)
            total = squares if total is None else total.add_(squares)
        assert total is not None
        return total

    def summed_bias_squares(self, *others: ExampleGradients) -> Tensor:
        """Return the same of the bias."""
        return sum((other.bias for other in others), self.bias).square().sum(0)

    def _parts(self) -> list[ExampleGradients]:
        """Return some examples at a time; a traced pass takes all, since their number would fix the batch's size."""
        size = max(1, CHUNK // max(1, self.numbers))
        if is_traced(self.grad) or len(self.grad) <= size:
            return [self]
        pairs = zip(torch.split(self.x, size), torch.split(self.grad, size), strict=True)
        return [replace(self, x=x, grad=grad) for x, grad in pairs]


@dataclass(frozen=True)
class LinearGradients(ExampleGradients):
    """y = x W' + b: G_b = sum_t g_t x_t' over the positions t of (B, T, D) and (B, T, O).

    Attributes:
        factors: r and c, if the variances that are asked for are r c'.
        kept: What depends on the input and the variances alone: the same dictionary for every gradient of one call.
    """

    factors: Factors = None
    kept: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def numbers(self) -> int:
        """Return O D."""
        return self.grad.shape[-1] * self.x.shape[-1]

    def weight(self) -> Tensor:
        """Return sum_t g_t x_t'."""
        return LinearMap().each_gradient(self.grad, self.x)

    @cached_property
    def bias(self) -> Tensor:
        """Return sum_t g_t."""
        return self.grad.sum(1)

    def weighted_squares(self, variance: Tensor) -> Tensor:
        """Return sum_ij v_ij (sum_t g_ti x_tj)^2: with one position, sum_ij v_ij g_i^2 x_j^2.

        With v = r c' it is sum_tt' (g_t . r g_t') (x_t . c x_t'), which is cheaper for a few positions.
        """
        positions = self.grad.shape[1]
        if positions == 1:
            caused = self._once("caused", lambda: self._caused(self.x[:, 0].square(), variance))
            return (self._squares * caused).sum(-1)
        if self.factors is not None and positions * sum(variance.shape) < variance.numel():
            row, column = self.factors
            met = self._once("met", lambda: (self.x * column) @ self.x.mT)
            return ((self.grad * row) @ self.grad.mT).mul_(met).sum((1, 2))
        return super().weighted_squares(variance)

    def summed_squares(self, *others: ExampleGradients) -> Tensor:
        """Return sum_b G_b^2: the squares of an outer product are the outer product of the squares."""
        if others or self.grad.shape[1] != 1:
            return super().summed_squares(*others)
        return self._squares.T @ self.x[:, 0].square()

    def summed_bias_squares(self, *others: ExampleGradients) -> Tensor:
        """Return the same of the bias."""
        if others or self.grad.shape[1] != 1:
            return super().summed_bias_squares(*others)
        return self._squares.sum(0)

    @cached_property
    def _squares(self) -> Tensor:
        return self.grad[:, 0].square()

    def _once(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]

    def _caused(self, squares: Tensor, variance: Tensor) -> Tensor:
        if self.factors is None:
            return squares @ variance.mT
        row, column = self.factors
        return (squares @ column)[:, None] * row


@dataclass(frozen=True)
class ConvolutionGradients(ExampleGradients):
    """A convolution, of (B, r, C, ...): G_b is the gradient of one with as many groups as there are examples.

    Attributes:
        operation: The convolution.
        kernel: Its weight.
        turn: What the gradients of weight and bias become, where the variances are those of other numbers.
    """

    operation: Convolution
    kernel: Tensor
    turn: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def numbers(self) -> int:
        """Return the size of the kernel."""
        return self.kernel.numel()

    def weight(self) -> Tensor:
        """Convolve each example's input with its gradient."""
        found = self.operation.each_gradient(self.grad, self.x, self.kernel)
        return found if self.turn is None else self.turn(found, self.bias)

    @cached_property
    def bias(self) -> Tensor:
        """Sum over positions."""
        return _summed(self.grad, 0)

    def all_weighted_squares(self, grads: Tensor, variance: Tensor) -> Tensor:
        """Return sum_p v_p G_nbp^2, (N, B), for several gradients (N, B, 1, O, ...) of the output.

        The input is copied for all of them at once, and each example has one product (N O, T) (T, C kernel). For one
        map for each example, and a convolution that is neither transposed nor turned.
        """
        groups, shape, sizes = self.operation.groups, self.kernel.shape, grads.shape[4:]
        number, weights, found = len(grads), variance.reshape(groups, -1), []
        step = max(1, CHUNK // max(number * shape.numel(), sizes.numel() * (number * shape[0] + shape[1:].numel())))
        for x, flow in zip(torch.split(self.x, step), torch.split(grads, step, 1), strict=True):
            met = self.operation.copies(x, shape, sizes)
            rows = flow.transpose(0, 1).reshape(len(x), number, groups, -1, sizes.numel()).transpose(1, 2)
            gradients = rows.flatten(2, 3) @ met.mT
            squares = gradients.square_().view(len(x), groups, number, -1)
            found.append(torch.einsum("bgnp,gp->nb", squares, weights))
        return torch.cat(found, 1)


@dataclass(frozen=True)
class AffineGradients(ExampleGradients):
    """y = a (x - m) r + c, as the end of a normalisation: dy/da is sum_t g_t (x_t - m) r.

    Attributes:
        features: The number of last dimensions that a and c vary along; 0 are the channels of (B, r, C, ...).
        centre: m, for each channel, or None where x is normalised already.
        factor: r, likewise.
    """

    features: int
    centre: Tensor | None = None
    factor: Tensor | None = None

    @property
    def numbers(self) -> int:
        """Return the size of the scale."""
        return self.x.shape[2] if not self.features else self.x.shape[-self.features :].numel()

    def weight(self) -> Tensor:
        """Return sum_t g_t (x_t - m) r."""
        return self.centred(_summed(self.grad * self.x, self.features), self.bias)

    def centred(self, products: Tensor, sums: Tensor) -> Tensor:
        """Return sum_t g_t (x_t - m) r from sum_t g_t x_t and sum_t g_t."""
        if self.centre is None or self.factor is None:
            return products
        return (products - self.centre * sums) * self.factor

    @cached_property
    def bias(self) -> Tensor:
        """Return sum_t g_t."""
        return _summed(self.grad, self.features)


@dataclass(frozen=True)
class EmbeddingGradients(ExampleGradients):
    """Rows of a table: what several positions of an example read from one row adds up before it is squared.

    Attributes:
        tokens: The number V of rows.
        padding: The row that has no gradient, if one has none.
    """

    tokens: int
    padding: int | None = None

    @property
    def numbers(self) -> int:
        """Return the size of the table."""
        return self.tokens * self.grad.shape[-1]

    def weight(self) -> Tensor:
        """Add up what each row got, (B, V, D), from ids (B, T) and gradients (B, T, D)."""
        gradient = self.grad.new_zeros(self.x.shape[0], self.tokens, self.grad.shape[-1])
        gradient.scatter_add_(1, self.x[..., None].expand_as(self.grad), self.grad)
        return self._without_padding(gradient, 1)

    def weighted_squares(self, variance: Tensor) -> Tensor:
        """Return sum_k v_k (sum_{t: id_t = k} g_t)^2 as sum_t v g_t sum_{t': id_t' = id_t} g_t'."""
        same = (self.x[:, :, None] == self.x[:, None, :]).to(self.grad.dtype)
        caused = self._without_padding(variance.clone(), 0) if self.padding is not None else variance
        return (self.grad * (same @ self.grad) * caused[self.x]).sum((1, 2))

    def summed_squares(self, *others: ExampleGradients) -> Tensor:
        """Return sum_b G_b^2; only tokens that occur take memory."""
        calls = (self, *others)
        examples = self.tokens * torch.arange(len(self.x), device=self.x.device)[:, None]
        pairs = torch.cat([(examples + call.x).flatten() for call in calls])
        flows = torch.cat([call.grad.flatten(0, 1) for call in calls])
        found, place = torch.unique(pairs, return_inverse=True)
        squares = flows.new_zeros(len(found), flows.shape[-1]).index_add_(0, place, flows).square_()
        total = flows.new_zeros(self.tokens, flows.shape[-1]).index_add_(0, found % self.tokens, squares)
        return self._without_padding(total, 0)

    def _without_padding(self, tensor: Tensor, dim: int) -> Tensor:
        if self.padding is not None:
            tensor.select(dim, self.padding).zero_()
        return tensor


def _summed(tensor: Tensor, features: int) -> Tensor:
    """Sum (B, r, ...) over positions: all but the last dimensions, or but the channels of (B, r, C, ...)."""
    if features:
        return tensor.flatten(1, -1 - features).sum(1)
    return (tensor.flatten(3) if tensor.ndim > 3 else tensor[..., None]).sum((1, 3))


# -- of layers ------------------------------------------------------------------------------------------------------


def example_gradients(layer: nn.Module, x: Tensor, grad: Tensor) -> ExampleGradients:
    """Return the gradients of each example in the weight and bias of a layer of a known family, in evaluation mode.

    Args:
        layer: The layer.
        x: Its input as (B, r, ...), r entries of the batch's dimension for each example.
        grad: The gradient of its output, in the same arrangement.

    Example:
        >>> layer = nn.Linear(3, 2)
        >>> example_gradients(layer, torch.ones(5, 1, 3), torch.ones(5, 1, 2)).weight().shape
        torch.Size([5, 2, 3])
    """
    family = layer_type(layer).family
    assert family is not None
    return _OF_LAYERS[family](layer, x, grad)


def padded(layer: Any, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return a convolution's input (N, C, ...) and the zeros that remain to be added.

    Padding that is no constant number of zeros on both sides is added here.
    """
    if isinstance(layer.padding, str) or layer.padding_mode != "zeros":
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        return functional.pad(x, layer._reversed_padding_repeated_twice, mode=mode), (0,) * (layer.weight.ndim - 2)
    return x, layer.padding


def normalised(layer: Any, x: Tensor) -> Tensor:
    """Return xhat of a normalisation layer in evaluation mode, for an input as the layer takes it."""
    match layer_type(layer).family:
        case "batch norm":
            return functional.batch_norm(x, layer.running_mean, layer.running_var, None, None, False, 0.0, layer.eps)
        case "instance norm":
            tracked = layer.track_running_stats
            mean, var = (layer.running_mean, layer.running_var) if tracked else (None, None)
            return functional.instance_norm(x, mean, var, None, None, not tracked, 0.0, layer.eps)
        case "group norm":
            return functional.group_norm(x, layer.num_groups, None, None, layer.eps)
        case "layer norm":
            return functional.layer_norm(x, layer.normalized_shape, None, None, layer.eps)
        case "rms norm":
            return functional.rms_norm(x, layer.normalized_shape, None, layer.eps)
    raise TypeError(f"{type(layer).__name__} is no known normalisation layer.")


def _linear(layer: Any, x: Tensor, grad: Tensor) -> ExampleGradients:
    del layer
    return LinearGradients(x.flatten(1, -2), grad.flatten(1, -2))


def _convolution(layer: Any, x: Tensor, grad: Tensor) -> ExampleGradients:
    whole, padding = padded(layer, x.flatten(0, 1))
    output_padding = tuple(
        size - ((n - 1) * stride - 2 * pad + dilation * (kernel - 1) + 1) if layer.transposed else 0
        for size, n, stride, pad, dilation, kernel in zip(
            grad.shape[3:], whole.shape[2:], layer.stride, padding, layer.dilation, layer.kernel_size, strict=True
        )
    )
    operation = Convolution(layer.stride, padding, layer.dilation, layer.transposed, output_padding, layer.groups)
    inputs = whole.reshape(*x.shape[:2], *whole.shape[1:])
    return ConvolutionGradients(inputs, grad, operation, layer.weight.detach())


def _embedding(layer: Any, x: Tensor, grad: Tensor) -> ExampleGradients:
    ids = x.flatten(1)
    return EmbeddingGradients(ids, grad.reshape(*ids.shape, -1), len(layer.weight), layer.padding_idx)


def _channel_norm(layer: Any, x: Tensor, grad: Tensor) -> ExampleGradients:
    return AffineGradients(normalised(layer, x.flatten(0, 1)).view_as(x), grad, 0)


def _feature_norm(layer: Any, x: Tensor, grad: Tensor) -> ExampleGradients:
    return AffineGradients(normalised(layer, x), grad, len(layer.normalized_shape))


_OF_LAYERS: dict[Family, Callable[[Any, Tensor, Tensor], ExampleGradients]] = {
    "linear": _linear,
    "convolution": _convolution,
    "transposed convolution": _convolution,
    "embedding": _embedding,
    "batch norm": _channel_norm,
    "instance norm": _channel_norm,
    "group norm": _channel_norm,
    "layer norm": _feature_norm,
    "rms norm": _feature_norm,
}
