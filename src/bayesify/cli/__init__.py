"""The command line: `bayesify demo`, `fit`, `evaluate`, `predict`, `compare`, `report`, `methods`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, TextIO

from bayesify.cli import compare, demo, evaluate, fit, methods, predict, report
from bayesify.cli._common import EXIT_CODES, JobError, UsageError, finite

__all__ = ["main", "make_parser"]

COMMANDS = (demo, methods, fit, evaluate, predict, compare, report)
EPILOG = f"""\
start here:
  bayesify demo                        the whole path on small embedded data, in about a minute
  bayesify methods                     what there is to choose from
  bayesify fit --help                  examples with your own network

{EXIT_CODES}"""

OLD_OPTIONS = {"--foreign": "--ood", "--num-samples": "--num-draws"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 fine, 1 the job failed, 2 wrong usage.

    >>> main(["--version"])  # doctest: +ELLIPSIS
    bayesify ...
    0
    """
    try:
        arguments = make_parser().parse_args(_with_new_options(sys.argv[1:] if argv is None else argv))
    except SystemExit as stop:  # --help, --version, or an error that argparse has explained
        return int(stop.code or 0)
    name = arguments.parser.prog
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            output = arguments.run(arguments)
        print(json.dumps(finite(output.data), allow_nan=False) if arguments.json else output.text, flush=True)
    except BrokenPipeError:  # the reader of stdout, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if arguments.debug:
            raise
        if isinstance(error, UsageError):
            arguments.parser.print_usage(sys.stderr)
        print(f"{name}: {_message(error)}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 1 if output.failed else 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser with all commands."""
    from bayesify import __version__

    parser = argparse.ArgumentParser(
        prog="bayesify",
        description="Make a trained PyTorch network Bayesian, and turn its uncertainty into decisions.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"bayesify {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return parser


def _with_new_options(argv: Sequence[str]) -> list[str]:
    """Replace options by the names that they have now, and say so."""
    options = list(argv)
    for index, text in enumerate(options):
        option, equals, value = text.partition("=")
        if option in OLD_OPTIONS:
            print(f"bayesify: {option} is an old name: use {OLD_OPTIONS[option]}", file=sys.stderr)
            options[index] = OLD_OPTIONS[option] + equals + value
    return options


def _message(error: Exception) -> str:
    if isinstance(error, UsageError):
        return f"error: {error}"
    if isinstance(error, JobError | ValueError | OSError | ImportError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error} (--debug shows where)"


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> Any:
    del filename, lineno, file, line
    print(f"{category.__name__}: {message}", file=sys.stderr)
