"""Batch normalisation and an affine map for each row, in one function that keeps its input alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

__all__ = ["batch_norm_each"]


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
            mean, var = torch.ops.aten.batch_norm_update_stats(flat, running_mean, running_var, momentum)
        else:
            mean, var = running_mean.clone(), running_var
        factor = (var + eps).rsqrt()
        slope = scale * factor
        ctx.save_for_backward(x, scale, mean, factor)
        ctx.training = training
        y: Tensor = flat * slope[..., None]
        return y.add_((shift - slope * mean)[..., None]).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, mean, factor = ctx.saved_tensors
        flat, flow = x.reshape(*x.shape[:2], -1), grad.reshape(*x.shape[:2], -1)
        of_shift = flow.sum(-1)
        work = flow * flat
        of_scale = (work.sum(-1) - mean * of_shift) * factor
        if not ctx.needs_input_grad[0]:
            return None, of_scale, of_shift, None
        of_x = flow * (scale * factor)[..., None]
        if ctx.training:
            # The statistics depend on x too: take off the mean of the gradient, and its part along x.
            count = flat.shape[0] * flat.shape[2]
            along = factor**2 * (scale * of_scale).sum(0) / count
            level = factor * (scale * of_shift).sum(0) / count
            of_x.sub_(torch.mul(flat, along[:, None], out=work)).add_((along * mean - level)[:, None])
        return of_x.view(x.shape), of_scale, of_shift, None
