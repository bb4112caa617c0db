"""The command line: `bayesify demo`, `fit`, `choose`, `evaluate`, `predict`, `compare`, `guard`, `decide`, ...

A command is a dataclass, and so is a method: the fields are the options, their types say what is read, and the
docstrings are the help. tyro (the extra `cli`) makes the one from the other. jsonargparse does so too, and was tried
beside it on these dataclasses. Both are kept well, and take a small part of the time that importing torch takes. tyro
was chosen because

- its help names the choices of a type, and what may be None; options are spelt with hyphens, `None` is read as None;
- an error that a method's `__post_init__` raises is told as that sentence, and an unknown option with the nearest ones;
- it reads the words it is given and no more: jsonargparse takes the text of an option whose type is a class for the
  path of a class to import, so that a command line can run code. Here `--model`, `--data` and `--ood` alone name code;
- it brings two small packages (docstring-parser, typeguard), and jsonargparse with help from docstrings three, one of
  them PyYAML.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from bayesify.cli._output import JobError, UsageError, finite

if TYPE_CHECKING:
    from bayesify.cli._options import Command

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 fine, 1 the job failed, 2 wrong usage.

    >>> main(["--version"])  # doctest: +ELLIPSIS
    bayesify ...
    0
    """
    words = list(sys.argv[1:] if argv is None else argv)
    name = " ".join(["bayesify", *(word for word in words[:1] if not word.startswith("-"))])
    command: Command | None = None
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            from bayesify.cli._arguments import read_command

            try:
                command = read_command(words)
            except SystemExit as stop:  # --help, --version, or an error that tyro has explained
                return int(stop.code or 0)
            output = command.run()
        text = json.dumps(finite(output.data), allow_nan=False) if command.json else output.text
        if text:  # stdout may have had its lines already
            print(text, flush=True)
    except BrokenPipeError:  # the reader of stdout, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        _say(f"{name}: interrupted")
        return 130
    except Exception as error:
        if command is not None and command.debug:
            raise
        _say(f"{name}: {_message(error)}")
        return 2 if isinstance(error, UsageError) else 1
    return 1 if output.failed else 0


def _message(error: Exception) -> str:
    if isinstance(error, UsageError):
        return f"error: {error} (--help shows the options)"
    if isinstance(error, ModuleNotFoundError) and error.name == "tyro":
        return "The command line needs tyro: pip install 'bayesify[cli]'."
    if isinstance(error, JobError | ValueError | OSError | ImportError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error} (--debug shows where)"


def _say(text: str) -> None:
    """Write a line to stderr, and not behind a progress bar that is still there."""
    tqdm.write(text, file=sys.stderr)


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    _say(f"{category.__name__}: {message}")
