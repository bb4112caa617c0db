"""Batch normalisation and an affine map for each row, in one function that keeps its input alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from bayesify._core.maths import scaled_channels

__all__ = ["batch_norm_each"]

CHUNK = 2**18  # numbers


def batch_norm_each(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """Return a_b (x - m) / sqrt(v + eps) + c_b, with a scale and a shift for each row and channel, (N, C).

    In training m and v are the batch's, and update the running ones; else they are these. As one function it writes no
    normalised activation, which autograd would keep for the scales beside the input: memory is that of plain batch
    normalisation, and so is the time.
    """
    settings = (running_mean, running_var, training, momentum, eps)
    result: Tensor = _BatchNormEach.apply(x, scale, shift, settings)  # type: ignore[no-untyped-call]
    return result


class _BatchNormEach(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, settings: tuple[Any, ...]) -> Tensor:
        running_mean, running_var, training, momentum, eps = settings
        flat = x.reshape(*x.shape[:2], -1)
        if training:
            if flat.shape[0] * flat.shape[2] < 2:
                raise ValueError(
                    f"Batch normalisation in training needs more than one value per channel, but got {tuple(x.shape)}."
                )
            mean, var = _statistics(flat, running_mean, running_var, momentum)
        else:
            mean, var = running_mean.clone(), running_var
        factor = (var + eps).rsqrt()
        slope = scale * factor
        offset = shift - slope * mean
        ctx.save_for_backward(x, scale, mean, factor)
        ctx.training = training
        return scaled_channels(x, slope, offset).detach()  # no view, so that an activation may change it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, mean, factor = ctx.saved_tensors
        flat, flow = x.reshape(*x.shape[:2], -1), grad.reshape(*x.shape[:2], -1)
        of_shift, products = _sums(flow, flat)
        of_scale = (products - mean * of_shift) * factor
        if not ctx.needs_input_grad[0]:
            return None, of_scale, of_shift, None
        slope = scale * factor
        if not ctx.training:
            return scaled_channels(flow, slope).view(x.shape), of_scale, of_shift, None
        # The statistics depend on x too: take off the mean of the gradient, and its part along x.
        count = flat.shape[0] * flat.shape[2]
        along = factor**2 * (scale * of_scale).sum(0) / count
        level = along * mean - factor * (scale * of_shift).sum(0) / count
        of_x = scaled_channels(flow, slope, level.expand_as(slope)).addcmul_(flat, along[:, None], value=-1)
        return of_x.view(x.shape), of_scale, of_shift, None


def _statistics(
    flat: Tensor, running_mean: Tensor | None, running_var: Tensor | None, momentum: float
) -> tuple[Tensor, Tensor]:
    """Return mean and variance of each channel of (N, C, L), and update the running ones."""
    if not _by_rows(flat):
        found: tuple[Tensor, Tensor] = torch.ops.aten.batch_norm_update_stats(flat, running_mean, running_var, momentum)
        return found
    # On a CPU torch adds up number by number; whole rows are several times faster.
    count = flat.shape[0] * flat.shape[2]
    mean = flat.sum(-1).sum(0) / count
    squares = torch.zeros_like(mean)
    for rows in _chunks(flat):
        squares += torch.linalg.vector_norm(flat[rows] - mean[:, None], dim=-1).square().sum(0)
    if running_mean is not None and running_var is not None:
        # As torch's own update, one that autograd does not count: another pass of the graph may have kept them.
        running_mean.data.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.data.lerp_((squares / (count - 1)).to(running_var.dtype), momentum)
    return mean, squares / count


def _by_rows(x: Tensor) -> bool:
    """Return whether torch's functions of whole rows of an activation are the fast ones."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


def _sums(flow: Tensor, flat: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum_l g and sum_l g x of each row and channel of (N, C, L)."""
    if not _by_rows(flat) or flat.shape[2] == 1:
        return flow.sum(-1), (flow * flat).sum(-1)
    # Both in one reading, as gradients of scales and shifts of channels that group normalisation takes one by one.
    number = flat.shape[0] * flat.shape[1]
    mean, factor = flat.new_zeros(1, number), flat.new_ones(1, number)
    _, products, sums = torch.ops.aten.native_group_norm_backward(
        flow.contiguous(),
        flat.contiguous(),
        mean,
        factor,
        factor[0],
        1,
        number,
        flat.shape[2],
        number,
        [False, True, True],
    )
    return sums.view(flat.shape[:2]), products.view(flat.shape[:2])


def _chunks(flat: Tensor) -> Iterator[slice]:
    """Cut the rows so that several operations on a chunk find it in the cache."""
    size = len(flat)
    if flat.device.type == "cpu":
        size = max(1, CHUNK // max(1, flat.shape[1] * flat.shape[2]))
    for start in range(0, len(flat), size):
        yield slice(start, start + size)
