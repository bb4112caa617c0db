"""Validation data in two halves: one chooses, the other promises."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from bayesify._core.files import fingerprint
from bayesify._core.inputs import as_loader
from bayesify._core.trees import batch_rows, first_tensor, split_batch, take_rows, without_arrays

__all__ = ["Half", "halves"]


def halves(loader: Iterable[Any], seed: int, *, function: str) -> tuple[Half, Half]:
    """Return two loaders of the batches of one, each with half of the examples, the same in every round.

    Of each pair of successive examples one goes to each half, by a coin of the seed: whatever the batches, and however
    the data are sorted.

    Args:
        loader: Batches of (inputs, targets), in the same order in every round.
        seed: Of the coins.
        function: Whose data they are, for messages.
    """
    batches = as_loader(loader, function)
    if iter(batches) is batches:
        raise TypeError(f"{function} reads the validation data several times. Give a DataLoader, or a list of batches.")
    marks: list[str] = []
    return Half(batches, seed, 0, marks, function), Half(batches, seed, 1, marks, function)


class Half:
    """Half of the examples of a loader, in its batches."""

    def __init__(self, batches: Iterable[Any], seed: int, which: int, marks: list[str], function: str) -> None:
        self.batches, self.seed, self.which, self.marks, self.function = batches, seed, which, marks, function

    def __iter__(self) -> Iterator[Any]:
        """Give the batches; raise where their targets are others than in the round before."""
        generator = torch.Generator().manual_seed(self.seed)
        last = torch.empty(0, dtype=torch.long)  # the coin of a pair whose second example comes with the next batch
        for number, batch in enumerate(self.batches):
            batch = without_arrays(batch)
            self._compare(number, batch)
            rows = batch_rows(batch)
            coins = torch.randint(2, ((rows - len(last) + 1) // 2,), generator=generator)
            each = torch.cat([1 - last, torch.stack([coins, 1 - coins], 1).flatten()])
            last = coins[-1:] if len(each) > rows else coins[:0]
            chosen = each[:rows] == self.which
            if bool(chosen.any()):
                yield take_rows(batch, chosen)

    def _compare(self, number: int, batch: Any) -> None:
        target = first_tensor(split_batch(batch)[1])
        mark = "" if target is None else fingerprint(target)
        if number == len(self.marks):
            self.marks.append(mark)
        elif self.marks[number] != mark:
            raise ValueError(
                f"The validation loader gives its examples in another order in every round, so that {self.function} "
                "cannot keep the half that chooses from the half that promises. Give a loader with shuffle=False."
            )
