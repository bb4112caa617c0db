"""Draws of Gaussian outputs, which cost no pass of a network."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bayesify._core.maths import at_least_float32
from bayesify.likelihoods.softmax_integrals import covariance_root

__all__ = ["gaussian_draws"]

AT_ONCE = 2**22  # numbers


def gaussian_draws(
    mean: Tensor, variance: Tensor | None, covariance: Tensor | None, *, num_draws: int, seed: int
) -> Iterator[Tensor]:
    """Yield draws of outputs, (S', B, ...), some at a time.

    They are the same standard normals, in pairs of opposite sign, for every example, so that a prediction does not
    depend on what it is made together with; with covariances also for every position of an example.

    >>> draws = torch.cat(list(gaussian_draws(torch.zeros(3, 2), torch.ones(3, 2), None, num_draws=4, seed=0)))
    >>> draws.shape, bool((draws[0] == -draws[1]).all()), bool((draws[:, 0] == draws[:, 2]).all())
    (torch.Size([4, 3, 2]), True, True)
    """
    if num_draws < 1:
        raise ValueError(f"num_draws must be at least 1, but it is {num_draws}.")
    mean = at_least_float32(mean)
    event = mean.shape[1:] if covariance is None else mean.shape[-1:]
    half = torch.randn((num_draws + 1) // 2, *event, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    normals = torch.stack([half, -half], 1).flatten(0, 1)[:num_draws].to(mean)
    at_once = max(1, AT_ONCE // max(1, mean.numel()))
    if covariance is None:
        assert variance is not None
        std = at_least_float32(variance).clamp_min(0).sqrt()
        for part in torch.split(normals, at_once):
            yield mean + std * part[:, None]
    else:
        root = covariance_root(at_least_float32(covariance).to(mean.dtype))
        for part in torch.split(normals, at_once):
            yield mean + (root @ part.T).movedim(-1, 0)
