"""What a key names is the same on every device: its numbers are made on the CPU, and moved."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bayesify import ABNN, IBNN, SGLD, SWAG, BayesAdapter, DeepEnsemble, Laplace, MCDropout, Posterior, convert
from bayesify._core.random import spread_keys
from bayesify.laws import GaussianMixtureLaw, GeneratorLaw, Key, keyed_numbers
from tests.marks import MIXTURE, TORCH

STAYS = ("complete", "counts", "shares", "fresh")  # what is read to decide: any device would wait for it
RANDOM = ("normal_", "uniform_", "bernoulli_", "random_", "multinomial", "randperm", "rand", "randn", "randint")


class Recorded(TorchDispatchMode):
    """Note every random number that is made, and every tensor that is moved to another device."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []
        self.moved: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.overloadpacket.__name__ in RANDOM:
            assert result.device.type == "cpu", f"{func} made random numbers on {result.device}"
            self.made.append(result.clone())
        if func.overloadpacket.__name__ == "_to_copy" and result.device != args[0].device:
            self.moved.append(args[0].clone())
        return result


def fill(posterior: Posterior) -> Posterior:
    """Give a posterior that has learned nothing numbers as if it had."""
    with torch.no_grad():
        for name, tensor in posterior.named_buffers():
            name = name.removeprefix("law.")
            if name == "complete":
                tensor.fill_(True)
            elif name == "snapshots":
                tensor.fill_(5)
            elif name.startswith(("square", "deviations", "residual_std", "stds", "values", "left_values")):
                tensor.copy_(torch.linspace(0.1, 1, tensor.numel()).view_as(tensor))
    return posterior.eval()


def mlp(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3)).to(dtype).eval()


def wide(dtype: torch.dtype) -> nn.Module:  # noise of one draw is more than a block
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5000), nn.Dropout(0.5), nn.Linear(5000, 3)).to(dtype).eval()


def made(law, network, **settings):
    names = [name for name, _ in network.named_parameters()]
    return Posterior(network, law(network, names=names, num_bn_draws=50, **settings))


CASES: dict[str, Callable[[torch.dtype], Posterior]] = {
    "dropout": lambda dtype: convert(mlp(dtype), MCDropout()),
    "dropout, more than a block": lambda dtype: convert(wide(dtype), MCDropout()),
    "ABNN": lambda dtype: convert(mlp(dtype), ABNN(members=1, alpha=0.3)),
    "ABNN, element": lambda dtype: convert(mlp(dtype), ABNN(members=1, alpha=0.3, noise="element")),
    "ensemble": lambda dtype: convert(mlp(dtype), DeepEnsemble(members=3)),
    "bank": lambda dtype: convert(mlp(dtype), SGLD(samples_per_chain=4)),
    "BayesAdapter": lambda dtype: convert(mlp(dtype), BayesAdapter()),
    "iBNN": lambda dtype: convert(mlp(dtype), IBNN(components=3)),
    "SWAG": lambda dtype: fill(convert(mlp(dtype), SWAG(rank=3))),
    "Laplace, last layer": lambda dtype: fill(convert(mlp(dtype), Laplace())),
    "Laplace, diagonal": lambda dtype: fill(convert(mlp(dtype), Laplace(structure="diagonal"))),
    "Laplace, kronecker": lambda dtype: fill(convert(mlp(dtype), Laplace(structure="kronecker"))),
    "generator": lambda dtype: fill(made(GeneratorLaw, mlp(dtype), latent=5, hidden=(6,), residual=True)),
    "mixture": lambda dtype: fill(made(GaussianMixtureLaw, mlp(dtype), components=3)),
}


def elsewhere(posterior: Posterior) -> Posterior:
    """Put a posterior's tensors where torch has no random numbers; what decides about passes stays."""
    for module in posterior.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and name not in STAYS:
                    moved = tensor.detach().to("meta")
                    tensors[name] = nn.Parameter(moved) if isinstance(tensor, nn.Parameter) else moved
    return posterior


