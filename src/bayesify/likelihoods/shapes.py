"""Outputs that each are on their own: their shapes, random columns of their curvature, whether targets are right."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayesify.likelihoods.pooling import Pooling, Temperatures

__all__ = ["check_averaged", "check_shapes", "drop_one", "has_wrong", "own_factor"]


def drop_one(x: Tensor, *, lead: int = 1) -> Tensor:
    """Return outputs or targets without a last dimension of size one; `lead` dimensions come before the event.

    >>> drop_one(torch.zeros(1, 1)).shape, drop_one(torch.zeros(4, 1), lead=2).shape
    (torch.Size([1]), torch.Size([4, 1]))
    """
    return x[..., 0] if x.ndim > lead and x.shape[-1] == 1 else x


def own_factor(
    information: Tensor, *, num_draws: int | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """Return the `Likelihood.output_factor` of outputs (B, ...) that each have their own information, (B, N, 1, R).

    Its root; with `num_draws` the root with random signs, so that products of different outputs are zero on average.

    >>> own_factor(torch.tensor([[4.0, 9.0]])).flatten()
    tensor([2., 3.])
    """
    root = information.sqrt().reshape(len(information), -1, 1, 1)
    if num_draws is None:
        return root
    signs = torch.randint(2, (*root.shape[:-1], num_draws), generator=generator, device=root.device)
    return root * (2 * signs - 1).to(root) / math.sqrt(num_draws)


def check_shapes(output: Tensor, target: Tensor, *, what: str) -> None:
    """Raise where there is not one output for each target."""
    if drop_one(output).shape != drop_one(target).shape:
        raise ValueError(
            f"Outputs of shape {tuple(output.shape)} do not fit targets of shape {tuple(target.shape)}: this "
            f"likelihood needs one {what} per target."
        )


def check_averaged(pooling: Pooling | float, temperatures: Temperatures, *, what: str) -> None:
    """Raise where calibration is asked for another average of draws than that of their probabilities."""
    if pooling not in ("auto", "probs") or temperatures == "each":
        raise ValueError(
            f"pooling={pooling!r} and temperatures={temperatures!r} are for logits of classes: {what}. Leave both as "
            "they are."
        )


def has_wrong(target: Tensor, right: Tensor) -> bool:
    """Return whether a value of targets is wrong, where asking does not wait for a device."""
    return target.device.type == "cpu" and target.numel() > 0 and not bool(right.all())
