"""Decisions: comparisons and places, which have no derivative and are those of the means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bayesify._core.trees import map_tensors
from bayesify.prediction.streamlined.moments import centre, moment_rule

__all__ = ["DECISIONS"]

DECISIONS = frozenset(
    {
        *("eq", "ne", "gt", "ge", "lt", "le", "greater", "greater_equal", "less", "less_equal", "not_equal", "equal"),
        *("isnan", "isinf", "isfinite", "isposinf", "isneginf", "isclose", "allclose", "signbit", "any", "all"),
        *("logical_and", "logical_or", "logical_xor", "logical_not", "argmax", "argmin", "argsort", "bucketize"),
    }
)


def _rule(operation: Callable[..., Any]) -> Callable[..., Any]:
    def rule(*args: Any, **options: Any) -> Any:
        plain, plain_options = map_tensors(centre, (args, options))
        return operation(*plain, **plain_options)

    return rule


for _name in sorted(DECISIONS):
    for _place, _called in ((Tensor, _name), (torch, _name), (Tensor, f"__{_name}__")):
        _found = getattr(_place, _called, None)
        if _found is not None:
            moment_rule(_found, kind="at the means")(_rule(_found))
