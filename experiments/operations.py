"""Which operations have a rule for means and variances, and how right it is, as a table made from the registry."""

from __future__ import annotations

import re
import sys
from typing import Any

from bayesify.prediction.overrides import name_of
from bayesify.prediction.streamlined import rule_kinds
from experiments.tables import markdown

__all__ = ["OPERATIONS", "operations_table"]

KINDS = ("exact", "matched", "first order", "at the means")


def operations_table() -> str:
    """Return a line for each kind of rule and each file of rules, with the operations' names."""
    found: dict[tuple[int, str], set[str]] = {}
    for operation, (rule, kind) in rule_kinds().items():
        if rule.__module__.startswith("bayesify.") and not _is_example(rule):
            assert kind is not None
            found.setdefault((KINDS.index(kind), _about(rule)), set()).add(_plain(operation))
    lines = [["rule", "of", "operations"]]
    for (kind_index, about), names in sorted(found.items()):
        lines.append([KINDS[kind_index], about, " ".join(f"`{name}`" for name in sorted(names))])
    return markdown(lines)


def _is_example(rule: Any) -> bool:
    """Return whether a docstring, which this process has executed, made the rule."""
    code = getattr(rule, "__code__", None)
    return code is not None and code.co_filename.startswith("<doctest")


def _about(rule: Any) -> str:
    """Return what a file of rules is about: its first words."""
    words = (sys.modules[rule.__module__].__doc__ or "").splitlines()[0]
    return re.split(r"[.:;]|, (?:as|over|unrolled|which|whose|with)\b| of tensors", words)[0].lower()


def _plain(operation: Any) -> str:
    """Return an operation's name as one calls it, whether it is a function, a method or an operator."""
    name = name_of(operation)
    return name if name in ("__getitem__", "__setitem__") else name.strip("_")


OPERATIONS = {"operations": operations_table}
