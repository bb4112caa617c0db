"""Text of the command line as values: factories' arguments, and methods' settings by their declared types."""

from __future__ import annotations

import ast
import dataclasses
import json
import types
import typing
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal, Union

from bayesify._core.deprecation import warn_renamed
from bayesify.cli._common import UsageError
from bayesify.methods import Method, list_methods

__all__ = ["make_method", "make_methods", "parse_arguments", "parse_value"]


def parse_arguments(pairs: Sequence[str], option: str) -> dict[str, Any]:
    """Read KEY=VALUE pairs whose values are Python literals, or else text.

    >>> parse_arguments(["n=3", "name=resnet"], "--model-arg")
    {'n': 3, 'name': 'resnet'}
    """
    values: dict[str, Any] = {}
    for pair in pairs:
        key, text = _split(pair, option)
        try:
            values[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            values[key] = text
    return values


def make_method(name: str, pairs: Sequence[str]) -> Method:
    """Make a method from its name and its settings as KEY=VALUE.

    >>> make_method("swag", ["rank=10"]).rank
    10
    """
    return make_methods([name], pairs)[name]


def make_methods(names: Sequence[str], pairs: Sequence[str]) -> dict[str, Method]:
    """Make several methods; a setting is for all methods that have it, or as METHOD.KEY=VALUE for one."""
    known = list_methods()
    names = list(known) if "all" in names else list(dict.fromkeys(names))
    for name in names:
        if name not in known:
            raise UsageError(f"there is no method {name!r}; 'bayesify methods' describes {', '.join(sorted(known))}")
    settings: dict[str, dict[str, Any]] = {name: {} for name in names}
    for pair in pairs:
        key, text = _split(pair, "--set")
        only, _, given = key.rpartition(".")
        if only and only not in names:
            raise UsageError(f"--set {pair}: {only!r} is none of the methods given, {', '.join(names)}")
        takers = {name: known[name].renamed.get(given, given) for name in ([only] if only else names)}
        takers = {name: field for name, field in takers.items() if field in _fields(known[name])}
        if not takers:
            there = "; ".join(f"{name} has {', '.join(_fields(known[name]))}" for name in ([only] if only else names))
            raise UsageError(f"--set {pair}: there is no setting {given!r}; {there}")
        for name, field in takers.items():
            if field != given:
                warn_renamed(f"--set {given}", f"--set {field}")
            settings[name][field] = parse_value(text, _fields(known[name])[field], pair)
    try:
        return {name: known[name](**settings[name]) for name in names}
    except ValueError as error:
        raise UsageError(f"--set: {error}") from error


def parse_value(text: str, hint: Any, pair: str) -> Any:
    """Read text as a value of an annotated type.

    >>> parse_value("none", float | None, ""), parse_value("0.5", float | None, ""), parse_value("yes", bool, "")
    (None, 0.5, True)
    """
    for kind in typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,):
        with suppress(ValueError):
            return _read(text, kind)
    raise UsageError(f"--set {pair}: {text!r} is not {_described(hint)}")


def _read(text: str, kind: Any) -> Any:
    word = text.strip().lower()
    if kind is type(None):
        if word in ("none", "null"):
            return None
        raise ValueError
    if kind is bool:
        if word in ("true", "yes", "1", "false", "no", "0"):
            return word in ("true", "yes", "1")
        raise ValueError
    if kind in (int, float, str):
        return kind(text)
    if typing.get_origin(kind) is Literal:
        for choice in typing.get_args(kind):
            if str(choice) == text:
                return choice
        raise ValueError
    value = json.loads(text)
    return tuple(value) if isinstance(value, list) and typing.get_origin(kind) is tuple else value


def _described(hint: Any) -> str:
    if typing.get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_described(kind) for kind in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(hint))
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "none"}
    return names.get(hint, f"JSON of a {hint}")


def _fields(cls: type[Method]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _split(pair: str, option: str) -> tuple[str, str]:
    key, equals, text = pair.partition("=")
    if not key or not equals:
        raise UsageError(f"{option} {pair!r} is not of the form KEY=VALUE")
    return key, text
