"""Modules and parameters of a network, in the order of torch's own search."""

import torch
from torch import nn

from bayesify._core.modes import all_modules, evaluation_mode, first_parameter


def network() -> nn.Module:
    shared = nn.Linear(2, 2)
    inner = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Dropout(), shared), shared)
    inner.register_module("none", None)
    return nn.ModuleDict({"a": nn.Flatten(), "b": inner, "c": nn.ModuleList([inner, nn.BatchNorm1d(3)])})


def test_modules_are_those_of_torch_in_their_order():
    assert all_modules(network()) != []
    found = network()
    assert all_modules(found) == list(found.modules())


def test_the_first_parameter_is_that_of_torch():
    found = network()
    assert first_parameter(found) is next(found.parameters())
    assert first_parameter(nn.ReLU()) is None
    found.a.register_parameter("flags", nn.Parameter(torch.zeros(2, dtype=torch.bool), requires_grad=False))
    assert first_parameter(found) is found.a.flags
    assert first_parameter(found, floating=True) is found.b[1][1].weight


def test_each_layer_returns_to_its_mode():
    found = network()
    found.b.eval()
    before = [module.training for module in found.modules()]
    with evaluation_mode(found):
        assert not any(module.training for module in found.modules())
    assert [module.training for module in found.modules()] == before
