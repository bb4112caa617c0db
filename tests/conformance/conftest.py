"""Every property for every method, and on every network, but not on every network for every method: see `pairs`."""

import ast
import functools
import os
from pathlib import Path

import pytest
from torch import nn

from bayesify import Posterior
from tests.conformance.cases import CASES, EXAMPLES, Case, Example, fitted
from tests.conformance.pairs import pairwise

# `CONFORMANCE=product pytest tests/conformance` runs all combinations, which takes five times as long.
PRODUCT = os.environ.get("CONFORMANCE") == "product"


@functools.cache
def properties() -> tuple[str, ...]:
    """Return the tests that take a method and a network, whichever of them are run."""
    return tuple(
        node.name
        for path in sorted(Path(__file__).parent.glob("test_*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if {"case", "example"} <= {argument.arg for argument in node.args.args}
    )


@functools.cache
def cells(name: str) -> list[tuple[Case, str]]:
    """Return with which methods and networks a property is tried."""
    chosen = pairwise(properties(), CASES, list(EXAMPLES))
    return [(case, example) for found, case, example in chosen if found == name]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not {"case", "example"} <= set(metafunc.fixturenames):
        if "case" in metafunc.fixturenames and "case" not in _marked(metafunc):
            metafunc.parametrize("case", CASES, ids=lambda case: case.name)
        return
    name = metafunc.function.__name__
    chosen = [(case, example) for case in CASES for example in EXAMPLES] if PRODUCT else cells(name)
    metafunc.parametrize(
        ("case", "example"),
        [pytest.param(case, EXAMPLES[example], id=f"{case.name}-{example}") for case, example in chosen],
    )


def _marked(metafunc: pytest.Metafunc) -> set[str]:
    names = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    return {part for name in names for part in (name.split(",") if isinstance(name, str) else name)}


@pytest.fixture
def mlp() -> Example:
    return EXAMPLES["mlp"]


@pytest.fixture
def network(mlp: Example) -> nn.Module:
    return mlp.network()


@pytest.fixture
def posterior(case: Case, mlp: Example) -> Posterior:
    """A fitted, noisy posterior of a network with batch normalisation and two kinds of dropout."""
    return fitted(case, mlp)
