"""Means, sums and maxima, over positions that have a part of their noise in common."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bayesify.prediction.streamlined.maxima import largest
from bayesify.prediction.streamlined.moments import Moments, moment_rule, same_size, settings

__all__ = ["summed_variance"]


def summed_variance(x: Moments, total: Callable[[Tensor], Tensor], *, positions: bool) -> Tensor:
    """Return the variance of a sum: (1 - r) sum v + r (sum sqrt v)^2, with r the positions' common part.

    Entries of different features count as independent.
    """
    apart = total(x.variance)
    if x.shared is None or not positions:
        return apart
    together = total(x.variance.sqrt()).square()
    share = x.shared.reshape(-1, *(1,) * (apart.ndim - 1)) if apart.ndim else x.shared.mean()
    if apart.ndim and not same_size(share.shape[0], apart.shape[0]):
        share = x.shared.mean()
    return apart + share * (together - apart)


def _over_positions(ndim: int, dims: Any) -> bool:
    """Return whether dimensions are tokens of (B, T, D) or pixels of (B, C, H, W), and not features or examples."""
    if dims is None:
        return False
    wanted = {dim % ndim for dim in (dims if isinstance(dims, list | tuple | torch.Size) else (dims,))}
    return wanted <= ({1} if ndim == 3 else set(range(2, ndim)))


@moment_rule(torch.sum, Tensor.sum)
def _sum(input: Moments, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Moments:
    def total(x: Tensor) -> Tensor:
        return x.sum(dtype=dtype) if dim is None else x.sum(dim, keepdim=keepdim, dtype=dtype)

    variance = summed_variance(input, total, positions=_over_positions(input.centre.ndim, dim))
    return _reduced(input, total(input.centre), variance)


@moment_rule(torch.mean, Tensor.mean)
def _mean(input: Moments, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Moments:
    found = _sum(input, dim, keepdim, dtype=dtype)
    count = input.centre.numel() / max(1, found.centre.numel())
    return _reduced(input, found.centre / count, found.variance / count**2)


def _reduced(x: Moments, mean: Tensor, variance: Tensor) -> Moments:
    keeps = mean.ndim > 0 and x.centre.ndim > 0 and same_size(mean.shape[0], x.centre.shape[0])
    return Moments.make(mean, variance, x.shared if keeps else None)


def _average(function: Callable[..., Tensor], x: Moments, *args: Any, **options: Any) -> Moments:
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


@moment_rule(functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d, functional.adaptive_avg_pool3d)
def _adaptive(input: Moments, output_size: Any) -> Any:
    dims = input.centre.ndim - 2
    sizes = (output_size,) * dims if isinstance(output_size, int) else tuple(output_size)
    sides = input.centre.shape[2:]
    targets = tuple(side if size is None else size for size, side in zip(sizes, sides, strict=True))
    if any(side % target for side, target in zip(sides, targets, strict=True)):
        return NotImplemented  # windows of different sizes
    kernel = tuple(side // target for side, target in zip(sides, targets, strict=True))
    pool = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[dims - 1]
    return _average(pool, input, kernel)


def _windows(function: Any) -> Callable[..., Any]:
    def rule(
        input: Moments,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        padded = any(padding) if isinstance(padding, tuple | list) else bool(padding)
        if ceil_mode or divisor_override is not None or (padded and not count_include_pad):
            return NotImplemented
        stride = kernel_size if stride is None else stride
        return _average(function, input, kernel_size, stride, padding)

    return rule


_function: Any
for _function in (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d):
    moment_rule(_function)(_windows(_function))


def _picked(function: Any, x: Moments, *args: Any, **options: Any) -> Moments:
    """Return the moments of the entry with the largest mean, first order."""
    mean, indices = function(x.centre, *args, return_indices=True, **options)
    start = 2 if x.centre.ndim == mean.ndim and mean.ndim > 2 else 1
    picked = x.variance.flatten(start).gather(-1, indices.flatten(start)).view(mean.shape)
    return x.like(mean, picked)


def _each(value: Any, dims: int) -> tuple[int, ...]:
    sizes = tuple(value) if isinstance(value, tuple | list) else (value,)
    return sizes * dims if len(sizes) == 1 else sizes


def _slices(
    x: Tensor, low: float, kernel: tuple[int, ...], stride: Any, padding: Any, dilation: Any, ends: Any
) -> Tensor:
    """Return the entries of all windows, (n, ...): what lies outside is so low that it is never the largest."""
    pads: list[int] = []
    for dim in reversed(range(len(kernel))):
        pads += [padding[dim], max(0, ends[dim] - x.shape[dim - len(kernel)] - padding[dim])]
    wide = functional.pad(x, pads, value=low) if any(pads) else x
    found = []
    for offsets in product(*(range(size) for size in kernel)):
        part = wide
        for dim, offset in enumerate(offsets):
            place = dim - len(kernel)
            first = offset * dilation[dim]
            reach = ends[dim] - (kernel[dim] - 1) * dilation[dim]
            part = part.narrow(place, first, reach)
            if stride[dim] > 1:
                steps = [slice(None)] * part.ndim
                steps[place] = slice(None, None, stride[dim])
                part = part[tuple(steps)]
        found.append(part)
    return torch.stack(found)


def _max_pool(function: Any, dims: int) -> Callable[..., Any]:
    def rule(
        input: Moments,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        """Return the moments of the largest entry of each window by Clark's formulas, two by two."""
        if return_indices:
            return NotImplemented
        options = {"stride": stride, "padding": padding, "dilation": dilation, "ceil_mode": ceil_mode}
        if settings().first_order:
            return _picked(function, input, kernel_size, **options)
        kernel = _each(kernel_size, dims)
        steps = kernel if stride is None or stride == [] else _each(stride, dims)
        gaps, pads = _each(dilation, dims), _each(padding, dims)
        one = input.centre.reshape(-1, *input.centre.shape[-dims:])[:1, None]
        sizes = function(one, kernel_size, **options).shape[-dims:]
        ends = [
            (size - 1) * step + (width - 1) * gap + 1
            for size, step, width, gap in zip(sizes, steps, kernel, gaps, strict=True)
        ]
        low = torch.finfo(input.centre.dtype).min / 4
        means, variances = (
            _slices(x, value, kernel, steps, pads, gaps, ends)
            for x, value in ((input.centre, low), (input.variance, 0.0))
        )
        batched = input.centre.ndim == dims + 2
        return input.like(*largest(means, variances, _correlation(input, means.ndim - 1) if batched else None))

    return rule


