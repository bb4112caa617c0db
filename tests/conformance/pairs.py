"""Pairs instead of products: rows of values in which any two values of two axes meet at least once."""

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

Pair = tuple[int, int, int, int]  # axis, place in it, another axis, place in that


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return rows with a value of each axis, such that every two values of different axes are in a row together.

    Greedy and deterministic. The first pair that no row has yet begins a new one; each other axis then takes, of the
    values that bring in most new pairs, the one that was used least. Two axes give their product.

    >>> pairwise("ab", "xy", "12")
    [('a', 'x', '1'), ('a', 'y', '2'), ('b', 'x', '2'), ('b', 'y', '1')]
    """
    sizes = [len(axis) for axis in axes]
    missing = dict.fromkeys(_pairs(sizes))  # ordered, unlike a set
    used = [[0] * size for size in sizes]
    rows = []
    while missing:
        one, first, other, second = next(iter(missing))
        row = {one: first, other: second}
        for axis in range(len(axes)):
            if axis in row:
                continue

            def merit(place: int, axis: int = axis) -> tuple[int, int, int]:
                new = sum(_pair(axis, place, *fixed) in missing for fixed in row.items())  # noqa: B023
                return -new, used[axis][place], place

            row[axis] = min(range(sizes[axis]), key=merit)
        for axis, place in row.items():
            used[axis][place] += 1
        for two in itertools.combinations(sorted(row.items()), 2):
            missing.pop(_pair(*two[0], *two[1]), None)
        rows.append(tuple(values[row[axis]] for axis, values in enumerate(axes)))
    return rows


def covers(rows: Sequence[tuple[Hashable, ...]], *axes: Sequence[Hashable]) -> bool:
    """Return whether every two values of different axes are in a row together."""
    found = {(i, row[i], j, row[j]) for row in rows for i, j in itertools.combinations(range(len(axes)), 2)}
    wanted = (
        (i, one, j, other)
        for i, j in itertools.combinations(range(len(axes)), 2)
        for one in axes[i]
        for other in axes[j]
    )
    return all(pair in found for pair in wanted)


def _pairs(sizes: Sequence[int]) -> list[Pair]:
    return [
        (i, first, j, second)
        for i, j in itertools.combinations(range(len(sizes)), 2)
        for first in range(sizes[i])
        for second in range(sizes[j])
    ]


def _pair(one: int, first: int, other: int, second: int) -> Pair:
    return (one, first, other, second) if one < other else (other, second, one, first)
