"""Laplace's approximation with independent weights."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bayesify._core.random import Key
from bayesify.laws.gaussian import GaussianLaw
from bayesify.laws.laplace.evidence import Spectrum
from bayesify.laws.laplace.laplace import LaplaceLaw
from bayesify.laws.passes import Pass, Patch
from bayesify.laws.tensors import TensorTree, tensor_of

__all__ = ["DiagonalLaw", "constant_rows"]


def constant_rows(network: nn.Module) -> dict[str, int]:
    """Return the row of each embedding's table that is a constant, the vector of padding, by the table's name."""
    return {
        f"{name}.weight" if name else "weight": module.padding_idx
        for name, module in network.named_modules()
        if isinstance(module, nn.Embedding) and module.padding_idx is not None
    }


class DiagonalLaw(LaplaceLaw, GaussianLaw):
    """N(w, diag(h / noise variance + delta)^-1), a `GaussianLaw` whose psi = -ln(h / noise variance + delta) / 2.

    Args:
        network: The network.
        names: The random parameters.
        groups: Which of them share a prior precision.
        precision: The prior precision at the start.
        power: See `Residuals`.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        names: list[str],
        groups: Mapping[str, list[str]],
        precision: float,
        power: int,
    ) -> None:
        like = {name: network.get_parameter(name).detach() for name in names}
        types = {name: torch.promote_types(p.dtype, torch.float32) for name, p in like.items()}
        nothing = {name: torch.full_like(p, -math.inf, dtype=types[name]) for name, p in like.items()}
        GaussianLaw.__init__(self, network, log_stds=nothing)
        self.curvature = TensorTree({name: torch.zeros_like(p, dtype=types[name]) for name, p in like.items()})
        self.constant = {name: row for name, row in constant_rows(network).items() if name in like}
        self._start(dict(groups), precision=precision, power=power)

    def drawn(self, key: Key | None) -> dict[str, Tensor]:
        """Return the weights of a draw by name; of a new one where there is no key."""
        return GaussianLaw.drawn(self, key)

    def patch(self, p: Pass) -> Patch:
        """Return what independent Gaussians put in the network's place."""
        return GaussianLaw.patch(self, p)

    def curvature_tensors(self) -> list[Tensor]:
        """Return the sums of squared gradients."""
        return list(self.curvature.as_dict().values())

    def complete_curvature(self, factor: float) -> None:
        """Let the sums stand for all data."""
        for tensor in self.curvature_tensors():
            tensor.mul_(factor)

    def reopen_curvature(self) -> None:
        """Leave the sums as they are."""

    def times_precision(self, tensors: Mapping[str, Tensor], power: float = 1.0) -> dict[str, Tensor]:
        """Multiply by (h / noise variance + delta)^power, and constants by 0."""
        curvature, found = self.curvature.as_dict(), {}
        for name in self.names:
            factor = (curvature[name] * self.scale + self._precision_of(name)) ** power
            if name in self.constant:
                factor[self.constant[name]] = 0
            found[name] = factor * tensors[name]
        return found

    @torch.no_grad()
    def refresh(self) -> None:
        """Set the log standard deviations."""
        curvature, scale = self.curvature.as_dict(), self.scale
        for name in self.names:
            log_std = tensor_of(self.log_std, name)
            if not bool(self.complete):
                log_std.fill_(-math.inf)
                continue
            log_std.copy_(torch.log(curvature[name] * scale + self._precision_of(name)).mul_(-0.5))
            if name in self.constant:
                log_std[self.constant[name]] = -math.inf

    def spectra(self) -> list[Spectrum]:
        """Return the diagonal itself for each group."""
        return [
            Spectrum(torch.cat([self._random(name) for name in names]), self._square_norm(names))
            for names in self.groups.values()
        ]

    def _random(self, name: str) -> Tensor:
        values = self.curvature.as_dict()[name].double()
        if name in self.constant:
            kept = torch.arange(len(values), device=values.device) != self.constant[name]
            values = values[kept]
        return values.flatten()
