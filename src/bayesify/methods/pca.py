"""Samples in their own span: fewer coordinates, the same distances."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Reduction", "fold_generator", "reduce_samples"]

COLUMNS = 2**16  # weights that are looked at in double precision at a time


@dataclass(frozen=True)
class Reduction:
    """An isometry between the affine hull of samples and R^r, w = mean + scale basis' c.

    Attributes:
        mean: Mean of the samples, (D,).
        basis: Orthonormal rows, (r, D).
        scale: Makes the coordinates' average variance one.
        coordinates: Of the samples, (M, r).
        residual_variance: Of each weight, what the basis leaves out, (D,); 0 if it spans all samples.
    """

    mean: Tensor
    basis: Tensor
    scale: float
    coordinates: Tensor
    residual_variance: Tensor

    def fold(self, last: nn.Linear, into: nn.Linear) -> None:
        """Write a linear layer to coordinates as one to weights, into another: W = scale basis' A, b = mean + ..."""
        with torch.no_grad():
            into.weight.copy_(self.scale * (self.basis.T @ last.weight))
            into.bias.copy_(self.mean + self.scale * (self.basis.T @ last.bias))


def reduce_samples(samples: Tensor, rank: int | None = None) -> Reduction:
    """Find the coordinates of samples (M, D) in their span, by the eigenvectors of their M x M Gram matrix.

    Costs M^2 D products; distances between samples are kept exactly while r is M - 1, the default.

    Args:
        samples: (M, D), with M at least 2.
        rank: The largest number r of coordinates; None takes all.

    Example:
        >>> samples = torch.randn(5, 50, dtype=torch.float64)
        >>> found = reduce_samples(samples)
        >>> torch.allclose(found.scale * torch.cdist(*[found.coordinates] * 2), torch.cdist(samples, samples))
        True
    """
    if samples.ndim != 2 or samples.shape[0] < 2:
        raise ValueError(f"At least two samples are needed, as a matrix (M, D), not {tuple(samples.shape)}.")
    gram = torch.zeros(len(samples), len(samples), dtype=torch.float64, device=samples.device)
    for part in _centred(samples):
        gram.addmm_(part, part.T)
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0).clamp_min(0), vectors.flip(1)
    # Centring takes one dimension; of the rest, those beyond rounding count: of the products, and of the samples' own
    # numbers, which are off by at most half an eps of themselves.
    own = torch.finfo(samples.dtype).eps ** 2 * samples.square().sum(dtype=torch.float64)
    known = int((values > torch.maximum(values[0] * 1e-10, own)).sum())
    kept = max(1, min(known, samples.shape[0] - 1, rank or known))
    lengths = values[:kept].sqrt()
    coordinates = vectors[:, :kept] * lengths
    axes = (vectors[:, :kept] / lengths.clamp_min(1e-300)).T
    basis, left = [], []
    for part in _centred(samples):
        rows = axes @ part
        basis.append(rows.to(samples.dtype))
        outside = part.square().sum(0) - (values[:kept, None] * rows.square()).sum(0)
        left.append((outside / (len(samples) - 1)).clamp_min(0).to(samples.dtype))
    scale = float(coordinates.square().mean().sqrt()) or 1.0
    residual = torch.cat(left) if kept < known else torch.zeros_like(samples[0])
    mean = samples.mean(0, dtype=torch.float64).to(samples.dtype)
    return Reduction(mean, torch.cat(basis, 1), scale, (coordinates / scale).to(samples.dtype), residual)


def _centred(samples: Tensor) -> Iterator[Tensor]:
    """Return centred samples in double precision, some weights at a time: a copy of all may be too large."""
    for first in range(0, samples.shape[1], COLUMNS):
        wide = samples[:, first : first + COLUMNS].double()
        yield wide - wide.mean(0)


@torch.no_grad()
def fold_generator(small: nn.Sequential, reduction: Reduction, into: nn.Sequential) -> None:
    """Write a generator of coordinates into one of weights, with the same hidden layers."""
    for source, target in zip(list(small)[:-1], list(into)[:-1], strict=True):
        target.load_state_dict(source.state_dict())
    last, wide = small[-1], into[-1]
    assert isinstance(last, nn.Linear)
    assert isinstance(wide, nn.Linear)
    reduction.fold(last, wide)
