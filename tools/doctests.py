"""Show the examples of docstrings as code on the site: griffe takes a doctest for text unless it is fenced."""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["Doctests"]

# A prompt, and all lines up to the next blank one.
_EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?! *$).*)*", re.MULTILINE)


def fenced(text: str) -> str:
    """Return a docstring with each doctest between fences."""
    return _EXAMPLE.sub(lambda found: f"{found['indent']}```pycon\n{found[0]}\n{found['indent']}```", text)


class Doctests(griffe.Extension):
    """Fences the doctests of every object."""

    def on_object(self, *, obj: griffe.Object, **options: Any) -> None:
        """Change the docstring of an object once it is known."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
