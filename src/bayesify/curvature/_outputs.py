"""The curvature of the negative log-likelihood in a network's outputs, as vectors whose outer products add up to it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from bayesify.likelihoods import Likelihood

__all__ = ["Curvature", "columns", "output_hessian"]

Curvature = Literal["ggn", "fisher"]

MOST_COLUMNS = 2048


def columns(
    likelihood: Likelihood,
    output: Tensor,
    target: Tensor,
    *,
    curvature: Curvature,
    samples: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Give tensors s_1, ..., s_R of the output's shape, with sum_r s_r s_r' the curvature of each example.

    "ggn": -d^2 ln p / df^2, see `Likelihood.output_factor`: diag p - p p' for classes, p (1 - p) for yes or no,
    1 / noise variance for numbers. It is exact with R the number of outputs of an example (C - 1 for C classes), or,
    with `samples`, an unbiased estimate from so many random columns, such as labels drawn from the network's own
    prediction give. "fisher": the gradient of ln p of the true label. Where the noise is one number,
    `single_variance`, both are of unit noise, which so can be chosen afterwards.

    Args:
        likelihood: What the outputs mean.
        output: (B, ...).
        target: The labels; positions that do not count have no curvature.
        curvature: "ggn" or "fisher".
        samples: The number of labels drawn; None is exact.
        generator: For these.
    """
    unit = likelihood.single_variance() or 1.0
    if curvature == "fisher":
        yield _score(likelihood, output, target) * unit
        return
    factor = likelihood.output_factor(output, target, num_draws=samples, generator=generator) * math.sqrt(unit)
    positions, rank = factor.shape[1], factor.shape[3]
    if samples is not None:
        for column in range(rank):
            yield _placed(likelihood, factor[..., column], output)
        return
    if positions * rank > MOST_COLUMNS:
        raise ValueError(
            f"The exact GGN of outputs {tuple(output.shape[1:])} takes {positions * rank:,} backward passes for each "
            f"batch, and {MOST_COLUMNS:,} are the most that are made. Draw labels instead: Laplace(mc_labels=1)."
        )
    for position in range(positions):
        for column in range(rank):
            alone = torch.zeros_like(factor[..., column])
            alone[:, position] = factor[:, position, :, column]
            yield _placed(likelihood, alone, output)


def output_hessian(likelihood: Likelihood, output: Tensor, target: Tensor) -> Tensor:
    """Return the GGN's curvature of each example and position in its outputs, (B, T, F, F), of unit noise.

    T counts what lies between the batch and the outputs, or classes, of one position; with (B,) outputs F is one.
    """
    factor = likelihood.output_factor(output, target)
    hessian = factor @ factor.mT * (likelihood.single_variance() or 1.0)
    dim = likelihood.softmax_dim(output.ndim)
    size = output.shape[-1 if dim is None else dim] if output.ndim > 1 else 1
    if hessian.shape[-1] == 1:  # each output on its own
        return hessian.reshape(len(output), -1, size).diag_embed()
    if hessian.shape[-1] == size:
        return hessian
    blocks = hessian.reshape(len(output), -1, size, hessian.shape[-1] // size, size)  # (B, T, F, T, F)
    own: Tensor = blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1)
    if not torch.allclose(own.square().sum(), blocks.square().sum()):
        raise ValueError(
            f"ln p of a {type(likelihood).__name__} likelihood ties positions together, so that they have no curvature "
            "of their own. Use Laplace(structure='diagonal')."
        )
    return own


def _score(likelihood: Likelihood, output: Tensor, target: Tensor) -> Tensor:
    """Return d ln p(target | output) / d output."""
    with torch.enable_grad():
        leaf = output.detach().requires_grad_()
        (score,) = torch.autograd.grad(likelihood.log_prob(leaf, target).sum(), leaf)
    return score


def _placed(likelihood: Likelihood, column: Tensor, output: Tensor) -> Tensor:
    """Return a column of an `output_factor`, (B, T, F), in the place of the outputs."""
    dim = likelihood.softmax_dim(output.ndim)
    if dim is not None:
        column = column.reshape(output.movedim(dim, -1).shape).movedim(-1, dim)
    return column.reshape(output.shape).to(output.dtype)
