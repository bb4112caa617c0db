"""The numbers of every method are those that they were."""

import functools

import pytest
import torch
from safetensors.torch import load_file

import bayesify
from tests.fixtures import golden
from tests.marks import TORCH

LATER = {"ivon"}  # methods that are younger than the numbers
# Draws along eigenvectors that were found here: their signs, and those of equal eigenvalues altogether, are not the
# same on all processors. What is compared is the law, by predictions without draws; draws of saved eigenvectors are
# compared by test_formats.
FOUND_HERE = {f"laplace/{network}/draw.{seed}" for network in golden.NETWORKS for seed in range(3)}


@functools.cache
def kept():
    return load_file(golden.FILE)


@pytest.mark.skipif(TORCH < (2, 13), reason="a seed gave other numbers of dropout and torch.multinomial in torch 2.6")
@pytest.mark.parametrize("name", golden.NAMES)
def test_the_numbers_are_what_they_were(name):
    found = golden.record(name)
    wanted = {key for key in kept() if key.startswith(f"{name}/")} - FOUND_HERE
    before = {key.removeprefix(f"{name}/"): kept()[key] for key in wanted}
    before["fit.parameters"] = golden.moved(name, before["fit.parameters"])
    wrong = {key: f"{_difference(found.get(key), tensor)}" for key, tensor in before.items()}
    wrong = {key: text for key, text in wrong.items() if text != "none"}
    assert not wrong, "\n".join(f"{key}: {text}" for key, text in wrong.items())


def _difference(found, kept):
    if found is None:
        return "missing"
    if found.shape != kept.shape:
        return f"the shape is {tuple(found.shape)} and was {tuple(kept.shape)}"
    try:
        torch.testing.assert_close(found, kept, rtol=1e-6, atol=1e-6)
    except AssertionError as error:
        return str(error).splitlines()[2:5]
    return "none"


def test_every_method_has_numbers_that_differ_where_they_are_random():
    assert {method.name for method in golden.METHODS.values()} == set(bayesify.list_methods()) - LATER
    assert {key.rpartition("/")[0] for key in kept()} == set(golden.NAMES)
    for name in golden.NAMES:
        differ = (kept()[f"{name}/draw.0"] - kept()[f"{name}/draw.1"]).abs().max() > 1e-3
        assert differ != name.startswith("map/"), name


@pytest.mark.parametrize("key", ["loss.nll", "draw.1", "fit.parameters", "streamlined.epistemic"])
def test_a_difference_is_seen(key):
    tensor = kept()[f"bayes-adapter/mlp/{key}"]
    assert _difference(tensor.clone(), tensor) == "none"
    assert _difference(tensor * (1 + 1e-4) + 1e-5, tensor) != "none"
    assert _difference(None, tensor) == "missing"
