"""Check the dictionaries that fitted objects are rebuilt from."""

from __future__ import annotations

from typing import Any

__all__ = ["check_state"]


def check_state(state: dict[str, Any], *, kind: str, fields: set[str]) -> None:
    """Refuse the state of another object, of an unknown version, or with fields missing."""
    if state.get("kind") != kind:
        raise ValueError(f"The state is of {state.get('kind')!r}; pass one of {kind}.to_dict().")
    if state.get("version") != 1:
        raise ValueError(
            f"{kind} state of version {state.get('version')!r} is unknown, this release reads "
            "version 1; update bayesify or fit again."
        )
    if fields - state.keys():
        missing = ", ".join(sorted(fields - state.keys()))
        raise ValueError(f"{kind} state lacks {missing}; pass the whole of {kind}.to_dict().")
