"""From the words of a command line to a command: tyro reads them by the dataclasses of commands and methods."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import typing
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import NoneType
from typing import Annotated, Any

import tyro
from tyro.conf import FlagConversionOff, FlagCreatePairsOff, HelptextFromCommentsOff, arg

from bayesify import __version__
from bayesify.cli._commands import COMMANDS
from bayesify.cli._options import Command, LearningJob
from bayesify.cli._output import UsageError
from bayesify.methods import Method, list_methods

__all__ = ["read_command"]

RENAMED = {"--num-samples": "--num-draws", "--foreign": "--ood"}  # options by their old names
EXIT_CODES = "exit codes: 0 fine, 1 the job failed, 2 wrong usage, 130 interrupted"
ABOUT = f"""\
usage: bayesify COMMAND [OPTIONS]

Make a trained PyTorch network Bayesian, and turn its uncertainty into decisions.

commands:
{{commands}}

start here:
  bayesify demo                        the whole path on small embedded data, in about a minute
  bayesify methods                     what there is to choose from
  bayesify fit --help                  examples with your own network
  bayesify fit --method swag --help    what can be set of a method

{EXIT_CODES}"""


def read_command(words: Sequence[str]) -> Command:
    """Return the command with its options; `--help`, `--version` and what tyro refuses end in SystemExit.

    >>> read_command(["methods", "--settings"]).settings
    True
    """
    name, *rest = words or ("",)
    if name in ("-h", "--help", "--version"):
        lines = (f"  {name:<9}  {_about(cls).partition(chr(10))[0]}" for name, cls in COMMANDS.items())
        print(f"bayesify {__version__}" if name == "--version" else ABOUT.format(commands="\n".join(lines)))
        raise SystemExit(0)
    if name not in COMMANDS:
        wrong = f"there is no command {name!r}" if name else "a command is required"
        raise UsageError(f"{wrong}; the commands are {', '.join(COMMANDS)}")
    cls: Any = COMMANDS[name]
    if issubclass(cls, LearningJob):
        first = argparse.ArgumentParser(f"bayesify {name}", add_help=False, allow_abbrev=False)
        first.add_argument("--method", action="append", default=[])
        first.add_argument("--set", action="append", default=[])
        given, rest = first.parse_known_args(rest)
        known = _known([*cls.always, *given.method])
        rest += [f"--method={method}" for method in given.method]
        rest += [word for pair in given.set for word in _options(pair, known)]
        fields = [(f"method{i}", _settings_of(method)) for i, method in enumerate(known.values())]
        cls = dataclasses.make_dataclass(cls.__name__, fields, bases=(cls,), frozen=True, kw_only=True)
    rest = [_renamed(word, RENAMED) for word in rest]
    about = f"{_about(COMMANDS[name])}\n\n{EXIT_CODES}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tyro's, of a setting that is None until it is known
        config = (FlagCreatePairsOff, HelptextFromCommentsOff)
        found: Command = tyro.cli(cls, prog=f"bayesify {name}", description=about, args=rest, config=config)
    return found


def _about(cls: type[Command]) -> str:
    return (inspect.getdoc(cls) or "").partition("\n\nAttributes:")[0]


def _renamed(word: str, names: Mapping[str, str]) -> str:
    """Return the present word for an old one, and say so."""
    option, equals, value = word.partition("=")
    if option not in names:
        return word
    warnings.warn(f"{option} is now called {names[option]}.", FutureWarning, stacklevel=2)
    return f"{names[option]}{equals}{value}"


# -- methods -----------------------------------------------------------------------------------------------------


def _known(names: Sequence[str]) -> dict[str, type[Method]]:
    """Return the classes of methods by name."""
    known = list_methods()
    for name in names:
        if name not in known and name != "all":
            raise UsageError(f"there is no method {name!r}; 'bayesify methods' describes {', '.join(sorted(known))}")
    return known if "all" in names else {name: known[name] for name in names}


def _settings_of(method: type[Method]) -> Any:
    """Return the type of a field whose options are a method's settings, under its name."""
    return Annotated[method, FlagConversionOff, arg(name=method.name)]


def _options(pair: str, known: Mapping[str, type[Method]]) -> list[str]:
    """Return the options that a setting stands for: of one method, or of all that have it.

    >>> _options("rank=10", _known(["map", "swag"]))
    ['--swag.rank', '10']
    """
    key, equals, text = pair.partition("=")
    only, _, setting = key.rpartition(".")
    if not (setting and equals):
        raise UsageError(f"--set {pair!r} is not of the form KEY=VALUE")
    if only and only not in known:
        raise UsageError(f"--set {pair}: {only!r} is none of the methods given, {', '.join(known)}")
    hints = {name: _hints(known[name]) for name in ([only] if only else known)}
    if not any(setting in fields for fields in hints.values()):
        setting = _renamed(setting, {old: new for name in hints for old, new in known[name].renamed.items()})
    takers = {name: fields[setting] for name, fields in hints.items() if setting in fields}
    if not takers:
        there = "; ".join(f"{name} has {', '.join(fields)}" for name, fields in hints.items())
        raise UsageError(f"--set {pair}: there is no setting {setting!r}; {there}")
    return [word for name, hint in takers.items() for word in (f"--{name}.{setting}", *_values(text, hint))]


def _hints(method: type[Method]) -> dict[str, Any]:
    hints = typing.get_type_hints(method)
    return {field.name: hints[field.name] for field in dataclasses.fields(method)}


def _values(text: str, hint: Any) -> list[str]:
    """Return the words that an option takes for a value of `--set`, which may be written as in JSON.

    >>> _values("[3, 4]", tuple[int, ...]), _values("none", int | None), _values("yes", bool), _values("no", str)
    (['3', '4'], ['None'], ['True'], ['no'])
    """
    kinds, word = typing.get_args(hint) or (hint,), text.lower()
    if NoneType in kinds and word in ("none", "null"):
        return ["None"]
    if bool in kinds and word in ("true", "yes", "false", "no"):
        return [str(word in ("true", "yes"))]
    if text.startswith("[") and str not in kinds:
        with suppress(ValueError):
            return [str(value) for value in json.loads(text)]
    return [text]
