"""Interpolation and average pooling: linear maps of each side of an image, as matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bayesify.prediction.streamlined.moments import Moments, moment_rule

__all__ = ["resampled"]

Sampled = Callable[[Tensor], Tensor]


def resampled(x: Moments, function: Sampled, sides: list[Tensor]) -> Moments:
    """Return the moments of y = (W_1 x ... x W_d) x along the last d dimensions, exact for independent entries.

    Var = (1 - r) (W_1^2 x ... x W_d^2) v + r ((W_1 x ... x W_d) sqrt v)^2, with r what positions have in common.

    Args:
        x: The pair, (B, C, ...).
        function: The map itself.
        sides: W_i, (out, in) for each dimension.
    """
    apart = x.variance
    for index, matrix in enumerate(sides):
        dim = index - len(sides)
        apart = (apart.movedim(dim, -1) @ matrix.square().mT).movedim(-1, dim)
    mean = function(x.centre)
    if x.shared is None:
        return x.like(mean, apart)
    together = function(x.variance.sqrt()).square()
    return x.like(mean, apart + x.shared.view(-1, *(1,) * (mean.ndim - 1)) * (together - apart))


@moment_rule(functional.interpolate, kind="exact")
def _interpolate(
    input: Moments,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    """Copy entries (nearest), or weigh neighbours on each side of an image."""

    def function(x: Tensor, size: Any = size, scale: Any = scale_factor) -> Tensor:
        return functional.interpolate(
            x,
            size=size,
            scale_factor=scale,
            mode=mode,
            align_corners=align_corners,
            recompute_scale_factor=recompute_scale_factor,
            antialias=antialias,
        )

    if mode in ("nearest", "nearest-exact"):
        return input.like(function(input.centre), function(input.variance))
    dims = input.centre.ndim - 2
    if mode == "area":
        return NotImplemented if size is None else _adaptive(input, size)
    sizes, scales = (None if value is None else _each(value, dims) for value in (size, scale_factor))
    sides = []
    for dim in range(dims):
        count = input.centre.shape[2 + dim]
        unit = torch.eye(count, dtype=input.centre.dtype, device=input.centre.device)
        # Two copies on the other sides, which stay two: torch is wrong for one, if it is antialiased.
        wide = unit.reshape(1, count, *(count if other == dim else 1 for other in range(dims)))
        wide = wide.expand(1, count, *(count if other == dim else 2 for other in range(dims))).contiguous()
        size_alone = None if sizes is None else [sizes[dim] if other == dim else 2 for other in range(dims)]
        scale_alone = None if scales is None else [scales[dim] if other == dim else 1 for other in range(dims)]
        made = function(wide, size_alone, scale_alone).movedim(2 + dim, 2)[0]
        sides.append(made.flatten(2)[..., 0].mT if dims > 1 else made.mT)
    return resampled(input, function, sides)


@moment_rule(
    functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d, functional.adaptive_avg_pool3d, kind="exact"
)
def _adaptive(input: Moments, output_size: Any) -> Any:
    """Average windows, which may be of different sizes."""
    dims = input.centre.ndim - 2
    pools: Any = (functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d, functional.adaptive_avg_pool3d)
    sizes = [
        side if size is None else size
        for size, side in zip(_each(output_size, dims), input.centre.shape[2:], strict=True)
    ]
    if not any(side % size for size, side in zip(sizes, input.centre.shape[2:], strict=True)):
        pool: Any = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[dims - 1]
        kernel = tuple(side // size for size, side in zip(sizes, input.centre.shape[2:], strict=True))
        return _averaged(pool, input, kernel)
    sides = []
    for size, side in zip(sizes, input.centre.shape[2:], strict=True):
        unit = torch.eye(side, dtype=input.centre.dtype, device=input.centre.device)
        sides.append(functional.adaptive_avg_pool1d(unit[None], size)[0].mT)
    return resampled(input, lambda x: pools[dims - 1](x, sizes if dims > 1 else sizes[0]), sides)


def _each(value: Any, dims: int) -> tuple[Any, ...]:
    given = tuple(value) if isinstance(value, tuple | list | torch.Size) else (value,)
    return given * dims if len(given) == 1 else given


def _averaged(function: Callable[..., Tensor], x: Moments, *args: Any, **options: Any) -> Moments:
    """Average windows: with n entries each, var = (1 - r) mean v / n + r (mean sqrt v)^2."""
    mean = function(x.centre, *args, **options)
    # How many entries a window has, found by averaging: those of a window at the border may be fewer.
    ones = function(torch.ones_like(x.centre[:1, :1]), *args, **options)
    spike = torch.zeros_like(x.centre[:1, :1])
    spike.view(-1)[0] = 1
    weight = function(spike, *args, **options).view(-1)[0]
    apart = function(x.variance, *args, **options) * (weight / ones)
    if x.shared is None:
        return x.like(mean, apart * ones)
    together = function(x.variance.sqrt(), *args, **options).square()
    share = x.shared.view(-1, *(1,) * (mean.ndim - 1))
    return x.like(mean, apart * ones + share * (together - apart * ones))


def _windows(function: Any, dims: int) -> Callable[..., Any]:
    def rule(
        input: Moments,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        """Average windows; those at the border may have fewer entries."""
        if divisor_override is not None:
            return NotImplemented
        kernel, pads = _each(kernel_size, dims), _each(padding, dims)
        steps = kernel if stride is None or stride == [] else _each(stride, dims)
        if not ceil_mode and (count_include_pad or not any(pads)):
            return _averaged(function, input, kernel, steps, pads)
        sides = []
        for side, window, step, pad in zip(input.centre.shape[2:], kernel, steps, pads, strict=True):
            unit = torch.eye(side, dtype=input.centre.dtype, device=input.centre.device)
            made = functional.avg_pool1d(unit[None], window, step, pad, ceil_mode, count_include_pad)
            sides.append(made[0].mT)
        return resampled(
            input, lambda x: function(x, kernel, steps, pads, ceil_mode, count_include_pad=count_include_pad), sides
        )

    return rule


_function: Any
for _dims, _function in enumerate((functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d), 1):
    moment_rule(_function, kind="exact")(_windows(_function, _dims))
