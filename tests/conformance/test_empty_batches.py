"""Batches without examples, as the last of a filtered loader is: answered as the plain network does, and forgotten."""

import copy

import pytest
import torch

import bayesify
from bayesify import BayesAdapter, Method
from tests.conformance.cases import CASES, EXAMPLES

METHODS = {
    **{case.name: case.noisy for case in CASES},
    **{f"adapter, {kind}": BayesAdapter(estimator=kind) for kind in ("exemplar", "local", "flipout", "shared")},
}


@pytest.mark.parametrize("name", ["mlp", "convolutions", "attention", "residual"])  # torch's LSTM refuses them
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@torch.no_grad()
def test_an_empty_batch_has_an_empty_answer_and_leaves_no_trace(method: Method, name: str):
    example = EXAMPLES[name]
    network = example.network()
    x = example.inputs(4)
    torch.manual_seed(0)
    posterior = bayesify.convert(network, method).eval()
    untouched = copy.deepcopy(posterior)
    assert posterior(x[:0]).shape == network(x[:0]).shape == (0, 3)
    assert posterior.draw(1)(x[:0]).shape == (0, 3)
    assert posterior.evaluate(x[:0], posterior.keys(1, seed=0)).shape == (1, 0, 3)
    answers = []
    for one in (posterior, untouched):
        torch.manual_seed(1)
        answers.append((one(x), one.draw(2)(x)))
    for found, wanted in zip(*answers, strict=True):
        assert torch.equal(found, wanted)
