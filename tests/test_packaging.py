import ast
import importlib.metadata
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bayesify

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src" / "bayesify").rglob("*.py"))
PUBLIC = [name for name in bayesify.__all__ if not name.startswith("_")]

OPTIONAL = {
    "PIL",
    "accelerate",
    "arviz",
    "fastapi",
    "huggingface_hub",
    "jinja2",
    "matplotlib",
    "prometheus_client",
    "pyarrow",
    "ray",
    "sklearn",
    "tensorboard",
    "timm",
    "transformers",
}

# Prints what `import bayesify` adds to `import torch`: top-level modules. `benchmarks/imports.py` has the seconds.
IMPORT_PROBE = """
import json, sys, torch
before = set(sys.modules)
import bayesify
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""


def test_version_is_the_metadata_version():
    assert bayesify.__version__ == importlib.metadata.version("bayesify")


@pytest.mark.slow
def test_import_needs_no_optional_extra():
    command = [sys.executable, "-c", IMPORT_PROBE]
    modules = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    assert "bayesify" in modules
    assert OPTIONAL.isdisjoint(modules)


def declares_all(path):
    targets = [
        target.id
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    ]
    return "__all__" in targets


def test_modules_declare_all():
    assert len(SOURCES) > 100
    assert [path.relative_to(ROOT).as_posix() for path in SOURCES if not declares_all(path)] == []


def has_docstring(name):
    value = getattr(bayesify, name)
    if not (inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)):
        return True  # a constant has no docstring of its own
    docstring = value.__doc__ or ""
    # What a dataclass writes for itself is its signature.
    return bool(docstring.strip()) and not docstring.startswith(f"{name}(")


def test_public_names_have_docstrings():
    assert [name for name in PUBLIC if not has_docstring(name)] == []


def test_public_names_are_in_the_docs():
    text = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    code = re.findall(r"```.*?```|`[^`\n]+`", text, flags=re.DOTALL)
    words = {word for span in code for word in re.findall(r"\w+", span)}
    assert [name for name in PUBLIC if name not in words] == [], "docs/ never mentions them"
