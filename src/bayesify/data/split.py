"""The plain objects that every reader returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["Split", "hold_out"]


@dataclass(frozen=True, eq=False)
class Split(Dataset[tuple[Tensor, Tensor]]):
    """Hold the inputs and targets of one part of a data set.

    It is a torch ``Dataset`` of ``(input, target)`` pairs, so a ``DataLoader`` takes it, and
    ``TensorDataset(*split.tensors)`` is the same data.

    Attributes:
        inputs: ``(N, ...)``.
        targets: ``(N,)`` class indices, or ``(N, D)`` real values.

    >>> split = Split(torch.zeros(3, 1, 8, 8), torch.tensor([0, 1, 2]))
    >>> len(split), split[1][1].item(), len(split.part(slice(2)))
    (3, 1, 2)
    """

    inputs: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        """Refuse inputs and targets of different lengths."""
        if self.inputs.ndim == 0 or self.targets.ndim == 0:
            raise ValueError("inputs and targets need a first dimension that counts the examples")
        if len(self.inputs) != len(self.targets):
            raise ValueError(
                f"{len(self.inputs)} inputs but {len(self.targets)} targets: "
                "the two files or tensors do not belong together"
            )

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return ``(inputs, targets)``, as a ``TensorDataset`` does."""
        return self.inputs, self.targets

    def part(self, which: slice | Tensor) -> Split:
        """Return the examples of a slice, or of a tensor of indices."""
        return Split(self.inputs[which], self.targets[which])

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return one ``(input, target)`` pair."""
        return self.inputs[index], self.targets[index]


def hold_out(split: Split, fraction: float = 0.1, *, seed: int) -> tuple[Split, Split]:
    """Cut a random validation part off a training part.

    Args:
        split: N examples.
        fraction: the share that is held out, rounded to whole examples.
        seed: the same seed gives the same parts.

    Returns:
        The remaining part and the held-out part, both in the original order.

    >>> rest, held = hold_out(Split(torch.arange(10.0), torch.arange(10)), 0.2, seed=0)
    >>> len(rest), len(held), torch.cat([rest.targets, held.targets]).unique().numel()
    (8, 2, 10)
    """
    held = round(fraction * len(split))
    if not 0 < held < len(split):
        raise ValueError(
            f"a fraction of {fraction} holds out {held} of {len(split)} examples; both parts need at least one"
        )
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(seed))
    return split.part(order[held:].sort().values), split.part(order[:held].sort().values)
