"""Which rows are for training, for validation and for the test: by a seed, or by a column."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from bayesify.data.records import Records, Remark

__all__ = ["Parts"]

NAMES = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val"}
NAMES |= {"test": "test", "testing": "test"}
BLOCK = 20


@dataclass(frozen=True)
class Parts:
    """Say to which part a row belongs.

    By a seed it depends on the number of the row alone, so that a file is never counted first: of each 20 rows that
    follow each other the shares are taken at random, which keeps parts of small and of sorted files near their shares.

    Attributes:
        shares: Of train, val and test; they are divided by their sum.
        seed: Another seed gives other parts.
        column: The column that holds 'train', 'val' or 'test' instead.

    >>> parts = Parts()
    >>> names = list(parts.of(Records.of([{}] * 100)))
    >>> names.count("train"), names.count("val"), names.count("test")
    (70, 15, 15)
    """

    shares: tuple[float, float, float] = (0.7, 0.15, 0.15)
    seed: int = 0
    column: str | None = None

    def __post_init__(self) -> None:
        """Check the shares."""
        if len(self.shares) != 3 or not all(share >= 0 for share in self.shares) or not self.shares[0] > 0:
            raise ValueError(f"The shares of train, val and test are three numbers, as .7,.15,.15, not {self.shares}.")

    def of(self, records: Records) -> list[str]:
        """Return the part of each row: 'train', 'val', 'test', or '' where the column says something else."""
        if self.column is None:
            return [_part(self.seed, self.shares, row) for row in records.rows]
        if self.column not in records.columns:
            there = ", ".join(map(repr, records.columns))
            raise ValueError(f"There is no column {self.column!r} that says what is for training; there are {there}.")
        return [NAMES.get(str(value).strip().lower(), "") for value in records.columns[self.column]]

    def select(self, stretches: Iterable[Records], part: str) -> Iterator[Records]:
        """Give the rows of one part."""
        for records in stretches:
            yield records.part([i for i, name in enumerate(self.of(records)) if name == part])

    def remarks(self, records: Records) -> list[Remark]:
        """Say which rows are in no part."""
        text = f"the column {self.column!r} says none of train, val and test"
        return [Remark(row, text) for row, name in zip(records.rows, self.of(records), strict=True) if not name]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"shares": list(self.shares), "seed": self.seed, "column": self.column}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Parts:
        """Return what `to_dict` described."""
        a, b, c = values["shares"]
        return cls((float(a), float(b), float(c)), int(values["seed"]), values["column"])


def _part(seed: int, shares: tuple[float, float, float], row: int) -> str:
    block, place = divmod(row - 1, BLOCK)
    return _block(seed, shares, block)[place]


@lru_cache(maxsize=64)
def _block(seed: int, shares: tuple[float, float, float], block: int) -> tuple[str, ...]:
    """Return the parts of some rows that follow each other, in an order that hashes give."""
    marks = [_hash(f"{seed}/{block}/{place}") for place in range(BLOCK)]
    order = sorted(range(BLOCK), key=marks.__getitem__)
    offset = _hash(f"{seed}/{block}") / 2**64  # shares that are no whole number of rows come out right on average
    train, val, _ = (share / sum(shares) for share in shares)
    names = [""] * BLOCK
    for rank, place in enumerate(order):
        level = (rank + offset) / BLOCK
        names[place] = "train" if level < train else "val" if level < train + val else "test"
    return tuple(names)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
