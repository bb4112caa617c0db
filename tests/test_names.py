"""Every call that a message, a docstring, README or a page of docs advises exists under the name it is given there."""

import ast
import importlib
import importlib.util
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import bayesify
import bayesify.integrations
import bayesify.serve

ROOT = Path(__file__).parents[1]
DOTTED = re.compile(r"(?<![\w./-])bayesify(?:\.[A-Za-z_]\w*)+")
FUNCTIONS = "calibrate|check|convert|diagnose|distill|evaluate|export|fit|methods|predict"
LAZY = ("bayesify.cli.", "bayesify.evaluation.report")  # of code that imports when it must, not of advice
APART = (bayesify.integrations, bayesify.serve)
FILES = (".md", ".html", ".toml", ".json", ".py", ".safetensors")


def _texts() -> Iterator[tuple[str, str]]:
    """Return the strings of the package, f-strings by their parts, and the lines of the pages, each with its place."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def _named() -> dict[str, str]:
    found: dict[str, str] = {}
    for place, text in _texts():
        for line in text.splitlines():
            # "from bayesify.fitting import x" and "python -m bayesify.x" name modules, and are no attributes.
            line = re.sub(r"(from|import|-m) +bayesify[\w.]*", "", line)
            for name in DOTTED.findall(line):
                if not name.endswith(FILES):
                    found.setdefault(name, place)
    for place, text in _texts():
        if place.endswith(".md"):  # pages leave the package's name out
            for name in re.findall(rf"`((?:{FUNCTIONS})\.\w+)", text):
                found.setdefault(f"bayesify.{name}", place)
    return found


def resolves(name: str) -> bool:
    value = bayesify
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of old names, which the package lists
        for part in name.split(".")[1:]:
            # As a user does, who has the package.
            if value in APART and importlib.util.find_spec(f"{value.__name__}.{part}"):
                importlib.import_module(f"{value.__name__}.{part}")
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
    return True


def test_names_are_found_at_all():
    assert resolves("bayesify.decide.Detector.fit")
    assert not resolves("bayesify.predict.moment_rule")
    assert resolves("bayesify.integrations.timm.views")
    assert not resolves("bayesify.integrations.timm.nonsense")
    assert len(_named()) > 20


def test_names_that_are_advised_exist():
    wrong = []
    for name, place in sorted(_named().items()):
        private = any(part.startswith("_") for part in name.split("."))
        if private or name.startswith(LAZY):
            if not resolves(name):
                importlib.import_module(name)
        elif not resolves(name):
            wrong.append(f"{place} names {name}, which does not exist")
    assert wrong == []


def test_public_names_are_those_of_all():
    for name in bayesify.__all__:
        assert hasattr(bayesify, name), name
