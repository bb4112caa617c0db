"""Tables on the scale of their training part, and the way back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesify.data.split import Split

__all__ = ["Scale", "Standardised", "standardise"]


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