def record(posterior: Posterior, device: str = "cpu") -> Recorded:
    x = torch.linspace(-1, 1, 12).view(3, 4).to(device, posterior.network[0].weight.dtype)
    spread_keys.cache_clear()  # so that the order of parts is drawn here
    with Recorded() as recorded, torch.no_grad():
        for key in posterior.keys(2, seed=5):
            posterior.evaluate(x, [key])
    return recorded


def digest(numbers: Tensor) -> float:
    """Return a sum that sees the order too."""
    numbers = numbers.double().flatten()
    return float(numbers @ torch.arange(len(numbers), dtype=torch.float64).cos())


# Of all numbers that two draws of seed 5 are made of. Statistics that were stored belong to them: never to be changed.
EXPECTED = {
    "dropout": [19.8522],
    "dropout, more than a block": [8.0543, 16.5853],
    "ABNN": [0.0, 46.1171],
    "ABNN, element": [0.0, 46.1171],
    "ensemble": [2.5403],
    "bank": [0.6420],
    "BayesAdapter": [
        -5.3416,
        0.2724,
        -1.0247,
        -2.5906,
        -3.8733,
        -1.0392,
        1.7599,
        -3.4558,
        0.2144,
        1.3282,
        -1.2971,
        -0.6642,
    ],
    "iBNN": [2.5403, 0.2682, -1.3352],
    "SWAG": [22.256, -1.8467, -0.282, 1.2564],
    "Laplace, last layer": [-3.4252, -1.3898],
    "Laplace, diagonal": [
        -5.3416,
        0.2724,
        -1.0247,
        -2.5906,
        -3.8733,
        -1.0392,
        1.7599,
        -3.4558,
        0.2144,
        1.3282,
        -1.2971,
        -0.6642,
    ],
    "Laplace, kronecker": [-7.7783, -3.4252, -1.0247, -2.5906, -0.6711, -1.3898, 0.2144, 1.3282],
    "generator": [0.6588, -0.6578, -1.4341, 6.1021],
    "mixture": [1.0, 3.6337, 2.0, 5.4039],
}

EACH = pytest.mark.parametrize("name", CASES)


@EACH
def test_the_numbers_of_a_draw_are_those_that_files_were_stored_with(name: str):
    if name == "mixture" and TORCH < (2, 13):
        pytest.skip(MIXTURE)
    made = record(CASES[name](torch.float32)).made
    assert [digest(numbers) for numbers in made] == pytest.approx(EXPECTED[name], abs=2e-4)


@EACH
def test_draws_on_another_device_are_made_of_the_numbers_of_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "autocast", lambda *args, **options: nullcontext())  # which does not know the device
    here = record(CASES[name](torch.float32))
    there = record(elsewhere(CASES[name](torch.float32)), "meta")
    assert not here.moved
    assert len(there.made) == len(here.made)
    for one, other in zip(there.made, here.made, strict=True):
        assert torch.equal(one, other)
    noise = [numbers for numbers in there.made if numbers.is_floating_point() and numbers.ndim]
    assert len(there.moved) == len(noise)
    for one, other in zip(there.moved, noise, strict=True):
        assert torch.equal(one.view_as(other), other)


@EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_draws_in_half_precision_are_made_of_the_numbers_of_single(name: str, dtype: torch.dtype):
    here, half = record(CASES[name](torch.float32)), record(CASES[name](dtype))
    assert len(half.made) == len(here.made)
    for one, other in zip(half.made, here.made, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_a_generators_centre_is_the_same_on_every_device(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "autocast", lambda *args, **options: nullcontext())
    made = []
    for place in (lambda posterior: posterior, elsewhere):
        with Recorded() as recorded:
            place(CASES["generator"](torch.float32)).law.centre()
        made += recorded.made[-1:]
    assert torch.equal(*made)


@EACH
def test_names_of_draws_do_not_depend_on_the_default_device(name: str):
    posterior = CASES[name](torch.float32)
    expected = posterior.keys(2, seed=3)
    with torch.device("meta"):
        assert posterior.keys(2, seed=3) == expected


def test_numbers_of_draws_do_not_depend_on_the_default_device():
    with torch.device("meta"):
        numbers = keyed_numbers(Key(1, 2), "here", [3], torch.zeros(3, device="cpu"))
    assert torch.equal(numbers, keyed_numbers(Key(1, 2), "here", [3], torch.zeros(3)))
