"""Functions of single entries with straight pieces, whose moments have a closed form."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bayesify.prediction.streamlined.elementwise import elementwise, flushed, generic
from bayesify.prediction.streamlined.maxima import FAR, larger
from bayesify.prediction.streamlined.moments import Moments, centre, moment_rule, settings
from bayesify.prediction.streamlined.products import joint_share

__all__ = ["piecewise"]

_ROOT = math.sqrt(2 * math.pi)

Number = Tensor | float


def piecewise(x: Moments, start: Number, slope: Number, *kinks: tuple[Number, Number]) -> Moments:
    """Return the moments of y = a + b x + sum_k c_k relu(x - t_k) for Gaussian x, of one or two kinks t_k.

    With P_k = P(x > t_k), r_k = E relu(x - t_k) and l_k = E relu(t_k - x):

        Var = b^2 v + 2 b v sum_k c_k P_k + sum_kj c_k c_j (v P_max(k,j) - r_max(k,j) l_min(k,j)),

    since Cov(x, relu(x - t)) = v P and, for t_k <= t_j, Cov(relu(x - t_k), relu(x - t_j)) = v P_j - r_j l_k. No term is
    larger than the variance of x, however far its mean lies from the kinks.

    Args:
        x: The pair.
        start: a.
        slope: b.
        kinks: (t_k, c_k), from left to right.
    """
    mean, v = x.centre, x.variance
    std = v.clamp_min(torch.finfo(v.dtype).tiny).sqrt()
    found = [_parts(mean - place, std) for place, _ in kinks]
    first = start + slope * mean
    total: Number = slope * slope
    product: Tensor | float = 0.0
    for (_, change), (above, over, under) in zip(kinks, found, strict=True):
        first = first + change * over
        total = total + (2 * slope + change) * change * above
        product = product + change * change * over * under
    if len(kinks) == 2:
        (_, one), (_, other) = kinks
        total = total + 2 * one * other * found[1][0]
        product = product + 2 * one * other * found[1][1] * found[0][2]
    return x.like(first, flushed(v * total - product, 2))


def _parts(distance: Tensor, std: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return P(x > t), E relu(x - t) and E relu(t - x) of a Gaussian whose mean is at a distance from t."""
    far = FAR.get(std.dtype, 8.0)
    ratio = (distance / std).clamp_(-far, far)
    size = ratio.abs()
    beyond = (size * math.sqrt(0.5)).erf_().sub_(1).mul_(-0.5)  # P(|z| > size) / 2
    small = (size.square() * -0.5).exp_().div_(_ROOT).sub_(size * beyond).clamp_min_(0).mul_(std)
    above = torch.where(ratio > 0, 1 - beyond, beyond)
    return above, small + distance.clamp_min(0), small - distance.clamp_max(0)


def _straight(function: Any, x: Moments, start: Number, slope: Number, *kinks: tuple[Number, Number]) -> Moments:
    """Match moments by the closed form, or linearise the function itself."""
    if settings().first_order:
        return elementwise(function, x)
    return piecewise(x, start, slope, *kinks)


