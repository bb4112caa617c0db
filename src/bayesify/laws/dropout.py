"""Dropout masks as the random part of a network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from bayesify.laws.noise import Noise, NoiseTerms
from bayesify.laws.patching import forbid_fused_layers
from bayesify.laws.posterior import Posterior

if TYPE_CHECKING:
    from bayesify.methods import Method

__all__ = ["AlphaDropoutNoise", "DropoutNoise", "NoisePosterior", "draws_fold", "noisy_layers"]


class NoisePosterior(Posterior):
    """A network some of whose layers are noisy: dropout masks, noise in normalisation, noise on inputs.

    A draw of it is a draw of every layer's noise. Several draws fold into one batch.
    """

    def __init__(self, network: nn.Module, method: Method) -> None:
        super().__init__(network, method)
        forbid_fused_layers(network, self.sites())

    @property
    def folds(self) -> bool:
        """Whether draws can share a batch."""
        return draws_fold(self.network, self.noise)

    def independent_rows(self, inputs: Any) -> bool:
        """Return True: fresh noise is drawn for each row."""
        del inputs
        return True

    def sites(self) -> set[nn.Module]:
        """Return the noisy layers."""
        return noisy_layers(self.network)


def noisy_layers(network: nn.Module) -> set[nn.Module]:
    """Return the layers that take their noise from a posterior."""
    return {module for module in network.modules() if isinstance(getattr(module, "noise", None), Noise)}


def draws_fold(network: nn.Module, noise: Noise) -> bool:
    """Return whether draws of a noisy network can share a batch.

    Not where a layer mixes examples even in evaluation mode, nor where noise acts on something without a batch.
    """
    norms = (m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    without_batch = any(batch.dim is None for batch in (noise.batch_dims or {}).values())
    return not without_batch and all(norm.running_mean is not None for norm in norms)


class DropoutNoise(nn.Module):
    """Dropout that the posterior's mode switches, not `train()`: y = x m / (1 - p), m ~ Bernoulli(1 - p).

    A draw has one mask for every example, so that it is a function of the input (Gal and Ghahramani 2016, eq. 3);
    a fresh pass has a mask per example. The predictive of one example is the same.

    Args:
        p: The probability that an entry is dropped.
        noise: The posterior's noise.
        site: The layer's name.
        channel_dim: None drops entries; 1 drops whole channels, as Dropout1d, 2d and 3d do.
    """

    def __init__(self, p: float, noise: Noise, site: str, *, channel_dim: int | None) -> None:
        super().__init__()
        self.p = p
        self.noise = noise
        self.site = site
        self.channel_dim = channel_dim

    def forward(self, x: Tensor) -> Tensor:
        """Drop."""
        if self.p == 0:
            return x
        return self.noise.perturb(x, self._combine, site=self.site, law="uniform", channel_dim=self.channel_dim)

    def _combine(self, x: Tensor, uniform: Tensor) -> Tensor:
        if self.p == 1:
            return x * (uniform < 0)
        return x * ((uniform >= self.p).to(x.dtype) / (1 - self.p))

    def noise_terms(self, x: Tensor) -> NoiseTerms:
        """Return y = x (1 + sqrt(p / (1 - p)) e)."""
        del x
        if self.p == 1:
            return NoiseTerms(0.0, 0.0)
        return NoiseTerms(1.0, (self.p / (1 - self.p)) ** 0.5, channel_dims=self._dims())

    def _dims(self) -> tuple[int, ...] | None:
        return None if self.channel_dim is None else (self.channel_dim,)

    def extra_repr(self) -> str:
        """Show the rate and what is dropped."""
        return f"p={self.p}, {'entries' if self.channel_dim is None else 'channels'}"


class AlphaDropoutNoise(DropoutNoise):
    """Dropout for SELU networks: y = a (x m + t (1 - m)) + b keeps mean zero and variance one.

    t = -lambda alpha is SELU's limit, a = ((1 - p)(1 + p t^2))^(-1/2), b = -a p t (Klambauer et al. 2017).
    """

    _LIMIT = -1.7580993408473766

    def _combine(self, x: Tensor, uniform: Tensor) -> Tensor:
        if self.p == 1:
            return x * (uniform < 0)
        scale = self._scale()
        shift = -scale * self.p * self._LIMIT
        keep = (uniform >= self.p).to(x.dtype)
        return scale * (x * keep + self._LIMIT * (1 - keep)) + shift

    def _scale(self) -> float:
        scale: float = ((1 - self.p) * (1 + self.p * self._LIMIT**2)) ** -0.5
        return scale

    def noise_terms(self, x: Tensor) -> NoiseTerms:
        """Return y = a (1 - p) x + a sqrt(p (1 - p)) (x - t) e; b takes off what t adds to the mean."""
        del x
        if self.p == 1:
            return NoiseTerms(0.0, 0.0)
        std = self._scale() * (self.p * (1 - self.p)) ** 0.5
        return NoiseTerms(self._scale() * (1 - self.p), std, -std * self._LIMIT, self._dims())
