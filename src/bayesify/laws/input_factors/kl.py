"""Divergences of a mixture of Gaussians from a Gaussian prior, summed over independent factors."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Divergence", "average_kl", "divergence", "gaussian_kl", "mean_kl", "mixture_log_prob", "sampled_kl"]

Divergence = Literal["mean", "average", "mc"]


def gaussian_kl(mean: Tensor, variance: Tensor, prior_std: float) -> Tensor:
    """Return KL(N(mean, v) || N(1, s^2)) = ln(s) - ln(v)/2 + (v + (mean - 1)^2) / (2 s^2) - 1/2, elementwise.

    >>> gaussian_kl(torch.tensor(1.0), torch.tensor(0.25), 0.5)
    tensor(0.)
    """
    variance = variance.clamp_min(torch.finfo(variance.dtype).tiny)  # what is not random has no gradient
    log_ratio = math.log(prior_std) - 0.5 * variance.log()
    return log_ratio + (variance + (mean - 1) ** 2) / (2 * prior_std**2) - 0.5


def mean_kl(means: Tensor, stds: Tensor, prior_std: float) -> Tensor:
    """Return the paper's surrogate: the divergence of the law of the average of one draw of each component.

    KL(N(mean_k m_k, sum_k s_k^2 / K^2) || N(1, s^2)), eq. 22-24. Exact for K = 1. For K > 1 it is no bound: it is
    smallest where each s_k is sqrt(K) s, does not see how far components lie apart, and is (ln K + 1/K - 1) / 2 for
    each factor where every component is the prior.

    Args:
        means: (K, N).
        stds: (K, N).
        prior_std: s.
    """
    return gaussian_kl(means.mean(0), (stds**2).sum(0) / len(stds) ** 2, prior_std).sum()


def average_kl(means: Tensor, stds: Tensor, prior_std: float) -> Tensor:
    """Return A = (1/K) sum_k KL(N_k || p), with A - ln K <= KL(q || p) <= A for the whole network's q."""
    return gaussian_kl(means, stds**2, prior_std).sum() / len(means)


def mixture_log_prob(z: Tensor, means: Tensor, stds: Tensor) -> Tensor:
    """Return ln q(z) = ln (1/K) sum_k prod_n N(z_n; m_kn, s_kn^2), for z (R, N): (R,)."""
    stds = stds.clamp_min(torch.finfo(stds.dtype).tiny)
    scaled = (z[:, None] - means) / stds
    each = -0.5 * (scaled**2).sum(-1) - stds.log().sum(-1) - 0.5 * z.shape[-1] * math.log(2 * math.pi)
    return each.logsumexp(-1) - math.log(len(means))


def sampled_kl(means: Tensor, stds: Tensor, prior_std: float, noise: Tensor) -> Tensor:
    """Return an unbiased estimate of KL(q || p) of the whole network's mixture, from one draw of each component.

    (1/K) sum_k ln q(z_k) - ln p(z_k), z_k = m_k + s_k e_k.

    Args:
        means: (K, N).
        stds: (K, N).
        prior_std: s.
        noise: Standard normal e, (K, N).
    """
    z = means + stds * noise
    prior = -0.5 * (((z - 1) / prior_std) ** 2).sum(-1) - z.shape[-1] * math.log(prior_std * math.sqrt(2 * math.pi))
    return (mixture_log_prob(z, means, stds) - prior).mean()


def divergence(kind: Divergence, means: Tensor, stds: Tensor, prior_std: float) -> Tensor:
    """Return the divergence of the wanted kind, in nats."""
    if kind == "mc":
        return sampled_kl(means, stds, prior_std, torch.randn_like(means))
    return (mean_kl if kind == "mean" else average_kl)(means, stds, prior_std)
