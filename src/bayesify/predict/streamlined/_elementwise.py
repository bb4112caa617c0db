"""Any function of single entries, by its derivative or by three nodes of Gauss-Hermite quadrature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bayesify.predict._overrides import name_of
from bayesify.predict.streamlined._moments import Moments, centres, settings

__all__ = ["elementwise", "flushed", "generic"]


def elementwise(function: Callable[[Tensor], Tensor], x: Moments) -> Moments:
    """Return the moments of g(x), entry by entry.

    First order: g(m) and g'(m)^2 v. Else three nodes, exact for polynomials up to the fifth degree:
    E g = 2/3 g(m) + 1/6 (g(m + s) + g(m - s)) with s = sqrt(3 v), and likewise the variance.
    """
    if settings().first_order:
        value, slope = _derivative(function, x.centre)
        return x.like(value, slope.square_().mul_(x.variance))
    middle = function(x.centre)
    step = (3 * x.variance).sqrt_()
    up, down = function(x.centre + step), function(x.centre - step)
    # Around g(m): the mean moves by d / 6, and the variance is (a^2 + b^2) / 6 - (d / 6)^2, with d = a + b.
    up, down = up.sub_(middle), down.sub_(middle)
    shift = (up + down).div_(6)
    variance = up.square_().add_(down.square_()).div_(6).sub_(shift.square())
    return x.like(middle.add_(shift), flushed(variance, 2))


def flushed(x: Tensor, order: int) -> Tensor:
    """Set what is too small to be squared to zero, in place: such numbers make products a hundred times slower.

    Args:
        x: Not negative but for rounding.
        order: 1 for means, which will be squared, 2 for variances.
    """
    return functional.threshold(x, torch.finfo(x.dtype).tiny ** (0.4 * order), 0.0, inplace=True)


def _derivative(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False), torch.enable_grad():
        leaf = x.detach().clone().requires_grad_()
        value = function(leaf)
        (slope,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), slope


def generic(func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Apply the rule above to an operation that torch knows to act entry by entry.

    With several random arguments each is varied on its own: their effects on mean and variance add up.
    """
    if not _pointwise(func):
        return NotImplemented
    places = [index for index, value in enumerate(args) if isinstance(value, Moments)]
    if not places or any(isinstance(value, Moments) for value in options.values()):
        return NotImplemented
    plain = list(centres(list(args)))
    base = func(*plain, **options)
    if not isinstance(base, Tensor) or not base.is_floating_point():
        return NotImplemented
    found = []
    for index in places:
        x = args[index]
        if x.shape != base.shape:  # the function wants all entries apart
            x = x.like(x.centre.expand_as(base), x.variance.expand_as(base))

        def of_one(value: Tensor, index: int = index) -> Tensor:
            return torch.as_tensor(func(*plain[:index], value, *plain[index + 1 :], **options))

        found.append(elementwise(of_one, x))
    if len(found) == 1:
        return found[0]
    mean = base + sum(one.centre - base for one in found)
    return found[0].like(mean, torch.stack([one.variance for one in found]).sum(0))


def _pointwise(func: Callable[..., Any]) -> bool:
    name = name_of(func).strip("_")
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)
