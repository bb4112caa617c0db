"""Two loaders side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

__all__ = ["Paired"]


class Paired:
    """Batches of one loader, each with the next of another, which begins again when it ends.

    The other one's order is decided by a number that is drawn when an epoch begins, and not by what training has drawn
    since: a run that goes on in the middle of an epoch meets the same pairs.

    Args:
        first: Decides the length.
        second: Begins anew in each epoch.

    Example:
        >>> list(Paired([1, 2, 3], ["a", "b"]))
        [(1, 'a'), (2, 'b'), (3, 'a')]
    """

    def __init__(self, first: Iterable[Any], second: Iterable[Any]) -> None:
        self.first = first
        self.second = second

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.first)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Give the pairs."""
        seed = int(torch.randint(2**31, ()))
        others: Iterator[Any] = iter(())
        rounds = 0
        for batch in self.first:
            other = next(others, None)
            if other is None:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(seed + rounds)
                    others = iter(self.second)
                    other = next(others, None)
                rounds += 1
                if other is None:
                    raise ValueError("The ood_loader gave no batch. Check its data set, batch size and drop_last.")
            yield batch, other
