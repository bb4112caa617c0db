"""`bayesify methods`: what there is to choose from."""

from __future__ import annotations

import argparse
import dataclasses
import inspect

from bayesify.cli._common import Commands, Output, add_command

__all__ = ["add", "run"]


def add(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "methods",
        run,
        help="list the methods, with one line each",
        epilog="examples:\n  bayesify methods\n  bayesify methods --settings",
    )
    parser.add_argument("--settings", action="store_true", help="list each method's settings and their defaults too")


def run(args: argparse.Namespace) -> Output:
    """List the registered methods."""
    from bayesify.methods import list_methods

    found = {
        name: {
            "summary": (inspect.getdoc(cls) or "").partition("\n")[0],
            "settings": {field.name: field.default for field in dataclasses.fields(cls)},
        }
        for name, cls in list_methods().items()
    }
    width = max(map(len, found))
    lines = []
    for name, entry in found.items():
        lines.append(f"{name:<{width}}  {entry['summary']}")
        if args.settings:
            lines += [f"{'':<{width}}    {key}={value}" for key, value in entry["settings"].items()]  # type: ignore[attr-defined]
    return Output("\n".join(lines), {"methods": found})
