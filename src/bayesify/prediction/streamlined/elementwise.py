"""Any function of single entries, by its derivative or by three nodes of Gauss-Hermite quadrature."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bayesify.prediction.overrides import name_of
from bayesify.prediction.streamlined.decisions import DECISIONS
from bayesify.prediction.streamlined.moments import Moments, NoRuleError, centres, settings

__all__ = ["branch_of", "elementwise", "flushed", "generic", "is_pointwise", "is_total"]

Function = Callable[[Tensor], Tensor]

# Finite with finite squares on all of R, so that no node can leave their domain.
_TOTAL = {
    *("add", "sub", "rsub", "mul", "radd", "rmul", "subtract", "multiply", "neg", "negative", "positive", "square"),
    *("tanh", "sigmoid", "special_expit", "silu", "gelu", "mish", "softplus", "elu", "selu", "celu", "relu", "relu6"),
    *("leaky_relu", "prelu", "hardtanh", "hardsigmoid", "hardswish", "softshrink", "hardshrink", "tanhshrink", "abs"),
    *("log_sigmoid", "logsigmoid", "softsign", "threshold", "clamp", "clamp_min", "clamp_max", "maximum", "minimum"),
    *("sin", "cos", "atan", "arctan", "asinh", "arcsinh", "erf", "special_erf", "where", "masked_fill"),
}
# Entry by entry, though torch has no such operation of one name that says so.
_ALSO = {
    *("radd", "rmul", "rdiv", "rtruediv", "truediv", "rpow", "hardswish", "prelu", "softsign", "tanhshrink"),
    *("log_sigmoid", "logsigmoid"),
}
# On which side of a pole a number lies: nodes on two sides say nothing of what is between them.
_BRANCHES: dict[str, Function] = {
    "reciprocal": torch.sign,
    "tan": lambda z: (z / torch.pi).round(),
    **dict.fromkeys(("digamma", "special_digamma", "special_psi", "lgamma", "special_gammaln"), torch.floor),
}


def elementwise(
    function: Function,
    x: Moments,
    *,
    careful: bool = False,
    branch: Function | None = None,
    view: Function | None = None,
) -> Moments:
    """Return the moments of g(x), entry by entry.

    First order: g(m) and g'(m)^2 v. Else three nodes, exact for polynomials up to the fifth degree:
    E g = 2/3 g(m) + 1/6 (g(m + s) + g(m - s)) with s = sqrt(3 v), and likewise the variance.

    Args:
        function: g, which may also look at its entries in another order, as `view` does.
        x: The pair.
        careful: Whether a node may leave the domain of g: then that entry is treated to first order.
        branch: A number that is the same for all points that no pole lies between.
        view: How the entries of the result lie among those of x; None if they lie alike.
    """
    v = x.variance if view is None else view(x.variance)
    if settings().first_order:
        value, slope = _derivative(function, x.centre)
        variance = (slope if view is None else view(slope)).square() * v
        return x.like(value, torch.where(v > 0, variance, 0).clamp_max(_largest(v)) if careful else variance)
    middle = function(x.centre)
    step = (3 * x.variance).sqrt_()
    up, down = function(x.centre + step), function(x.centre - step)
    # Around g(m): the mean moves by d / 6, and the variance is (a^2 + b^2) / 6 - (d / 6)^2, with d = a + b.
    up, down = up.sub_(middle), down.sub_(middle)
    shift = (up + down).div_(6)
    if not careful:
        variance = up.square_().add_(down.square_()).div_(6).sub_(shift.square())
        return x.like(middle + shift, flushed(variance, 2))
    variance = (up.square() + down.square()).div_(6).sub_(shift.square())
    inside = variance.isfinite()
    if branch is not None:
        here = branch(x.centre)
        inside = inside & (branch(x.centre + step) == here) & (branch(x.centre - step) == here)
    linear = _linear_variance(function, x, v, up, down, view)
    variance = torch.where(inside, variance, linear).clamp_max(_largest(v))
    return x.like(torch.where(inside, middle + shift, middle), flushed(variance, 2))


def _linear_variance(
    function: Function, x: Moments, v: Tensor, up: Tensor, down: Tensor, view: Function | None
) -> Tensor:
    """Return g'(m)^2 v; where g has no slope, as sqrt at 0, that of the line to a node inside of the domain."""
    line = torch.where(up.isfinite(), up, torch.where(down.isfinite(), down, 0)).square() / 3
    try:
        slope = _derivative(function, x.centre)[1]
    except NoRuleError:
        return line
    found = (slope if view is None else view(slope)).square() * v
    return torch.where(v > 0, torch.where(found.isfinite(), found, line), 0)


def _largest(like: Tensor) -> float:
    return torch.finfo(like.dtype).max


def flushed(x: Tensor, order: int) -> Tensor:
    """Set what is too small to be squared to zero, in place: such numbers make products a hundred times slower.

    Args:
        x: Not negative but for rounding.
        order: 1 for means, which will be squared, 2 for variances.
    """
    return functional.threshold(x, torch.finfo(x.dtype).tiny ** (0.4 * order), 0.0, inplace=True)


def _derivative(function: Function, x: Tensor) -> tuple[Tensor, Tensor]:
    settings().derivatives += 1
    with torch.inference_mode(False), torch.enable_grad():
        leaf = x.detach().clone().requires_grad_()
        value = function(leaf)
        try:
            (slope,) = torch.autograd.grad(value.sum(), leaf)
        except RuntimeError as error:
            raise NoRuleError("A function that torch has no derivative of") from error
    return value.detach(), slope


def generic(func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Apply the rule above to an operation that torch knows to act entry by entry.

    With several random arguments each is varied on its own: their effects on mean and variance add up.
    """
    if not is_pointwise(func):
        return NotImplemented
    places = [index for index, value in enumerate(args) if isinstance(value, Moments)]
    if not places or any(isinstance(value, Moments) for value in options.values()):
        return NotImplemented
    plain = list(centres(list(args)))
    base = func(*plain, **options)
    if not isinstance(base, Tensor) or not base.is_floating_point():
        return NotImplemented
    careful = not is_total(func)
    found = []
    for index in places:
        x = args[index]
        if x.shape != base.shape:  # the function wants all entries apart
            x = x.like(x.centre.expand_as(base), x.variance.expand_as(base))

        def of_one(value: Tensor, index: int = index) -> Tensor:
            return torch.as_tensor(func(*plain[:index], value, *plain[index + 1 :], **options))

        found.append(elementwise(of_one, x, careful=careful, branch=branch_of(func, args)))
    if len(found) == 1:
        return found[0]
    mean = base + sum(one.centre - base for one in found)
    return found[0].like(mean, torch.stack([one.variance for one in found]).sum(0))


def branch_of(func: Callable[..., Any], args: tuple[Any, ...]) -> Function | None:
    """Return what tells the sides of an operation's poles apart, if it has any."""
    name = name_of(func).strip("_")
    if name == "pow" and len(args) > 1 and not isinstance(args[1], Tensor) and args[1] < 0:
        return torch.sign
    return _BRANCHES.get(name)


def is_total(func: Callable[..., Any]) -> bool:
    """Return whether an operation is finite everywhere."""
    return name_of(func).strip("_") in _TOTAL


@cache
def is_pointwise(func: Callable[..., Any]) -> bool:
    """Return whether an operation acts entry by entry."""
    name = name_of(func).strip("_")
    if name in _ALSO or name in DECISIONS:
        return name in _ALSO
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)
