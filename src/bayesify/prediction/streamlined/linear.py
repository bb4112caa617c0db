"""Linear maps, convolutions and tables, whose weights may be random too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bayesify._core.maths import rank_one_factors
from bayesify.prediction.streamlined.heads import heads_of
from bayesify.prediction.streamlined.moments import Correlated, Moments, Source, centre, moment_rule, settings

__all__ = ["combined_share", "common_part", "weight_share"]

Operation = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def _second(weight: Tensor) -> Tensor:
    """Return E[W^2] = W^2 + U."""
    if not isinstance(weight, Moments):
        return settings().square(weight)
    found: Tensor = weight.kept("second", lambda w: torch.addcmul(w.variance, w.centre, w.centre))
    return found


def _arriving(operation: Operation, x: Moments, weight: Tensor, square: Tensor) -> Tensor:
    """Return diag(W C W') of an input with covariance C: W^2 v, or what is known of the heads of attention."""
    heads = heads_of(x)
    return operation(x.variance, square, None) if heads is None else heads.through(weight)


def _product(
    operation: Operation, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return mean and variance of a map that is linear in its input and its weight.

    Var = U m^2 + (W^2 + U) v + var b, with independent W (mean W, variance U) and x (mean m, variance v). Also returns
    what the weights alone cause, the first term, summed for each example.
    """
    of_bias = bias.variance if isinstance(bias, Moments) else None
    mean = operation(centre(x), centre(weight), centre(bias))
    variance, caused = None, None
    if isinstance(weight, Moments):
        variance = operation(centre(x).square(), weight.variance, None)
        caused = variance.flatten(1).sum(1) if variance.ndim > 2 else None
    if isinstance(x, Moments):
        incoming = _incoming(operation, x, weight)
        variance = incoming if variance is None else variance.add_(incoming)
    if of_bias is not None:
        of_bias = of_bias if operation is functional.linear else of_bias.reshape(-1, *(1,) * (mean.ndim - 2))
        variance = of_bias.expand_as(mean).clone() if variance is None else variance.add_(of_bias)
    assert variance is not None
    return mean, variance, caused


def _incoming(operation: Operation, x: Moments, weight: Tensor) -> Tensor:
    """Return (W^2 + U) v, with the covariances of heads diag(W C W') + U v."""
    if heads_of(x) is None:
        return operation(x.variance, _second(weight), None)
    found = _arriving(operation, x, centre(weight), settings().square(centre(weight)))
    return found + operation(x.variance, weight.variance, None) if isinstance(weight, Moments) else found


def _factored(x: Tensor, weight: Moments, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return the same of x W' + b where U = r c': Var = r (c . (m^2 + v)) + W^2 v + var b."""
    known = weight.kept("factors", lambda w: rank_one_factors(w.variance))
    if known is None or heads_of(x) is not None:
        return None
    row, column = known
    mean = functional.linear(centre(x), centre(weight), centre(bias))
    own = centre(x).square() @ column
    caused = own.flatten(1).sum(1) * row.sum() if mean.ndim > 2 else None
    of_bias = bias.variance if isinstance(bias, Moments) else None
    if isinstance(x, Moments):
        square = weight.kept("square", lambda w: w.centre.square())
        variance = functional.linear(x.variance, square, of_bias)
        return mean, variance.addcmul_((own + x.variance @ column)[..., None], row), caused
    variance = own[..., None] * row if of_bias is None else torch.addcmul(of_bias, own[..., None], row)
    return mean, variance, caused


def _rotated(operation: Operation, x: Tensor, weight: Correlated, bias: Tensor | None) -> Moments:
    """Return the moments of a linear map whose weight and bias are (W, b) = V_B E V_A', with variances s of E.

    Var_i = sum_j V_B,ij^2 sum_k s_jk E[z_k^2] + (W^2 v)_i with z = V_A' (x, 1), E[z^2] = (V_A' (m, 1))^2 + V_A^2' v:
    exact for independent entries of x. Positions share E as they share a weight.
    """
    rotated, dim = weight.with_bias(bias), -1 if weight.ndim == 2 else 1
    mean = operation(centre(x), weight.centre, centre(bias))
    met = operation(centre(x), rotated.kernel(weight.shape), rotated.offset).movedim(dim, -1)
    second = met.square()
    caused = (second @ rotated.columns).flatten(1).sum(1) if mean.ndim > 2 else None
    if isinstance(x, Moments):
        kernel, squares = rotated.kernel(weight.shape), rotated.kernel_square.view(-1, *weight.shape[1:])
        second = second + _arriving(operation, x, kernel, squares).movedim(dim, -1)
    variance = rotated.spread(second).movedim(-1, dim)
    if isinstance(x, Moments):
        variance = variance + _arriving(operation, x, weight.centre, settings().square(weight.centre))
    if caused is None:
        return Moments.make(mean, variance, x.shared if isinstance(x, Moments) else None)
    new = weight_share(met, rotated.columns, -1)
    made = Moments.make(mean, variance, combined_share(x, new, caused, variance))
    if weight.ndim == 2 and mean.ndim == 3:
        made.source = Source(torch.empty(mean.shape, device="meta"), x, weight, bias)
    return made


@moment_rule(functional.linear, kind="exact")
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Moments:
    if heads_of(input) is not None:
        settings().projected += 1
    if isinstance(weight, Correlated):
        return _rotated(functional.linear, input, weight, bias)
    found = _factored(input, weight, bias) if isinstance(weight, Moments) else None
    mean, variance, caused = found or _product(functional.linear, input, weight, bias)
    made = Moments.make(mean, variance)
    if mean.ndim < 3:
        made.shared = input.shared if isinstance(input, Moments) else None
        return made
    new = None
    if isinstance(weight, Moments) and caused is not None:
        columns = weight.kept("columns", lambda w: w.variance.sum(0))
        positions = mean[0, ..., 0].numel()
        common = centre(input).flatten(1, -2).mean(1).square() @ columns
        new = common_part(common, caused / positions, positions)
    made.shared = combined_share(input, new, caused, variance)
    if mean.ndim == 3:
        made.source = Source(torch.empty(mean.shape, device="meta"), input, weight, bias)
    return made


@moment_rule(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm, kind="exact")
def _matmul(input: Tensor, other: Tensor) -> Any:
    """Return the moments of a product of two independent matrices, of which either or both are random.

    Var = a^2 var b + var a b^2 + var a var b, as products of matrices.
    """
    if other.ndim == 2 and not isinstance(input, Moments):
        return _linear(input, other.t())
    mean = centre(input) @ centre(other)
    variance = 0
    if isinstance(other, Moments):
        variance = centre(input).square() @ other.variance
    if isinstance(input, Moments):
        second = centre(other).square()
        variance = variance + input.variance @ (second + other.variance if isinstance(other, Moments) else second)
    like = input if isinstance(input, Moments) else other
    assert isinstance(like, Moments)
    return like.like(mean, torch.as_tensor(variance))


@moment_rule(torch.addmm, Tensor.addmm, kind="exact")
def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    if beta != 1 or alpha != 1 or input.ndim != 1:
        return NotImplemented
    return _linear(mat1, mat2.t(), input)


def _convolution(function: Callable[..., Tensor], *, transposed: bool) -> Callable[..., Moments]:
    def rule(input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **options: Any) -> Moments:
        def operation(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
            return function(x, w, b, *args, **options)

        if isinstance(weight, Correlated):
            return _rotated(operation, input, weight, bias)
        mean, variance, caused = _product(operation, input, weight, bias)
        new = None
        if caused is not None:
            others = [dim for dim in range(weight.ndim) if dim != (0 if transposed else 1)]
            channels = weight.variance.sum(others)  # type: ignore[attr-defined]
            # A transposed weight has all input channels; a grouped one those of a group.
            groups = centre(input).shape[1] // len(channels)
            new = weight_share(centre(input), channels.repeat(max(1, groups)), 1)
        return Moments.make(mean, variance, combined_share(input, new, caused, variance))

    return rule


_function: Any
for _function in (functional.conv1d, functional.conv2d, functional.conv3d):
    moment_rule(_function, kind="exact")(_convolution(_function, transposed=False))
for _function in (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d):
    moment_rule(_function, kind="exact")(_convolution(_function, transposed=True))


@moment_rule(functional.embedding, kind="exact")
def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    del padding_idx, norm_type, scale_grad_by_freq, sparse
    if max_norm is not None or not isinstance(weight, Moments):
        return NotImplemented
    return Moments.make(weight.centre[input], weight.variance[input])


# -- what positions have in common ------------------------------------------------------------------------------------


def weight_share(x: Tensor, weights: Tensor, dim: int) -> Tensor:
    """Return which part of the variance that random weights cause is common to all positions, (B,).

    Two positions t, t' that share a weight with variances u have the covariance sum_j u_j x_tj x_t'j. Its mean over all
    pairs, over its mean for t = t', is c = sum_j u_j (mean_t x_tj)^2 / sum_j u_j mean_t x_tj^2.
    """
    flat = x.movedim(dim, -1).reshape(x.shape[0], -1, x.shape[dim])
    return common_part(flat.mean(1).square() @ weights, flat.square().mean(1) @ weights, flat.shape[1])


def common_part(common: Tensor, each: Tensor, number: int) -> Tensor:
    """Return the part without the pairs t = t' of T positions, (T c - 1) / (T - 1), from c = common / each."""
    share = common / each.clamp_min(torch.finfo(each.dtype).tiny)
    return (number * share - 1) / (number - 1) if number > 1 else torch.zeros_like(share)


def combined_share(x: Tensor, new: Tensor | None, caused: Tensor | None, variance: Tensor) -> Tensor | None:
    """Return the common part of a sum of what came in and what the weights add, in proportion to their variances."""
    before = x.shared if isinstance(x, Moments) else None
    if new is None or caused is None:
        return before
    if not isinstance(x, Moments):
        return new
    weight = caused / variance.flatten(1).sum(1).clamp_min(torch.finfo(variance.dtype).tiny)
    return weight * new + (1 - weight) * (0.0 if before is None else before)
