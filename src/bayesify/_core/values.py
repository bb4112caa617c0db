"""Whether plain values, as a file has them, are what a function or a dataclass asks for."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

__all__ = ["fits", "misfits"]


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value of a JSON file has a type: plain types, `Literal`, unions, tuples, lists, dictionaries.

    >>> fits(2, float), fits(True, int), fits([1, 2], tuple[int, ...]), fits("a", Literal["b"] | None)
    (True, False, True, False)
    """
    origin, inside = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in inside)
    if origin in (Union, types.UnionType):
        return any(fits(value, choice) for choice in inside)
    if origin in (tuple, list):
        if not isinstance(value, list | tuple):
            return False
        if origin is list or inside[-1] is Ellipsis:
            return all(fits(item, inside[0]) for item in value)
        return len(value) == len(inside) and all(map(fits, value, inside))
    if origin is dict:
        return isinstance(value, dict) and all(
            fits(key, inside[0]) and fits(item, inside[1]) for key, item in value.items()
        )
    if hint is None or hint is type(None):
        return value is None
    if hint in (int, float) and isinstance(value, int):
        return not isinstance(value, bool) and -(2**63) <= value < 2**63
    return not isinstance(hint, type) or isinstance(value, hint)


def misfits(values: Mapping[str, Any], owner: Any) -> list[str]:
    """Return which values are not of the types that a dataclass's fields, or a function's arguments, have.

    >>> from bayesify import MCDropout
    >>> misfits({"p": "high", "epochs": 3}, MCDropout)
    ["p='high'"]
    """
    try:
        hints = get_type_hints(owner)
    except NameError:  # a type that is imported for type checkers only: the owner has to check it
        return []
    return [
        f"{name}={str(value)[:50]!r}" if isinstance(value, str) else f"{name}={str(value)[:50]}"
        for name, value in values.items()
        if name in hints and not fits(value, hints[name])
    ]
