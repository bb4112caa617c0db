"""How commands answer: what they found, and two kinds of errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["JobError", "Output", "UsageError", "aligned", "finite"]


class UsageError(Exception):
    """The command line names something that does not exist, or does not fit together: exit code 2."""


class JobError(Exception):
    """The command line is right, and the job failed: exit code 1."""


@dataclass(frozen=True)
class Output:
    """What a command has to say.

    Attributes:
        text: For people.
        data: For `--json`.
        failed: Whether a part of the job failed, which the text tells.
    """

    text: str
    data: dict[str, Any]
    failed: bool = False


def finite(value: Any) -> Any:
    """Replace numbers that JSON does not have (NaN, infinity) by None.

    >>> finite({"a": [1.0, float("nan")]})
    {'a': [1.0, None]}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def aligned(pairs: Mapping[str, Any]) -> str:
    """Write names and values in two columns.

    >>> print(aligned({"nll": 0.12345, "seconds": 3}))
    nll      0.1235
    seconds  3
    """
    width = max(map(len, pairs))
    shown = {name: f"{value:.4f}" if isinstance(value, float) else value for name, value in pairs.items()}
    return "\n".join(f"{name:<{width}}  {'-' if value is None else value}" for name, value in shown.items())
