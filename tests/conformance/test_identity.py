"""Zero noise is the original network, and the original network is untouched."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesify
from tests.conformance.cases import Case, Example, fit, has_mean

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def _silent(case: Case, example: Example) -> bayesify.Posterior:
    return bayesify.convert(example.network(), case.silent)


@torch.no_grad()
def test_a_silent_pass_is_the_networks(case: Case, example: Example):
    silent = _silent(case, example)
    x = example.inputs(3)
    expected = example.network()(x)
    assert_close(silent(x), expected, **EXACT)
    for seed in range(3):
        assert_close(silent.draw(seed)(x), expected, **EXACT)
    assert_close(silent.reference(x), expected, **EXACT)


@torch.no_grad()
def test_a_silent_mean_is_the_networks(case: Case, example: Example):
    silent, x = _silent(case, example), example.inputs(3)
    chosen = nullcontext() if has_mean(silent) else silent.member(0)
    with chosen, silent.mean():
        assert_close(silent(x), example.network()(x), **EXACT)


def test_where_there_is_no_mean_a_sentence_says_so(case: Case, mlp: Example):
    posterior = _silent(case, mlp)
    if has_mean(posterior):
        pytest.skip("it has a mean network")
    with pytest.raises(ValueError, match="no mean network"), posterior.mean():
        pass
    with pytest.raises(ValueError, match="how='sampling'"):
        bayesify.predict(posterior, mlp.inputs(2), how="mean")


@pytest.mark.filterwarnings("ignore:This posterior has no uncertainty yet")
def test_a_silent_prediction_is_the_networks(case: Case, example: Example):
    silent, x = _silent(case, example), example.inputs(5)
    prediction = bayesify.predict(silent, x, num_draws=2, seed=0)
    with torch.no_grad():
        assert_close(prediction.probs, example.network()(x).softmax(-1), **EXACT)
    assert_close(prediction.epistemic, torch.zeros(5, dtype=torch.float64), **EXACT)


@pytest.mark.parametrize("training", [False, True])
def test_the_network_is_untouched(case: Case, example: Example, training: bool):
    network = example.network().train(training)
    # Some layers in another mode than the rest, and one parameter frozen.
    next(iter(network.children())).train(not training)
    next(network.parameters()).requires_grad_(False)
    before = _photograph(network)
    posterior = bayesify.convert(network, case.noisy)
    fit(posterior, example)
    bayesify.predict(posterior, example.inputs(3), seed=0)
    posterior.draw(1)(example.inputs(2))
    _assert_same(before, _photograph(network))


def _photograph(network: nn.Module) -> dict:
    return {
        "modules": {name: (id(m), type(m), m.training, _hooks(m)) for name, m in network.named_modules()},
        "parameters": {name: (id(p), p.requires_grad, p.grad) for name, p in network.named_parameters()},
        "values": copy.deepcopy(network.state_dict()),
    }


def _hooks(module: nn.Module) -> tuple[int, ...]:
    inner = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_modules", "_parameters", "_buffers")
    return (*(len(module.__dict__[name]) for name in inner), len(module.__dict__))


def _assert_same(before: dict, after: dict) -> None:
    assert before["modules"] == after["modules"]
    assert before["parameters"] == after["parameters"]
    assert before["values"].keys() == after["values"].keys()
    for name, value in before["values"].items():
        assert torch.equal(value, after["values"][name]), name
