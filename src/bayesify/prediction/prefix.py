"""What runs before the first randomness is the same for every draw: run it once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.prediction.layout import Layout

__all__ = ["Prefix", "shared_prefix"]

Versions = list[tuple[Tensor, int]]
Forwards = Mapping[nn.Module, Callable[..., Any]]
_PLAIN = (bool, int, float, str, type, torch.dtype, torch.device)


class Prefix:
    """Outputs of the deterministic modules that a pass calls before the first noise, in the order of the calls.

    In the first pass every outermost such call is kept; in later passes on the same inputs it is answered without
    computing. Modules that change their inputs in place, or whose output is changed in place later, run each time.

    Args:
        layout: Which modules are deterministic, and which are random.
    """

    def __init__(self, layout: Layout) -> None:
        self.sites = layout.sites
        self.remembered = {module: self._deterministic(module.forward) for module in layout.deterministic}
        self.kept: list[tuple[Any, Versions] | None] = []
        self.position = 0
        self.inside = 0
        self.fired = False

    def forwards(self, forwards: Forwards) -> Forwards:
        """Begin a pass over the same inputs as the passes before; return the forwards of its modules.

        Args:
            forwards: Those that the law gives to some modules.
        """
        self.position, self.inside, self.fired = 0, 0, False
        random = {module: module.forward for module in self.sites} | dict(forwards)
        return {**self.remembered, **{module: self._random(forward) for module, forward in random.items()}}

    def forget(self) -> None:
        """Let go of what was kept, which the forwards would hold until garbage is collected."""
        self.kept, self.remembered = [], {}

    def _deterministic(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward that is answered from memory where that is right."""

        def remembered(*args: Any, **kwargs: Any) -> Any:
            if self.fired or self.inside:
                return forward(*args, **kwargs)
            index, self.position = self.position, self.position + 1
            first = index == len(self.kept)
            if first:
                self.kept.append(None)
            known = self.kept[index]
            if known is not None:
                output, versions = known
                if all(tensor._version == version for tensor, version in versions):
                    return output
                self.kept[index] = None
            before = _look((args, kwargs))[0]
            self.inside += 1
            try:
                output = forward(*args, **kwargs)
            finally:
                self.inside -= 1
            if first and _same(before, _look((args, kwargs))[0]):
                versions, complete = _look(output)
                self.kept[index] = (output, versions) if complete else None
            return output

        return remembered

    def _random(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward that marks the end of the prefix."""

        def marked(*args: Any, **kwargs: Any) -> Any:
            self.fired = True
            return forward(*args, **kwargs)

        return marked


def shared_prefix(layout: Layout, passes: int) -> Prefix | None:
    """Return what lets passes on the same inputs share what is deterministic; None where nothing is, or is known."""
    if passes == 1 or layout.opaque or not layout.deterministic or not layout.sites:
        return None
    return Prefix(layout)


def _same(before: Versions, after: Versions) -> bool:
    if len(before) != len(after):
        return False
    return all(a is b and m == n for (a, m), (b, n) in zip(before, after, strict=True))


def _look(tree: Any) -> tuple[Versions, bool]:
    """Return the tensors in a structure with their versions, which count changes in place.

    Also returns whether all of it could be looked into.
    """
    found: Versions = []
    seen: set[int] = set()
    complete = True
    stack = [tree]
    while stack:
        value = stack.pop()
        if isinstance(value, Tensor):
            inference = value.is_inference()  # such tensors count nothing
            found.append((value, 0 if inference else value._version))
            complete = complete and not inference
        elif value is None or isinstance(value, _PLAIN) or id(value) in seen:
            continue
        elif isinstance(value, Mapping):
            stack.extend(value.values())
        elif isinstance(value, list | tuple):
            stack.extend(value)
        elif hasattr(value, "__dict__") and not isinstance(value, nn.Module):
            stack.extend(vars(value).values())
        else:
            complete = False
        seen.add(id(value))
    return found, complete
