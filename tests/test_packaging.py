import ast
import importlib.metadata
import inspect
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import bayesify

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src" / "bayesify").rglob("*.py"))
PUBLIC = [name for name in bayesify.__all__ if not name.startswith("_")]

OPTIONAL = {"PIL", "accelerate", "arviz", "jinja2", "matplotlib", "sklearn", "tensorboard", "transformers"}

# Prints what `import bayesify` adds to `import torch`: seconds and top-level modules.
IMPORT_PROBE = """
import json, sys, time
start = time.perf_counter()
import torch
of_torch = time.perf_counter() - start
before = set(sys.modules)
start = time.perf_counter()
import bayesify
share = (time.perf_counter() - start) / of_torch
modules = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps({"share": share, "modules": sorted(modules)}))
"""


@pytest.fixture(scope="module")
def import_cost(tmp_path_factory):
    # As for a user, whose second import finds compiled files, whatever this process was told about writing them.
    compiled = {"PYTHONPYCACHEPREFIX": str(tmp_path_factory.mktemp("compiled")), "PYTHONDONTWRITEBYTECODE": ""}

    def probe():
        command = [sys.executable, "-c", IMPORT_PROBE]
        environment = {**os.environ, **compiled}
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout)

    # The least of several runs leaves out what else the machine was doing.
    return min((probe() for _ in range(3)), key=lambda cost: cost["share"])


def test_version_is_the_metadata_version():
    assert bayesify.__version__ == importlib.metadata.version("bayesify")


def test_import_needs_no_optional_extra(import_cost):
    assert OPTIONAL.isdisjoint(import_cost["modules"])


def test_import_adds_little_to_that_of_torch(import_cost):
    assert import_cost["share"] < 0.2


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_module_declares_all(path):
    targets = [
        target.id
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    ]
    assert "__all__" in targets


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_has_a_docstring(name):
    value = getattr(bayesify, name)
    if not (inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)):
        pytest.skip("a constant has no docstring of its own")
    docstring = value.__doc__ or ""
    assert docstring.strip()
    # What a dataclass writes for itself is its signature.
    assert not docstring.startswith(f"{name}(")


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_is_in_the_docs(name):
    text = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    code = re.findall(r"```.*?```|`[^`\n]+`", text, flags=re.DOTALL)
    assert any(re.search(rf"\b{name}\b", span) for span in code), f"docs/ never mentions `{name}`"


def test_wheel_has_the_package_and_its_type_marker(tmp_path):
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path]
    subprocess.run([*command, ROOT], check=True)
    (wheel,) = tmp_path.glob("bayesify-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "bayesify/py.typed" in names
    assert {path.relative_to(ROOT / "src").as_posix() for path in SOURCES} <= names
