"""Progress bars."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TypeVar

from tqdm import tqdm

__all__ = ["bar"]

T = TypeVar("T")


def bar(items: Iterable[T], label: str, *, shown: bool, **options: Any) -> Iterable[T]:
    """Show how far an iteration is, with the time left; without `shown`, iterate."""
    if not shown:
        return items
    return tqdm(items, desc=label, file=sys.stderr, dynamic_ncols=True, leave=False, **options)
