"""The tensors of the last draws, which predictions with the same seed need again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bayesify._core.random import Key
from bayesify.laws.stacking import Stack

__all__ = ["KeptDraws"]

MOST_NUMBERS = 2**24  # 64 megabytes in single precision


class KeptDraws:
    """Tensors of draws, by the draws' names, as long as what they are made of has not changed.

    A pass that shares weights reads them; making them costs a normal number each, which takes several times as long.
    Memory has at most `MOST_NUMBERS` of them.
    """

    def __init__(self) -> None:
        self._state: Any = None
        self._found: dict[tuple[Key, ...], dict[str, Stack]] = {}
        self._numbers = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptDraws:
        """Return an empty one: what is kept is only for speed."""
        copied = memo[id(self)] = KeptDraws()
        return copied

    def __reduce__(self) -> tuple[type[KeptDraws], tuple[()]]:
        """Pickle as an empty one."""
        return (KeptDraws, ())

    def get(
        self, keys: tuple[Key, ...], state: Any, numbers: int, make: Callable[[], dict[str, Stack]]
    ) -> dict[str, Stack]:
        """Return the tensors of some draws, together.

        Args:
            keys: The draws.
            state: What changes when these draws do.
            numbers: How many numbers they have.
            make: Makes them.
        """
        if state != self._state:
            self.forget()
            self._state = state
        known = self._found.get(keys)
        if known is not None:
            return dict(known)
        made = make()
        if self._numbers + numbers > MOST_NUMBERS:
            self._found, self._numbers = {}, 0
        if numbers <= MOST_NUMBERS:
            self._found[keys] = made
            self._numbers += numbers
        return dict(made)

    def forget(self) -> None:
        """Let go of all of them."""
        self._state, self._found, self._numbers = None, {}, 0
