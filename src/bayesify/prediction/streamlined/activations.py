"""Smooth activations; those with straight pieces are in `piecewise`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bayesify.prediction.streamlined.elementwise import elementwise
from bayesify.prediction.streamlined.moments import Moments, centre, moment_rule, settings

__all__: list[str] = []

_ROOT = math.sqrt(2 * math.pi)
# Gauss-Legendre nodes and weights on [0, 1] for Owen's T.
_NODES, _WEIGHTS = (
    (0.03376524289842399, 0.16939530676686774, 0.38069040695840155, 0.6193095930415985, 0.8306046932331322,
     0.9662347571015761),
    (0.08566224618958517, 0.18038078652406930, 0.23395696728634552, 0.23395696728634552, 0.18038078652406930,
     0.08566224618958517),
)  # fmt: skip


def _density(x: Tensor) -> Tensor:
    return (x.square() * -0.5).exp_().div_(_ROOT)


@moment_rule(functional.gelu, kind="matched")
def _gelu(input: Moments, approximate: str = "none") -> Moments:
    """Return the moments of x P(x) for Gaussian x, in closed form up to Owen's T.

    With q = sqrt(1 + v), h = m / q, r = sqrt(1 + 2 v): E = m P(h) + (v / q) p(h), and E[y^2] = (m^2 + v) A + 2 m v B +
    2 v C, A = E P^2 = P(h) - 2 T(h, 1 / r), B = E[P p] = p(h) P(h / r) / q, C = E[x P p] = (m B + v D) / q^2,
    D = E[p^2] = exp(-m^2 / r^2) / (2 pi r).
    """
    mean, v = input.centre, input.variance
    if settings().first_order:
        if approximate != "none":
            return elementwise(lambda z: functional.gelu(z, approximate=approximate), input)
        inside = torch.special.ndtr(mean)
        slope = torch.addcmul(inside, mean, _density(mean))
        return input.like(mean * inside, slope.square_().mul_(v))
    if v.dtype == torch.float64 and approximate == "none":
        return _gelu_closed(input)
    # In single precision three nodes are as good as the cancelling terms of the closed form, and cheaper.
    return elementwise(lambda z: functional.gelu(z, approximate=approximate), input)


def _gelu_closed(x: Moments) -> Moments:
    mean, v = x.centre, x.variance
    q2 = 1 + v
    q, r2 = q2.sqrt(), 1 + 2 * v
    h, r = mean / q, r2.sqrt()
    inside, density = torch.special.ndtr(h), _density(h)
    first = mean * inside + v / q * density
    a = inside - 2 * _owen_t(h, 1 / r)
    b = density * torch.special.ndtr(h / r) / q
    d = (-mean.square() / r2).exp() / (2 * math.pi * r)
    c = (mean * b + v * d) / q2
    second = (mean.square() + v) * a + 2 * mean * v * b + 2 * v * c
    slope = torch.addcmul(torch.special.ndtr(mean), mean, _density(mean))
    linear = slope.square() * v
    # For little variance the closed form is a small difference of large terms, and first order is right.
    variance = torch.where(v > 1e-6, (second - first.square()).clamp_min(0), linear)
    return x.like(first, variance)


def _owen_t(h: Tensor, a: Tensor) -> Tensor:
    """Return T(h, a) = 1 / (2 pi) int_0^a exp(-h^2 (1 + t^2) / 2) / (1 + t^2) dt for a in [0, 1]."""
    total = torch.zeros_like(h)
    half = -0.5 * h.square()
    for node, weight in zip(_NODES, _WEIGHTS, strict=True):
        square = 1 + (a * node).square()
        total += weight * (half * square).exp() / square
    return total * a / (2 * math.pi)


def _with_options(function: Callable[..., Tensor]) -> Callable[..., Moments]:
    def rule(input: Moments, *, inplace: bool = False, **options: Any) -> Moments:
        del inplace  # torch hands every option over by its name
        return elementwise(lambda z: function(z, **options), input)

    return rule


for _function in (
    functional.celu,
    functional.elu,
    functional.hardswish,
    functional.mish,
    functional.selu,
    functional.silu,
):
    moment_rule(_function, kind="matched")(_with_options(_function))


@moment_rule(functional.glu, torch.nn.functional.glu, kind="matched")
def _glu(input: Tensor, dim: int = -1) -> Any:
    """Return a * sigmoid(b), with halves a and b taken as independent."""
    one, other = input.chunk(2, dim)
    return one * torch.sigmoid(other)


@moment_rule(functional.softmax, torch.softmax, Tensor.softmax, kind="first order")
def _softmax(input: Moments, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
    """Return softmax to first order: with J = diag p - p p', var_i = p_i^2 (v_i (1 - 2 p_i) + sum_j p_j^2 v_j)."""
    del _stacklevel
    if dim is None:
        return NotImplemented
    x = centre(input) if dtype is None else centre(input).to(dtype)
    p = functional.softmax(x, dim)
    v = input.variance.to(p.dtype)
    inner = (p.square() * v).sum(dim, keepdim=True)
    return input.like(p, p.square() * (v * (1 - 2 * p) + inner))


@moment_rule(functional.log_softmax, torch.log_softmax, Tensor.log_softmax, kind="first order")
def _log_softmax(input: Moments, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
    """Return log softmax to first order: J = I - 1 p', var_i = v_i (1 - 2 p_i) + sum_j p_j^2 v_j."""
    del _stacklevel
    if dim is None:
        return NotImplemented
    x = centre(input) if dtype is None else centre(input).to(dtype)
    p = functional.softmax(x, dim)
    v = input.variance.to(p.dtype)
    inner = (p.square() * v).sum(dim, keepdim=True)
    return input.like(functional.log_softmax(x, dim), v * (1 - 2 * p) + inner)


@moment_rule(
    functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d, torch.dropout, kind="exact"
)
def _dropout(input: Moments, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    del inplace
    return NotImplemented if training and p else input