def _rectified(mean: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return P(x > 0) = P(a) and E relu(x) = m P(a) + s p(a), a = m / s."""
    std = v.clamp_min(torch.finfo(v.dtype).tiny).sqrt_()
    # Further out nothing changes but that numbers get too small to be multiplied quickly.
    ratio = (mean / std).clamp_(-FAR[v.dtype], FAR[v.dtype]) if v.dtype in FAR else mean / std
    inside = (ratio * math.sqrt(0.5)).erf_().add_(1).mul_(0.5)
    return inside, (mean * inside).addcmul_(ratio.square_().mul_(-0.5).exp_(), std, value=1 / _ROOT)


@moment_rule(functional.relu, torch.relu, Tensor.relu, kind="exact")
def _relu(input: Moments, inplace: bool = False) -> Moments:
    """Return E = r and Var = v P - r (r - m), or the variance where m > 0."""
    del inplace
    mean, v = input.centre, input.variance
    if settings().first_order:
        return input.like(mean.clamp_min(0), v * (mean > 0))
    inside, first = _rectified(mean, v)
    variance = (v * inside).addcmul_(mean - first, first)
    return input.like(flushed(first, 1), flushed(variance, 2))


def leaky(x: Moments, slope: Number) -> Moments:
    """Return the moments of b x + (1 - b) relu(x): Var = v (b^2 + (1 - b^2) P) - (1 - b)^2 r (r - m)."""
    if settings().first_order:
        positive, mean, v = x.centre > 0, x.centre, x.variance
        return x.like(torch.where(positive, mean, slope * mean), torch.where(positive, v, slope**2 * v))
    mean, v, rest = x.centre, x.variance, 1 - slope
    inside, first = _rectified(mean, v)
    variance = (inside * (1 - slope * slope) + slope * slope).mul_(v)
    variance = variance.add_((mean - first).mul_(first).mul_(rest * rest))
    return x.like(slope * mean + rest * first, flushed(variance, 2))


@moment_rule(functional.leaky_relu, kind="exact")
def _leaky_relu(input: Moments, negative_slope: float = 0.01, inplace: bool = False) -> Moments:
    del inplace
    return leaky(input, negative_slope)


@moment_rule(functional.prelu, torch.prelu, kind="exact")
def _prelu(input: Moments, weight: Tensor) -> Any:
    if isinstance(weight, Moments) or not isinstance(input, Moments):
        return NotImplemented
    return leaky(input, weight if weight.numel() == 1 else weight.view(-1, *(1,) * (input.ndim - 2)))


@moment_rule(torch.abs, Tensor.abs, Tensor.__abs__, torch.absolute, Tensor.absolute, kind="exact")
def _abs(input: Moments) -> Moments:
    return _straight(torch.abs, input, 0.0, -1.0, (0.0, 2.0))


def _between(x: Moments, low: Any, high: Any) -> Any:
    if any(isinstance(bound, Moments) for bound in (low, high)) or (low is None and high is None):
        return NotImplemented
    if any(isinstance(bound, Tensor) and bound.shape != x.shape for bound in (low, high)):
        return generic(torch.clamp, (x, low, high), {})  # an entry may be repeated, or bounds have another type

    def function(z: Tensor) -> Tensor:
        return torch.clamp(z, low, high)

    if high is None:
        return _straight(function, x, low, 0.0, (low, 1.0))
    if low is None:
        return _straight(function, x, 0.0, 1.0, (high, -1.0))
    if not isinstance(low, Tensor) and not isinstance(high, Tensor) and low <= high:
        return _straight(function, x, low, 0.0, (low, 1.0), (high, -1.0))
    return generic(torch.clamp, (x, low, high), {})


@moment_rule(torch.clamp, Tensor.clamp, torch.clip, Tensor.clip, kind="exact")
def _clamp(input: Any, min: Any = None, max: Any = None) -> Any:
    return _between(input, min, max) if isinstance(input, Moments) else NotImplemented


@moment_rule(torch.clamp_min, Tensor.clamp_min, kind="exact")
def _clamp_min(input: Any, min: Any) -> Any:
    return _between(input, min, None) if isinstance(input, Moments) else NotImplemented


@moment_rule(torch.clamp_max, Tensor.clamp_max, kind="exact")
def _clamp_max(input: Any, max: Any) -> Any:
    return _between(input, None, max) if isinstance(input, Moments) else NotImplemented


@moment_rule(functional.hardtanh, kind="exact")
def _hardtanh(input: Moments, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Any:
    del inplace
    return _between(input, min_val, max_val)


@moment_rule(functional.relu6, kind="exact")
def _relu6(input: Moments, inplace: bool = False) -> Any:
    del inplace
    return _between(input, 0.0, 6.0)


@moment_rule(functional.hardsigmoid, kind="exact")
def _hardsigmoid(input: Moments, inplace: bool = False) -> Moments:
    del inplace
    return _straight(functional.hardsigmoid, input, 0.0, 0.0, (-3.0, 1 / 6), (3.0, -1 / 6))


@moment_rule(functional.softshrink, kind="exact")
def _softshrink(input: Moments, lambd: float = 0.5) -> Moments:
    def function(z: Tensor) -> Tensor:
        return functional.softshrink(z, lambd)

    return _straight(function, input, lambd, 1.0, (-lambd, -1.0), (lambd, 1.0))


def _extreme(func: Any, input: Any, other: Any, sign: float) -> Any:
    """Return the larger of two, or with the sign -1 the smaller; two random ones count as independent."""
    if settings().first_order or not (isinstance(input, Tensor) and isinstance(other, Tensor)):
        return generic(func, (input, other), {})
    shape = torch.maximum(centre(input), centre(other)).shape
    pairs = [x for x in (input, other) if isinstance(x, Moments)]
    if len(pairs) == 1:
        fixed = other if pairs[0] is input else input
        x = pairs[0]
        wide = Moments.make(x.centre.expand(shape), x.variance.expand(shape), joint_share(x))
        if sign > 0:
            return piecewise(wide, fixed, 0.0, (fixed, 1.0))
        return piecewise(wide, 0.0, 1.0, (fixed, -1.0))
    one, two = ((sign * centre(x).expand(shape), x.variance.expand(shape)) for x in pairs)
    mean, variance = larger(one, two)
    return Moments.make(sign * mean, variance, joint_share(input, other))


@moment_rule(torch.maximum, Tensor.maximum, torch.fmax, Tensor.fmax, kind="exact")
def _maximum(input: Any, other: Any) -> Any:
    return _extreme(torch.maximum, input, other, 1.0)


@moment_rule(torch.minimum, Tensor.minimum, torch.fmin, Tensor.fmin, kind="exact")
def _minimum(input: Any, other: Any) -> Any:
    return _extreme(torch.minimum, input, other, -1.0)
