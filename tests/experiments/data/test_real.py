"""The real sets, where BAYESIFY_DATA says that they are there."""

from __future__ import annotations

import os

import pytest
import torch

from bayesify.data import Split
from experiments.data import SPLITS, data_root, load
from experiments.networks import WEIGHTS, cifar_inputs, pretrained

pytestmark = pytest.mark.skipif(
    not os.environ.get("BAYESIFY_DATA"), reason="BAYESIFY_DATA names no folder of real data"
)

SIZES = {
    "mnist": (50000, 10000, 10000),
    "fashion-mnist": (50000, 10000, 10000),
    "notmnist": (10000,),
    "omniglot": (2720,),
    "cifar10": (50000, 2000, 8000, 10000),
    "digits": (1078, 359, 360),
    "uci/bostonHousing": (455, 51),
    "uci/energy": (691, 77),
    "uci/wine-quality-red": (1439, 160),
    "uci/yacht": (277, 31),
    "uci/power-plant": (8611, 957),
    "uci/naval-propulsion-plant": (10741, 1193),
    "uci/protein-tertiary-structure": (41157, 4573),
    "sst2": (6920, 872, 1821),
    "clinc150": (15000, 3000, 4500, 100, 100, 1000),
}


def absent(name: str) -> bool:
    folder = {"sst2": "text", "clinc150": "text"}.get(name, name.partition("/")[0])
    return name != "digits" and not (data_root() / folder).is_dir()


@pytest.mark.parametrize("name", SPLITS)
def test_every_split_has_its_size(name):
    if absent(name):
        pytest.skip(f"{name} is not below BAYESIFY_DATA, and tests download nothing")
    for split, size in zip(SPLITS[name], SIZES[name], strict=True):
        part = load(name, split)
        assert len(part) == size, split
        if isinstance(part, Split) and part.inputs.ndim == 4:
            assert (part.inputs.min(), part.inputs.max()) == (0, 1)


@pytest.mark.skipif(absent("cifar10"), reason="CIFAR-10 is not below BAYESIFY_DATA")
def test_cifar10_has_its_published_channel_means():
    means = load("cifar10", "train").inputs.mean((0, 2, 3))
    assert means.tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=5e-5)


@pytest.mark.skipif(absent("cifar10"), reason="CIFAR-10 is not below BAYESIFY_DATA")
@pytest.mark.parametrize("name", WEIGHTS)
def test_pretrained_networks_know_the_first_images(name):
    images = load("cifar10", "val").part(slice(200))
    with torch.no_grad():
        logits = pretrained(name)(cifar_inputs(images.inputs))
    assert (logits.argmax(1) == images.targets).float().mean() > 0.87
