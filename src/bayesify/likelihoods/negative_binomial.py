"""Counts that vary more than their mean."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.likelihoods.count_prediction import LARGEST, count_log_prob
from bayesify.likelihoods.counts import Counts
from bayesify.likelihoods.shapes import drop_one, own_factor

__all__ = ["NegativeBinomial"]


class NegativeBinomial(Counts):
    """Counts with the mean r and the variance r + d r^2, from ln r, with a learned dispersion d.

    A Poisson count whose rate is gamma distributed around r, with the relative variance d. A last dimension of size one
    is dropped, of outputs and of targets. `calibrate` multiplies the dispersion of predictions.

    Args:
        dispersion: d; None learns it, from 1.

    Example:
        >>> NegativeBinomial(1.0).log_prob(torch.zeros(1, 1), torch.tensor([2]))  # geometric: (1 / 2)^3
        tensor([-2.0794])
    """

    kind = "negative-binomial"
    dispersion_scale: Tensor
    log_dispersion: Tensor

    def __init__(self, dispersion: float | None = None) -> None:
        super().__init__()
        if dispersion is not None and not 0 < dispersion < math.inf:
            raise ValueError(f"dispersion must be None or a positive number, but it is {dispersion!r}.")
        self.fixed = None if dispersion is None else float(dispersion)
        self.register_buffer("dispersion_scale", torch.ones(()))
        if dispersion is None:
            self.log_dispersion = nn.Parameter(torch.zeros(()))

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"dispersion": self.fixed}

    def extra_repr(self) -> str:
        """Show the dispersion."""
        return f"dispersion={'learned' if self.fixed is None else self.fixed}"

    def _own(self) -> Tensor:
        """Return the dispersion of the loss."""
        return self.log_dispersion.exp() if self.fixed is None else self.dispersion_scale.new_tensor(self.fixed)

    @property
    def dispersion(self) -> Tensor:
        """Return the dispersion that predictions have."""
        return self._own().detach() * self.dispersion_scale

    def set_dispersion(self, value: float) -> None:
        """Change the calibration."""
        self.dispersion_scale.copy_(value / self._own().detach())

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        """Return ln p of the counts, (B, ...); see `count_log_prob`."""
        log_rate = self.centre(output)
        size = (1 / self._own().to(log_rate.dtype)).clamp(1 / LARGEST, LARGEST)
        return count_log_prob(drop_one(target).to(log_rate.dtype), log_rate, size)

    def output_factor(
        self,
        output: Tensor,
        target: Tensor | None = None,
        *,
        num_draws: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return the root of the Fisher information in ln r, r / (1 + d r), (B, N, 1, 1), or with random signs."""
        del target
        log_rate = self.centre(output.detach())
        own = self._own().detach().to(log_rate.dtype)
        information = 1 / ((-log_rate).exp() + own)
        return own_factor(information, num_draws=num_draws, generator=generator)
