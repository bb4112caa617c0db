"""Sums, products and quotients of tensors of which one or several are random; they count as independent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bayesify.prediction.streamlined.linear import combined_share, weight_share
from bayesify.prediction.streamlined.moments import Moments, centre, moment_rule, same_size

__all__ = ["joint_share"]


def _variance(x: Any) -> Tensor | None:
    return x.variance if isinstance(x, Moments) else None


def joint_share(*parts: Any) -> Tensor | None:
    """Return the common part of a sum, in proportion to the variances."""
    pairs = [part for part in parts if isinstance(part, Moments)]
    if all(pair.shared is None for pair in pairs):
        return None
    if len(pairs) == 1:
        return pairs[0].shared
    rows = [pair.centre.shape[0] for pair in pairs if pair.shared is not None]
    if not all(same_size(count, rows[0]) for count in rows) or any(pair.centre.ndim == 0 for pair in pairs):
        return None
    count, deepest = rows[0], max(pair.centre.ndim for pair in pairs)
    total = common = torch.zeros(count, dtype=pairs[0].variance.dtype, device=pairs[0].variance.device)
    for pair in pairs:
        size = (
            pair.variance.flatten(1).sum(1)
            if pair.centre.ndim == deepest > 1 and same_size(pair.centre.shape[0], count)  # else it has no batch
            else pair.variance.sum().expand(count)
        )
        total = total + size
        common = common if pair.shared is None else common + pair.shared * size
    return common / total.clamp_min(torch.finfo(total.dtype).tiny)


@moment_rule(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, kind="exact")
def _add(input: Any, other: Any, *, alpha: float = 1) -> Moments:
    """Var[a + b] = var a + var b."""
    mean = torch.add(torch.as_tensor(centre(input)), centre(other), alpha=alpha)
    return _sum(mean, _variance(input), _variance(other), alpha, input, other)


@moment_rule(torch.sub, Tensor.sub, Tensor.__sub__, torch.subtract, kind="exact")
def _sub(input: Any, other: Any, *, alpha: float = 1) -> Moments:
    mean = torch.sub(torch.as_tensor(centre(input)), centre(other), alpha=alpha)
    return _sum(mean, _variance(input), _variance(other), alpha, input, other)


@moment_rule(Tensor.__rsub__, torch.rsub, kind="exact")
def _rsub(input: Any, other: Any, *, alpha: float = 1) -> Moments:
    mean = torch.sub(torch.as_tensor(centre(other)), centre(input), alpha=alpha)
    return _sum(mean, _variance(other), _variance(input), alpha, input, other)


def _sum(mean: Tensor, one: Tensor | None, other: Tensor | None, alpha: float, *parts: Any) -> Moments:
    if other is not None and alpha != 1:
        other = other * alpha**2
    if one is not None and other is not None:
        variance = one + other
    else:
        variance = torch.as_tensor(other if one is None else one).clone()  # what is written into it is not its part's
    if variance.shape != mean.shape:
        variance = variance.expand_as(mean)
    return Moments.make(mean, variance, joint_share(*parts))


@moment_rule(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply, kind="exact")
def _mul(input: Any, other: Any) -> Moments:
    """Var[a b] = a^2 var b + b^2 var a + var a var b."""
    a, b, u, v = centre(input), centre(other), _variance(input), _variance(other)
    mean = a * b
    if u is not None and v is not None:
        variance = a.square() * v + (b.square() + v) * u
    elif v is not None:
        variance = v * (a * a)
    else:
        assert u is not None
        variance = u * (b * b)
    if variance.shape != mean.shape:
        variance = variance.expand_as(mean)
    return Moments.make(mean, variance, _product_share(input, other, mean, variance))


def _product_share(one: Any, other: Any, mean: Tensor, variance: Tensor) -> Tensor | None:
    """Return the common part; a factor of each channel moves all positions of it together."""
    for x, factor in ((one, other), (other, one)):
        if not isinstance(factor, Moments) or not isinstance(x, Tensor) or x.shape != mean.shape or mean.ndim < 3:
            continue
        aligned = factor.variance.reshape(*(1,) * (mean.ndim - factor.ndim), *factor.shape)
        dims = [dim for dim, size in enumerate(aligned.shape) if size > 1]
        if len(dims) == 1 and dims[0] > 0:
            new = weight_share(centre(x), aligned.flatten(), dims[0])
            return combined_share(x, new, (aligned * centre(x).square()).flatten(1).sum(1), variance)
    return joint_share(one, other)


@moment_rule(torch.div, Tensor.div, Tensor.__truediv__, torch.true_divide, kind="first order")
def _div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    """Var[a / b] = var a / b^2 for a fixed b, and to first order (var a + a^2 var b / b^2) / b^2."""
    if rounding_mode is not None:
        return NotImplemented
    a, b, u, v = centre(input), centre(other), _variance(input), _variance(other)
    mean = a / b
    variance = torch.zeros_like(mean) if u is None else u / (b * b)
    if v is not None:
        variance = variance + mean.square() * v / b.square()
    if variance.shape != mean.shape:
        variance = variance.expand_as(mean)
    return Moments.make(mean, variance, joint_share(input, other))


@moment_rule(Tensor.__rdiv__, Tensor.__rtruediv__, kind="first order")
def _rdiv(input: Any, other: Any) -> Any:
    return _div(other, input)


@moment_rule(torch.neg, Tensor.neg, Tensor.__neg__, kind="exact")
def _neg(input: Moments) -> Moments:
    return input.like(-input.centre, input.variance.clone())
