"""The names of predictors, in one table that everything which takes a name reads."""

from __future__ import annotations

from typing import Literal, get_args

__all__ = ["ONE_PASS", "PREDICTORS", "How", "require_name"]

How = Literal[
    "sampling",
    "mean",
    "closed-form",
    "streamlined",
    "linearised",
    "moments",
    "margin",
    "principal",
    "covariance",
    "per-head",
]
PREDICTORS: tuple[str, ...] = get_args(How)
ONE_PASS = tuple(name for name in PREDICTORS if name not in ("sampling", "mean"))  # those with variances without draws


def require_name(how: str, *, among: tuple[str, ...] = PREDICTORS) -> None:
    """Raise where there is no predictor of this name.

    >>> require_name("magic", among=("sampling", "mean"))
    Traceback (most recent call last):
    ...
    ValueError: how must be one of ['sampling', 'mean'], but it is 'magic'.
    """
    if how not in among:
        raise ValueError(f"how must be one of {list(among)}, but it is {how!r}.")
