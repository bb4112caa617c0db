"""Old names that work for one version more, with a warning that says the new one."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

__all__ = [
    "moved_modules",
    "moved_names",
    "old_attribute",
    "renamed",
    "renamed_fields",
    "warn_renamed",
    "with_new_keys",
]

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


def warn_renamed(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warn that a name is an old one.

    Args:
        old: The name that was used.
        new: What to write instead.
        stacklevel: As in `warnings.warn`, seen from here.
    """
    warnings.warn(
        f"{old} is an old name, which goes in the next version: use {new}.", DeprecationWarning, stacklevel=stacklevel
    )


def with_new_keys(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a mapping with old keys renamed; a key that is there under both names keeps the old one's value.

    >>> with_new_keys({"optimiser": "adam", "lr": 0.1}, {"optimiser": "optimizer"})
    {'lr': 0.1, 'optimizer': 'adam'}
    """
    new = {key: value for key, value in values.items() if key not in names}
    return new | {names[key]: value for key, value in values.items() if key in names}


def renamed(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function accept old keyword arguments.

    Args:
        names: New names by old ones.

    >>> @renamed(num_samples="num_draws")
    ... def draws(num_draws=1):
    ...     return num_draws
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     print(draws(num_samples=3), caught[0].message)
    3 num_samples= of draws is an old name, which goes in the next version: use num_draws=.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def accepting(*args: P.args, **kwargs: P.kwargs) -> R:
            if old := [name for name in names if name in kwargs]:
                for name in old:
                    warn_renamed(f"{name}= of {function.__name__}", f"{names[name]}=")
                    if names[name] in kwargs:
                        raise TypeError(f"{function.__name__} got {name} and {names[name]}, which are one argument.")
                return function(*args, **with_new_keys(kwargs, names))
            return function(*args, **kwargs)

        return accepting

    return decorate


def renamed_fields(**names: str) -> Callable[[C], C]:
    """Let a dataclass accept old names of fields as keyword arguments, and be read by them.

    Args:
        names: New names by old ones.

    >>> from dataclasses import dataclass
    >>> @renamed_fields(tpr="share")
    ... @dataclass
    ... class Limit:
    ...     share: float
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     print(Limit(tpr=0.9).tpr, len(caught))
    0.9 2
    """

    def decorate(cls: C) -> C:
        init = cls.__init__  # type: ignore[misc]

        @functools.wraps(init)
        def accepting(self: Any, *args: Any, **kwargs: Any) -> None:
            for name in names.keys() & kwargs.keys():
                warn_renamed(f"{cls.__name__}({name}=...)", f"{cls.__name__}({names[name]}=...)")
            # dataclasses.replace(value, old=...) gives the field under both names: the old one is the caller's.
            init(self, *args, **with_new_keys(kwargs, names))

        cls.__init__ = accepting  # type: ignore[misc]
        for old, new in names.items():
            setattr(cls, old, old_attribute(old, new))
        return cls

    return decorate


def old_attribute(old: str, new: str) -> property:
    """Return a property that stands for another attribute, under its old name."""

    def read(self: Any) -> Any:
        """Return the attribute under its new name."""
        warn_renamed(f"{type(self).__name__}.{old}", f"{type(self).__name__}.{new}")
        return getattr(self, new)

    def write(self: Any, value: Any) -> None:
        warn_renamed(f"{type(self).__name__}.{old}", f"{type(self).__name__}.{new}")
        setattr(self, new, value)

    return property(read, write)


def moved_names(module: str, names: Mapping[str, str], *, stacklevel: int = 3) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that finds old names.

    Args:
        module: The module's name.
        names: Where each is now, "package.module.name" by old name.
        stacklevel: As in `warnings.warn`; 4 where the module's `__getattr__` is another function that asks this one.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", names[name], stacklevel=stacklevel)
        place, _, new = names[name].rpartition(".")
        return getattr(import_module(place), new)

    return find


class _Moved(ModuleType):
    """What is imported under the old name of a module."""

    def __init__(self, old: str, new: str) -> None:
        super().__init__(old, f"Now `{new}`.")
        self.__dict__["_new"] = new

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        new = self.__dict__["_new"]
        warn_renamed(self.__name__, new)
        return getattr(import_module(new), name)


def moved_modules(names: Mapping[str, str]) -> None:
    """Let old names of modules be imported, `from old import name`, also where a function has the module's name now.

    Args:
        names: New modules by old ones, as "package.module".
    """
    for old, new in names.items():
        sys.modules.setdefault(old, _Moved(old, new))
