"""Which parts of a network become random, and the table that says why."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = [
    "Conversion",
    "ConversionRow",
    "Patterns",
    "Selection",
    "require_something",
    "select_modules",
    "select_parameters",
]

Pattern = str | type[nn.Module]
Patterns = Pattern | Sequence[Pattern]

_NOT_INCLUDED = "not included"
_NOT_ADAPTER = "not in the adapter"


@dataclass(frozen=True)
class ConversionRow:
    """What happened to one module.

    Attributes:
        name: Its qualified name; empty for the network itself.
        type: Its type's name.
        parameters: How many numbers it owns itself.
        converted: Whether it is random now.
        reason: How, or why not.
    """

    name: str
    type: str
    parameters: int
    converted: bool
    reason: str


@dataclass(frozen=True)
class Conversion:
    """The table of a conversion: a row for each module that owns parameters or could have been random."""

    rows: tuple[ConversionRow, ...]

    @property
    def converted(self) -> tuple[str, ...]:
        """Return the names of the converted modules."""
        return tuple(row.name for row in self.rows if row.converted)

    def __str__(self) -> str:
        """Return the table as text."""
        cells = [("module", "type", "parameters", "random", "why")]
        cells += [
            (
                row.name or "(network)",
                row.type,
                f"{row.parameters:,}",
                "yes" if row.converted else "no",
                row.reason,
            )
            for row in self.rows
        ]
        widths = [max(len(line[column]) for line in cells) for column in range(4)]
        return "\n".join(
            "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[4]]).rstrip()
            for line in cells
        )


class Selection:
    """Which modules the caller wants: patterns on qualified names, or exact types.

    A pattern such as `"layer3"`, `"*.attention"` or `"blocks.1?.*"` selects the modules it matches and all inside
    them. A type selects modules of exactly that type.
    """

    def __init__(self, include: Patterns | None, exclude: Patterns | None) -> None:
        self.include = _listed(include, "include")
        self.exclude = _listed(exclude, "exclude")
        self.names: frozenset[str] | None = None
        self.otherwise = _NOT_INCLUDED  # why modules of other names are left out

    @classmethod
    def exactly(cls, names: Iterable[str]) -> Selection:
        """Select the modules of these names and no others, as a saved posterior does."""
        selection = cls(None, None)
        selection.names = frozenset(names)
        return selection

    def within_adapter(self, names: Iterable[str]) -> Selection:
        """Select of an adapter's modules, which have these names, all that are not excluded."""
        self.names, self.otherwise = frozenset(names), _NOT_ADAPTER
        return self

    def reason_against(self, names: Sequence[str], module: nn.Module) -> str | None:
        """Return why a module is left out, or None when it is wanted; a shared module has several names."""
        if self.names is not None and self.names.isdisjoint(names):
            return self.otherwise
        for pattern in self.exclude or ():
            if any(_matches(pattern, name, module) for name in names):
                return f"excluded by {_show(pattern)}"
        wanted = self.include is None or any(_matches(p, name, module) for p in self.include for name in names)
        return None if wanted else _NOT_INCLUDED

    def check(self, network: nn.Module) -> None:
        """Raise if a pattern matches no module at all."""
        modules = dict(network.named_modules(remove_duplicate=False))
        for word, patterns in (("include", self.include), ("exclude", self.exclude)):
            for pattern in patterns or ():
                if not any(_matches(pattern, name, module) for name, module in modules.items()):
                    raise ValueError(
                        f"{word}={_show(pattern)} matches no module. The network has: {_listing(modules)}."
                    )


def select_modules(
    network: nn.Module, decide: Callable[[str, nn.Module], tuple[bool, str] | None], selection: Selection
) -> Conversion:
    """Choose modules, each once, however many names it has.

    Args:
        network: The network.
        decide: Returns whether a module of this name could be random, and how or why not; None for modules that are
            not worth a row.
        selection: What the caller wants.

    Returns:
        The table.
    """
    rows: list[ConversionRow] = []
    aliases = _aliases(network)
    for name, module in network.named_modules():
        answer = decide(name, module)
        if answer is not None:
            against = selection.reason_against(aliases[module], module)
            possible, reason = answer
            rows.append(_row(name, module, converted=possible and against is None, reason=against or reason))
    return Conversion(tuple(rows))


