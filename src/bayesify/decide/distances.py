"""How far an input's features are from those of known inputs: three scores, a few lines each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

__all__ = ["DISTANCES", "KNN", "Distance", "Mahalanobis", "ViM"]

AT_ONCE = 2**22  # distances that are computed together


class Distance:
    """A score of features (B, D), higher = further from the known ones; its state is tensors by name.

    Attributes:
        name: What `Score` calls it.
    """

    name: ClassVar[str]

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors: Mapping[str, Tensor] = tensors

    def __call__(self, features: Tensor) -> Tensor:
        """Return the scores, (B,), in float64."""
        raise NotImplementedError

    def _state(self, name: str, features: Tensor) -> Tensor:
        return self.tensors[name].to(features.device)


class Mahalanobis(Distance):
    """The squared distance to the nearest class mean, in units of the covariance within classes (Lee et al. 2018).

    min_c (z - m_c)' S^-1 (z - m_c), S the mean over examples of (z_i - m_yi)(z_i - m_yi)', with its smallest
    eigenvalues raised to 1e-6 of the largest.

    Example:
        >>> z = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 2.0], [0.0, -2.0]])
        >>> Mahalanobis.fit(z, torch.zeros(4, dtype=torch.long))(torch.tensor([[0.0, 2.0]]))
        tensor([2.], dtype=torch.float64)
    """

    name: ClassVar[str] = "mahalanobis"

    @classmethod
    def fit(cls, features: Tensor, labels: Tensor) -> Mahalanobis:
        """Learn means and covariance of features (N, D) of labelled examples."""
        z = features.double()
        present = torch.unique(labels)
        means = torch.stack([z[labels == label].mean(0) for label in present])
        centred = z - means[torch.searchsorted(present, labels)]
        values, vectors = torch.linalg.eigh(centred.T @ centred / len(z))
        values = values.clamp_min(float(values[-1]) * 1e-6 + torch.finfo(torch.float64).tiny)
        return cls(means=means, root=vectors / values.sqrt())

    def __call__(self, features: Tensor) -> Tensor:
        """Return the scores, (B,)."""
        root = self._state("root", features)
        white, means = features.double() @ root, self._state("means", features) @ root
        return (white[:, None] - means).square().sum(-1).amin(1)


class KNN(Distance):
    """The distance to the k-th nearest known input, of features of length one (Sun et al. 2022).

    Example:
        >>> z = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, -1.0]])
        >>> KNN.fit(z, k=2)(torch.tensor([[3.0, 0.0]])) ** 2
        tensor([2.], dtype=torch.float64)
    """

    name: ClassVar[str] = "knn"

    @classmethod
    def fit(cls, features: Tensor, k: int = 10) -> KNN:
        """Keep features (N, D)."""
        if not 1 <= k <= len(features):
            raise ValueError(f"k must be from 1 to the number of known inputs, {len(features)}, but it is {k}.")
        return cls(known=_unit(features).float(), k=torch.tensor(k))

    def __call__(self, features: Tensor) -> Tensor:
        """Return the scores, (B,); N distances for each input, AT_ONCE of them in memory."""
        known, k = self._state("known", features).double(), int(self.tensors["k"])
        parts = torch.split(_unit(features), max(1, AT_ONCE // len(known)))
        return torch.cat([torch.cdist(part, known).kthvalue(k, dim=1).values for part in parts])


class ViM(Distance):
    """How large a class of its own would be for what features have outside of their principal space (Wang et al. 2022).

    With logits W z + b, x = z + W^+ b and P the projection onto what the `dim` largest principal directions of x leave
    out, the score is a |P x| - ln sum_c exp(logit_c), where a makes |P x| as large as the largest logit on average.

    Example:
        >>> z, weight = (
        ...     torch.tensor([[1.0, 0.0, 0.1], [-1.0, 0.0, 0.1]]),
        ...     torch.tensor([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]]),
        ... )
        >>> near, far = ViM.fit(z, weight, torch.zeros(2), dim=1)(torch.tensor([[1.0, 0.0, 0.1], [1.0, 0.0, 3.0]]))
        >>> bool(far > near)
        True
    """

    name: ClassVar[str] = "vim"

    @classmethod
    def fit(cls, features: Tensor, weight: Tensor, bias: Tensor, dim: int | None = None) -> ViM:
        """Learn the principal space of features (N, D); None leaves out half of the directions, but at most N / 2."""
        z, weight, bias = features.double(), weight.double(), bias.double()
        shift = torch.linalg.pinv(weight) @ bias
        x = z + shift
        width = z.shape[1]
        dim = min(width // 2, len(z) // 2) if dim is None else dim
        if not 0 < dim < width:
            raise ValueError(f"dim must be from 1 to {width - 1}, below the number of features, but it is {dim}.")
        _, vectors = torch.linalg.eigh(x.T @ x / len(x))
        rest = vectors[:, : width - dim]
        size = (x @ rest).norm(dim=1).mean().clamp_min(1e-12)
        scale = (z @ weight.T + bias).amax(1).mean() / size
        return cls(rest=rest, shift=shift, weight=weight, bias=bias, scale=scale)

    def __call__(self, features: Tensor) -> Tensor:
        """Return the scores, (B,)."""
        rest, shift, weight, bias, scale = (
            self._state(name, features) for name in ("rest", "shift", "weight", "bias", "scale")
        )
        z = features.double()
        found: Tensor = scale * ((z + shift) @ rest).norm(dim=1) - (z @ weight.T + bias).logsumexp(1)
        return found


DISTANCES: dict[str, type[Distance]] = {one.name: one for one in (Mahalanobis, KNN, ViM)}


def _unit(features: Tensor) -> Tensor:
    z = features.double()
    found: Tensor = z / z.norm(dim=1, keepdim=True).clamp_min(1e-12)
    return found
