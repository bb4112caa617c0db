"""No randomness at all."""

from __future__ import annotations

from torch import nn

from bayesify.laws.noise import Key
from bayesify.laws.posterior import Posterior

__all__ = ["PointPosterior"]


class PointPosterior(Posterior):
    """All mass on one network: every draw is the network itself, and one is enough."""

    def keys(self, num_samples: int | None, seed: int) -> list[Key]:
        """Return the only draw, however many are asked for."""
        self._count(num_samples)  # refuses nonsense
        return [Key(seed)]

    def sites(self) -> set[nn.Module]:
        """Return nothing: randomness enters nowhere."""
        return set()
