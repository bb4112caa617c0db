"""Means, sums and maxima, over positions that have a part of their noise in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bayesify.predict.streamlined._moments import Moments, moment_rule, same_size

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


def _maximum(function: Any) -> Callable[..., Any]:
    def rule(input: Moments, *args: Any, return_indices: bool = False, **options: Any) -> Any:
        """Return the moments of the entry with the largest mean, first order."""
        if return_indices:
            return NotImplemented
        mean, indices = function(input.centre, *args, return_indices=True, **options)
        start = 2 if input.centre.ndim == mean.ndim and mean.ndim > 2 else 1
        picked = input.variance.flatten(start).gather(-1, indices.flatten(start)).view(mean.shape)
        return input.like(mean, picked)

    return rule


for _function in (
    *(functional.max_pool1d, functional.max_pool2d, functional.max_pool3d),
    *(functional.adaptive_max_pool1d, functional.adaptive_max_pool2d, functional.adaptive_max_pool3d),
):
    moment_rule(_function)(_maximum(_function))


@moment_rule(torch.amax, Tensor.amax)
def _amax(input: Moments, dim: Any = (), keepdim: bool = False) -> Any:
    if not isinstance(dim, int):
        return NotImplemented
    mean, indices = input.centre.max(dim, keepdim=True)
    variance = input.variance.gather(dim, indices)
    return _reduced(input, *(x if keepdim else x.squeeze(dim) for x in (mean, variance)))
