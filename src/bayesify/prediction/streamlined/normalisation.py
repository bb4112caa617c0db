"""Normalisation, with statistics that are random where they come from the activation itself."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bayesify.prediction.streamlined.moments import Moments, centre, moment_rule, settings, variance_of

__all__ = ["normalise"]


def normalise(mean: Tensor, v: Tensor, eps: float, *, centred: bool = True) -> tuple[Tensor, Tensor]:
    """Return the moments of a normalised activation, to first order, over the last dimension (D entries).

    x^ = (x - mean x) / s has the Jacobian (I - 1 1'/D - x^ x^'/D) / s, so

        var_i = (v_i (1 - 2 (1 + x^_i^2) / D) + (sum v + 2 x^_i sum x^ v + x^_i^2 sum x^^2 v) / D^2) / s^2.

    Matching moments, s^2 is its own mean, var m + mean v (1 - 1/D) + eps. Not centred is the root mean square's.
    """
    size = mean.shape[-1]
    moved = mean - mean.mean(-1, keepdim=True) if centred else mean
    square = moved.square().mean(-1, keepdim=True) + eps
    if not settings().first_order:
        square = square + v.mean(-1, keepdim=True) * ((1 - 1 / size) if centred else 1.0)
    factor = square.rsqrt()
    x = moved * factor
    xv = x * v
    inner = (x * xv).sum(-1, keepdim=True)
    # v (1 - 2 x^2 / D) + x^2 inner / D^2 is common to both kinds.
    variance = torch.addcmul(v, x, x * (inner / size**2) - xv * (2 / size))
    if centred:
        variance = variance - v * (2 / size)
        variance = variance + (v.sum(-1, keepdim=True) + 2 * x * xv.sum(-1, keepdim=True)) / size**2
    return x, variance.clamp_min_(0).mul_(factor.square())


def _affine(x: Tensor, v: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the moments of a x + b: Var = a^2 v + var a (x^2 + v) + var b."""
    mean, variance = x, v
    if weight is not None:
        scale = centre(weight)
        mean, variance = x * scale, v * scale.square()
        if isinstance(weight, Moments):
            variance = variance + weight.variance * (x.square() + v)
    if bias is not None:
        mean = mean + centre(bias)
        if isinstance(bias, Moments):
            variance = variance + bias.variance
    return mean, variance


def _like(input: Tensor, mean: Tensor, variance: Tensor) -> Moments:
    return Moments.make(mean, variance, input.shared if isinstance(input, Moments) else None)


@moment_rule(functional.layer_norm, kind="first order")
def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Moments:
    return _features(input, len(normalized_shape), weight, bias, eps, centred=True)


@moment_rule(functional.rms_norm, kind="first order")
def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Moments:
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    return _features(input, len(normalized_shape), weight, None, eps, centred=False)


def _features(
    input: Tensor, dims: int, weight: Tensor | None, bias: Tensor | None, eps: float, *, centred: bool
) -> Moments:
    flat = (*input.shape[:-dims], math.prod(input.shape[-dims:]))
    x, v = normalise(centre(input).reshape(flat), variance_of(input).reshape(flat), eps, centred=centred)
    return _like(input, *_affine(x.reshape(input.shape), v.reshape(input.shape), weight, bias))


@moment_rule(functional.group_norm, kind="first order")
def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Moments:
    flat = (input.shape[0], num_groups, -1)
    x, v = normalise(centre(input).reshape(flat), variance_of(input).reshape(flat), eps)
    aligned = (_channels(tensor, input.ndim) for tensor in (weight, bias))
    return _like(input, *_affine(x.reshape(input.shape), v.reshape(input.shape), *aligned))


@moment_rule(functional.instance_norm, kind="first order")
def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if not use_input_stats:
        return _batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    return _group_norm(input, input.shape[1], weight, bias, eps)


@moment_rule(functional.batch_norm, kind="exact")
def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Return a (x - m) r + b with running statistics: one scale and one shift for each channel."""
    del momentum
    if training or running_mean is None or running_var is None:
        return NotImplemented
    factor = (running_var + eps).rsqrt()
    ndim = input.ndim
    slope = factor if weight is None else factor * centre(weight)
    offset = -running_mean * slope if bias is None else centre(bias) - running_mean * slope
    mean = torch.addcmul(_channels(offset, ndim), centre(input), _channels(slope, ndim))
    random_scale, random_shift = (isinstance(tensor, Moments) for tensor in (weight, bias))
    if isinstance(input, Moments):
        second = slope.square()
        if random_scale:
            second = second + weight.variance * factor.square()  # type: ignore[union-attr]
        variance = input.variance * _channels(second, ndim)
    else:
        variance = torch.zeros_like(mean)
    if random_scale:
        xhat = (centre(input) - _channels(running_mean, ndim)) * _channels(factor, ndim)
        variance = variance.addcmul(xhat.square(), _channels(weight.variance, ndim))  # type: ignore[union-attr]
    if random_shift:
        variance = variance + _channels(bias.variance, ndim)  # type: ignore[union-attr]
    return _like(input, mean, variance)


def _channels(tensor: Any, ndim: int) -> Any:
    """Return a tensor of channels so that it meets (B, C, ...)."""
    if tensor is None:
        return None
    return tensor.reshape(-1, *(1,) * (ndim - 2))
