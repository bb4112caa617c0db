"""Marks of tests: what takes long is slow, and quick tests keep a part of it."""

from collections.abc import Container, Iterable
from typing import Any

import pytest
import torch

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


MIXTURE = "torch.multinomial gave other numbers in torch 2.6, so that a seed's draw is of another component"


def slow_but(quick: Container[Any], values: Iterable[Any]) -> list[Any]:
    """Return values for `parametrize`, all of them marked slow but a few."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]


def slow_product(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """Return all pairs of two lists for `parametrize`; quick are so many that every value is in one, in turn.

    >>> [pair.values for pair in slow_product("abc", "xy") if not pair.marks]
    [('a', 'x'), ('b', 'y'), ('c', 'x')]
    """
    one, other = list(first), list(second)
    return [
        pytest.param(a, b, marks=[] if i % len(other) == j % len(one) else [pytest.mark.slow])
        for i, a in enumerate(one)
        for j, b in enumerate(other)
    ]
