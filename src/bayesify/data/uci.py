"""The UCI regression tables with their published train/test splits, and standardisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bayesify.data._io import PathLike, read_arrays
from bayesify.data.split import Split

__all__ = ["Scale", "Standardised", "read_uci", "standardise"]


def read_uci(path: PathLike, fold: int = 0) -> tuple[Split, Split]:
    """Read the training and test part of one published split of an npz file.

    The file holds ``x (n, d)``, ``y (n,)`` and ``test_idx (splits, n_test)``; the training part is
    what ``test_idx[fold]`` leaves, in the order of the table.

    Returns:
        ``(train, test)`` with inputs ``(N, d)`` and targets ``(N, 1)``, float64.
    """
    x, y, test_idx = read_arrays(path, "x", "y", "test_idx")
    shapes_fit = x.ndim == 2 and y.shape == x.shape[:1] and test_idx.ndim == 2
    if not shapes_fit or test_idx.dtype.kind not in "iu":
        raise ValueError(
            f"{path} holds x {x.shape}, y {y.shape}, test_idx {test_idx.shape} {test_idx.dtype}; "
            "expected (n, d), (n,) and integers (splits, n_test)"
        )
    if not 0 <= fold < len(test_idx):
        raise ValueError(f"{path} has the splits 0..{len(test_idx) - 1}, not {fold}")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError(f"{path} holds values that are not finite: clean the table first")
    test = np.zeros(len(y), dtype=bool)
    chosen = test_idx[fold]
    if chosen.min(initial=0) < 0 or chosen.max(initial=0) >= len(y):
        raise ValueError(f"{path}: split {fold} points outside the {len(y)} rows of the table")
    test[chosen] = True
    if test.sum() != len(chosen) or test.all():
        raise ValueError(f"{path}: split {fold} repeats a row or leaves nothing to train on")
    # The published order of the test part is kept.
    return _split(x[~test], y[~test]), _split(x[chosen], y[chosen])


def _split(x: NDArray[Any], y: NDArray[Any]) -> Split:
    return Split(torch.from_numpy(x.astype(np.float64)), torch.from_numpy(y.astype(np.float64))[:, None])


@dataclass(frozen=True, eq=False)
class Scale:
    """Hold the mean and standard deviation of each column, ``(D,)`` each.

    >>> scale = Scale.of(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
    >>> scale.apply(torch.tensor([[3.0, 6.0]]))
    tensor([[1., 1.]])
    """

    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Scale:
        """Measure the columns of ``(N, D)`` values; a constant column keeps its unit."""
        wide = values.double()
        mean, std = wide.mean(0), wide.std(0, correction=0)
        # Rounding can leave a constant column with a tiny deviation, which must not be divided by.
        std = torch.where(wide.amin(0) == wide.amax(0), torch.ones_like(std), std)
        return cls(mean.to(values.dtype), std.to(values.dtype))

    def apply(self, values: Tensor) -> Tensor:
        """Return ``(values - mean) / std``."""
        return (values - self.mean) / self.std

    def undo(self, values: Tensor) -> Tensor:
        """Return ``values * std + mean``, the inverse of `apply`."""
        return values * self.std + self.mean


@dataclass(frozen=True, eq=False)
class Standardised:
    """Hold splits on the scale of the training part, and the scales to go back.

    Attributes:
        splits: the training part and the others, in the order given.
        inputs: the scale of the inputs.
        targets: the scale of the targets: a predicted standard deviation times ``targets.std``, a
            log density minus ``log targets.std``, is that of the original units.
    """

    splits: tuple[Split, ...]
    inputs: Scale
    targets: Scale


def standardise(train: Split, *others: Split) -> Standardised:
    """Standardise inputs and targets with the means and deviations of the training part only.

    >>> train = Split(torch.tensor([[0.0], [2.0]]), torch.tensor([[10.0], [30.0]]))
    >>> test = Split(torch.tensor([[3.0]]), torch.tensor([[20.0]]))
    >>> done = standardise(train, test)
    >>> done.splits[1].inputs, done.splits[1].targets, done.targets.std
    (tensor([[2.]]), tensor([[0.]]), tensor([10.]))
    """
    if not len(train):
        raise ValueError("the training part is empty: there is nothing to measure a scale on")
    inputs, targets = Scale.of(train.inputs), Scale.of(train.targets)
    splits = tuple(Split(inputs.apply(part.inputs), targets.apply(part.targets)) for part in (train, *others))
    return Standardised(splits, inputs, targets)
