"""Folders that older versions of `save` wrote still load, and are still the same functions."""

import functools
import json

import pytest
import torch
from safetensors.torch import load_file

import bayesify
from tests.fixtures import make_format1, make_format2
from tests.marks import MIXTURE, TORCH

FORMAT1, FORMAT2 = make_format1.FOLDER, make_format2.FOLDER
NAMES = (*make_format2.METHODS, *make_format2.MADE)
FIXED = ("map",)  # not random
LATER = {"ivon"}  # methods that the first format never held


@functools.cache
def plain():
    network = make_format2.make_network()
    network.load_state_dict(load_file(FORMAT2 / "network.safetensors"))
    return network


@functools.cache
def expected():
    return load_file(FORMAT2 / "expected.safetensors")


@functools.cache
def same_kernels():
    """Whether this processor computes as the one that wrote the fixture, to the last bit."""
    return torch.equal(make_format2.kernels(plain(), expected()["inputs"]), expected()["kernels"])


@pytest.mark.parametrize("name", NAMES)
def test_what_the_second_format_saved_is_the_same_function(name):
    if name == "mixture" and TORCH < (2, 13):
        pytest.skip(MIXTURE)
    posterior = bayesify.load(FORMAT2 / name, plain())
    if name in make_format2.METHODS:
        assert posterior.method == make_format2.METHODS[name]
    found = make_format2.outputs_of(posterior, expected()["inputs"])
    kept = {key.removeprefix(f"{name}."): tensor for key, tensor in expected().items() if key.startswith(f"{name}.")}
    assert not kept.keys() - found.keys()  # there may be more ways to predict than there were
    for key, tensor in kept.items():
        # Draws and the mean are one pass; what is made of several may be summed in another order.
        exact = same_kernels() and key in ("draw0", "draw1", "mean")
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}
        if key.startswith("streamlined"):  # recorded later than "kernels", on a processor that rounds otherwise
            tolerance = {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(found[key], tensor, **tolerance, msg=lambda text, key=key: f"{key}: {text}")
    assert (kept["sampling.epistemic"].max() > 1e-3) == (name not in FIXED)  # and not because nothing is random


@pytest.mark.parametrize("name", ["laplace-kronecker", "sgld", "wgan-gp"])
def test_a_changed_byte_of_the_second_format_is_refused(tmp_path, name):
    for file in (FORMAT2 / name).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (path,) = tmp_path.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="not what was"):
        bayesify.load(tmp_path, plain())


def test_the_second_format_has_every_method_and_is_small():
    assert {method.name for method in make_format2.METHODS.values()} == set(bayesify.list_methods())
    folders = {folder.name for folder in FORMAT2.iterdir() if folder.is_dir()}
    assert folders == set(NAMES)
    assert all(json.loads((FORMAT2 / name / "config.json").read_text())["format"] == 2 for name in folders)
    assert max(file.stat().st_size for file in FORMAT2.rglob("*") if file.is_file()) < 30_000
    predicted = {key.split(".")[0] for key in expected() if key.endswith(".streamlined")}
    means = {key.split(".")[0] for key in expected() if key.endswith(".mean")}
    assert len(predicted) >= 12
    assert len(means) >= 20


@pytest.mark.parametrize("name", [*make_format1.METHODS, *make_format1.MADE])
def test_the_first_format_still_loads_and_predicts_the_same(name):
    if name == "mixture" and TORCH < (2, 13):
        pytest.skip(MIXTURE)
    network = make_format1.make_network()
    network.load_state_dict(load_file(FORMAT1 / "network.safetensors"))
    outputs = load_file(FORMAT1 / "expected.safetensors")
    posterior = bayesify.load(FORMAT1 / name, network)
    made = name in make_format1.MADE
    assert posterior.law.name == name if made else posterior.method == make_format1.METHODS[name]
    num_draws = make_format1.NUM_DRAWS.get(name, 8)
    prediction = bayesify.predict(posterior, outputs["inputs"], num_draws=num_draws, seed=5)
    # Draws that share a pass are summed in another order than those that had one each when this was written.
    torch.testing.assert_close(prediction.log_probs, outputs[f"{name}.log_probs"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(prediction.epistemic, outputs[f"{name}.epistemic"], rtol=1e-5, atol=1e-6)
    assert prediction.epistemic.max() > 1e-3 or name == "map"  # and not because nothing is random


def test_the_first_format_covers_every_method_and_is_small():
    names = {*make_format1.METHODS, *make_format1.MADE}
    assert {method.name for method in make_format1.METHODS.values()} == set(bayesify.list_methods()) - LATER
    assert {folder.name for folder in FORMAT1.iterdir() if folder.is_dir()} == names
    assert sum(file.stat().st_size for file in FORMAT1.rglob("*") if file.is_file()) < 100_000
