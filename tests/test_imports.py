"""No folder imports another folder's private module; which folder may import which is a contract in pyproject.toml."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src" / "bayesify").rglob("*.py"))
NAMES = {path.relative_to(ROOT / "src").with_suffix("").as_posix().replace("/", ".") for path in SOURCES}
MODULES = NAMES | {name.removesuffix(".__init__") for name in NAMES}


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield the modules that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, "imports are absolute here"
            yield node.module
            yield from (name for alias in node.names if (name := f"{node.module}.{alias.name}") in MODULES)


def trespasses(name: str, folder: str) -> bool:
    """Return whether a module is private, and a file of a folder is not beside or below what it is private to."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.startswith("_") and part != "_core":
            return not f"{folder}.".startswith(".".join(parts[:index]) + ".")
    return False


def test_what_trespasses():
    assert trespasses("bayesify.cli._common", "bayesify.decide")
    assert not trespasses("bayesify.cli._common", "bayesify.cli")
    assert not trespasses("bayesify.evaluation.report._pictures", "bayesify.evaluation.report")
    assert trespasses("bayesify.evaluation.report._pictures", "bayesify.evaluation")
    assert not trespasses("bayesify._core.files", "bayesify.decide")
    assert set(imported(ast.parse("from bayesify.cli import _output"))) == {"bayesify.cli", "bayesify.cli._output"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT / "src").as_posix())
def test_private_modules_are_imported_by_their_folder_only(path):
    module = path.relative_to(ROOT / "src").with_suffix("").as_posix().replace("/", ".")
    names = {name for name in imported(ast.parse(path.read_text(encoding="utf-8"))) if name.startswith("bayesify.")}
    found = {name for name in names if trespasses(name, module.rpartition(".")[0])}
    assert not found