def select_parameters(network: nn.Module, selection: Selection, *, how: str) -> tuple[list[str], Conversion]:
    """Choose the parameters that become random: those of the wanted modules that are not frozen.

    Returns:
        Their names, each parameter once, and the table.

    Raises:
        ValueError: A module that is excluded shares a parameter with one that is not.
    """
    aliases = _aliases(network)
    reasons: dict[str, str | None] = {}
    names: dict[int, str] = {}
    for name, module in network.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not own:
            continue
        free = {key: p for key, p in own.items() if p.requires_grad}
        reasons[name] = selection.reason_against(aliases[module], module)
        if reasons[name] is None and not free:
            reasons[name] = "frozen (requires_grad is False)"
        if reasons[name] is None:
            for key, parameter in free.items():
                names.setdefault(id(parameter), f"{name}.{key}" if name else key)
    rows: list[ConversionRow] = []
    for name, reason in reasons.items():
        module = network.get_submodule(name)
        shared = [names[id(p)] for p in module.parameters(recurse=False) if id(p) in names]
        if reason in (_NOT_INCLUDED, _NOT_ADAPTER) and shared:
            reason = f"{reason}, but shares {shared[0]!r}, which is random"
        elif reason is not None and shared:
            raise ValueError(
                f"Module {name!r} is {reason}, but it shares {shared[0]!r} with a module that is converted, and a "
                "shared parameter cannot be both. Exclude both modules, or neither."
            )
        rows.append(_row(name, module, converted=reason is None, reason=reason or how))
    return list(names.values()), Conversion(tuple(rows))


def require_something(conversion: Conversion, network: nn.Module, method: str, needs: str) -> None:
    """Raise, showing one module of each kind that there is, if nothing was converted."""
    if not conversion.converted:
        kinds = {(row.type, row.reason): row for row in reversed(conversion.rows)}
        shown = f"The network has:\n{Conversion(tuple(reversed(kinds.values())))}"
        if more := len(conversion.rows) - len(kinds):
            shown += f"\nand {more} more like these"
        elif not kinds:
            shown = f"The network has: {_listing(dict(network.named_modules()))}."
        left = any(row.reason.startswith((_NOT_INCLUDED, "excluded")) for row in conversion.rows)
        beside = any(row.reason.startswith(_NOT_ADAPTER) for row in conversion.rows)
        words = "include and exclude leave out what the table shows. " * left
        words += "Of a network with an adapter only this is converted; include=['*'] takes all. " * beside
        raise ValueError(f"{method} found nothing to convert: it needs {needs}. {words}{shown}")


def _row(name: str, module: nn.Module, *, converted: bool, reason: str) -> ConversionRow:
    count = sum(p.numel() for p in module.parameters(recurse=False))
    return ConversionRow(name, type(module).__name__, count, converted, reason)


def _aliases(network: nn.Module) -> dict[nn.Module, list[str]]:
    names: dict[nn.Module, list[str]] = {}
    for name, module in network.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def _listed(patterns: Patterns | None, word: str) -> tuple[Pattern, ...] | None:
    if patterns is None:
        return None
    found: Iterable[Any] = [patterns] if isinstance(patterns, str | type) else patterns
    listed = tuple(found)
    for pattern in listed:
        if not isinstance(pattern, str) and not (isinstance(pattern, type) and issubclass(pattern, nn.Module)):
            raise TypeError(f"{word} takes patterns of names and module types, but {pattern!r} is neither.")
    return listed


def _matches(pattern: Pattern, name: str, module: nn.Module) -> bool:
    if not isinstance(pattern, str):
        return type(module) is pattern
    parts = name.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[: n + 1]), pattern) for n in range(len(parts)))


def _show(pattern: Pattern) -> str:
    return repr(pattern) if isinstance(pattern, str) else pattern.__name__


def _listing(modules: dict[str, nn.Module], most: int = 40) -> str:
    names = [f"{name} ({type(module).__name__})" for name, module in modules.items() if name]
    if not names:
        return f"only itself, a {type(modules['']).__name__}"
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
