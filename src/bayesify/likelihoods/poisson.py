"""Counts whose variance is their mean."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesify.likelihoods.counts import Counts
from bayesify.likelihoods.shapes import drop_one, own_factor

__all__ = ["Poisson"]


class Poisson(Counts):
    """Counts with p(y) = r^y exp(-r) / y!, from ln r, as `torch.nn.PoissonNLLLoss` takes it.

    A last dimension of size one is dropped, of outputs and of targets. It has nothing to learn. Data vary more than
    that as a rule: `calibrate` finds a dispersion d, so that predictions have the variance r + d r^2 in each draw, and
    `NegativeBinomial` learns it.

    Example:
        >>> Poisson().log_prob(torch.zeros(1, 1), torch.tensor([2]))  # -1 - ln 2
        tensor([-1.6931])
    """

    kind = "poisson"
    extra_dispersion: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("extra_dispersion", torch.zeros(()))

    @property
    def dispersion(self) -> Tensor:
        """Return what calibration found; 0 before it."""
        return self.extra_dispersion

    def set_dispersion(self, value: float) -> None:
        """Change the calibration."""
        self.extra_dispersion.fill_(value)

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        """Return y ln r - r - ln y!, (B, ...)."""
        log_rate = self.centre(output)
        count = drop_one(target).to(log_rate.dtype)
        return count * log_rate - log_rate.exp() - torch.lgamma(count + 1)

    def output_factor(
        self,
        output: Tensor,
        target: Tensor | None = None,
        *,
        num_draws: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return sqrt(r) of each output, (B, N, 1, 1), or with random signs: the Hessian in ln r is r."""
        del target
        return own_factor(self.centre(output.detach()).exp(), num_draws=num_draws, generator=generator)