def _correlation(x: Moments, ndim: int) -> Tensor | None:
    """Return how much two positions of an example have in common, so that it meets (B, ...)."""
    return None if x.shared is None else x.shared.clamp(0, 1).view(-1, *(1,) * (ndim - 1))


def _adaptive_max(function: Any, pool: Any, dims: int) -> Callable[..., Any]:
    def rule(input: Moments, output_size: Any, return_indices: bool = False) -> Any:
        if return_indices:
            return NotImplemented
        sides = input.centre.shape[-dims:]
        sizes = [side if size is None else size for size, side in zip(_each(output_size, dims), sides, strict=True)]
        if settings().first_order or any(side % size for side, size in zip(sides, sizes, strict=True)):
            return _picked(function, input, output_size)  # windows of different sizes
        return pool(input, tuple(side // size for side, size in zip(sides, sizes, strict=True)))

    return rule


for _dims, (_pool, _adapted) in enumerate(
    (
        (functional.max_pool1d, functional.adaptive_max_pool1d),
        (functional.max_pool2d, functional.adaptive_max_pool2d),
        (functional.max_pool3d, functional.adaptive_max_pool3d),
    ),
    1,
):
    moment_rule(_pool)(_max_pool(_pool, _dims))
    moment_rule(_adapted)(_adaptive_max(_adapted, _pool, _dims))


@moment_rule(torch.amax, Tensor.amax)
def _amax(input: Moments, dim: Any = (), keepdim: bool = False) -> Any:
    """Return the moments of the largest entry by Clark's formulas, two by two."""
    dims = [dim] if isinstance(dim, int) else list(dim) or list(range(input.centre.ndim))
    if settings().first_order:
        if len(dims) != 1:
            return NotImplemented
        mean, indices = input.centre.max(dims[0], keepdim=True)
        variance = input.variance.gather(dims[0], indices)
        return _reduced(input, *(x if keepdim else x.squeeze(dims[0]) for x in (mean, variance)))
    places = sorted(one % input.centre.ndim for one in dims)
    if not all(isinstance(input.centre.shape[place], int) for place in places):
        return NotImplemented  # the number of examples is not known while a pass is traced
    means, variances = (
        x.movedim(places, tuple(range(len(places)))).flatten(0, len(places) - 1) for x in (input.centre, input.variance)
    )
    positions = 0 not in places and means.ndim > 1 and _over_positions(input.centre.ndim, dims)
    found = largest(means, variances, _correlation(input, means.ndim - 1) if positions else None)
    if keepdim:
        shape = [1 if place in places else size for place, size in enumerate(input.centre.shape)]
        found = found[0].reshape(shape), found[1].reshape(shape)
    return _reduced(input, *found)


@moment_rule(torch.amin, Tensor.amin)
def _amin(input: Moments, dim: Any = (), keepdim: bool = False) -> Any:
    found = _amax(input.like(-input.centre, input.variance), dim, keepdim)
    return found if found is NotImplemented else -found
