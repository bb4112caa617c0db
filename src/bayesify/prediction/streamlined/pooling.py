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

__all__ = ["over_positions", "reduced", "summed_variance"]


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


def over_positions(ndim: int, dims: Any) -> bool:
    """Return whether dimensions are positions of an example, and not features or examples.

    Positions are tokens of (B, T, D), pixels of (B, C, H, W), and both sides at once of pixels with channels last,
    (B, H, W, C); one side of those cannot be told from channels.
    """
    if dims is None:
        return False
    wanted = {dim % ndim for dim in (dims if isinstance(dims, list | tuple | torch.Size) else (dims,))}
    if ndim > 3 and wanted == set(range(1, ndim - 1)):
        return True
    return wanted <= ({1} if ndim == 3 else set(range(2, ndim)))


@moment_rule(torch.sum, Tensor.sum, kind="exact")
def _sum(input: Moments, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Moments:
    def total(x: Tensor) -> Tensor:
        return x.sum(dtype=dtype) if dim is None else x.sum(dim, keepdim=keepdim, dtype=dtype)

    variance = summed_variance(input, total, positions=over_positions(input.centre.ndim, dim))
    return reduced(input, total(input.centre), variance)


@moment_rule(torch.mean, Tensor.mean, kind="exact")
def _mean(input: Moments, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Moments:
    found = _sum(input, dim, keepdim, dtype=dtype)
    count = input.centre.numel() / max(1, found.centre.numel())
    return reduced(input, found.centre / count, found.variance / count**2)


def reduced(x: Moments, mean: Tensor, variance: Tensor) -> Moments:
    """Return a pair that was made of another along dimensions; positions' common part stays while examples do."""
    keeps = mean.ndim > 0 and x.centre.ndim > 0 and same_size(mean.shape[0], x.centre.shape[0])
    return Moments.make(mean, variance, x.shared if keeps else None)


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
    moment_rule(_pool, kind="matched")(_max_pool(_pool, _dims))
    moment_rule(_adapted, kind="matched")(_adaptive_max(_adapted, _pool, _dims))


@moment_rule(torch.amax, Tensor.amax, kind="matched")
def _amax(input: Moments, dim: Any = (), keepdim: bool = False) -> Any:
    """Return the moments of the largest entry by Clark's formulas, two by two."""
    dims = [dim] if isinstance(dim, int) else list(dim) or list(range(input.centre.ndim))
    if settings().first_order:
        if len(dims) != 1:
            return NotImplemented
        mean, indices = input.centre.max(dims[0], keepdim=True)
        variance = input.variance.gather(dims[0], indices)
        return reduced(input, *(x if keepdim else x.squeeze(dims[0]) for x in (mean, variance)))
    places = sorted(one % input.centre.ndim for one in dims)
    if not all(isinstance(input.centre.shape[place], int) for place in places):
        return NotImplemented  # the number of examples is not known while a pass is traced
    means, variances = (
        x.movedim(places, tuple(range(len(places)))).flatten(0, len(places) - 1) for x in (input.centre, input.variance)
    )
    positions = 0 not in places and means.ndim > 1 and over_positions(input.centre.ndim, dims)
    found = largest(means, variances, _correlation(input, means.ndim - 1) if positions else None)
    if keepdim:
        shape = [1 if place in places else size for place, size in enumerate(input.centre.shape)]
        found = found[0].reshape(shape), found[1].reshape(shape)
    return reduced(input, *found)


@moment_rule(torch.amin, Tensor.amin, kind="matched")
def _amin(input: Moments, dim: Any = (), keepdim: bool = False) -> Any:
    found = _amax(input.like(-input.centre, input.variance), dim, keepdim)
    return found if found is NotImplemented else -found
