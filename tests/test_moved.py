"""Names that left the package say where they went."""

import importlib

import pytest

import bayesify
from bayesify._moved import MOVED

HOMES = {
    "experiments.data": "bayesify.data",
    "experiments.protocols": "bayesify.decide",
    "experiments.verification": "bayesify.measure",
    "experiments.draws": "bayesify.measure",
    "experiments.components": "bayesify.report",
}


@pytest.mark.parametrize("name", MOVED)
def test_the_sentence_names_a_place_that_exists(name):
    home, place = (bayesify if name == "components" else importlib.import_module(HOMES[MOVED[name]])), MOVED[name]
    with pytest.raises(ImportError, match=f"left the package: it is {place}"):
        getattr(home, name)
    assert name == "components" or hasattr(importlib.import_module(place), name)


def test_from_import_shows_the_sentence():
    with pytest.raises(ImportError, match=r"experiments\.data\.read_idx in the source repository"):
        from bayesify.data import read_idx  # noqa: F401


@pytest.mark.parametrize("module", [bayesify, bayesify.data, bayesify.decide, bayesify.measure, bayesify.report])
def test_what_never_was_there_is_an_attribute_error(module):
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = module.nonsense
