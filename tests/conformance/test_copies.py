"""Copies of a posterior, in memory and on disk, are the posterior."""

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import bayesify
from bayesify import Posterior
from bayesify.laws import Refusal
from tests.conformance.cases import Case, Example, fit, fitted, is_random


def assert_same(one: Posterior, other: Posterior, example: Example, *, learning: bool = True) -> None:
    """Assert that two posteriors are equal bit for bit, in state and in predictions.

    Args:
        one: The posterior.
        other: Its copy.
        example: The network and its inputs.
        learning: Whether what only learning needs must be equal too; files do not hold it.
    """
    states = [
        {name: tensor for name, tensor in posterior.state_dict().items() if learning or not name.startswith("learning")}
        for posterior in (one, other)
    ]
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert tensor.dtype == states[1][name].dtype, name
        assert torch.equal(tensor, states[1][name]), name
    x = example.inputs(5)
    predictions = [bayesify.predict(posterior, x, seed=4) for posterior in (one, other)]
    for field in ("probs", "epistemic", "logits_variance"):
        assert torch.equal(*(getattr(prediction, field) for prediction in predictions)), field


def test_what_was_saved_loads_bit_for_bit(case: Case, example: Example, tmp_path: Path):
    network = example.network()
    posterior = fitted(case, example)
    bayesify.calibrate(posterior, [(example.inputs(8), torch.arange(8) % 3)])
    bayesify.save(posterior, tmp_path / "saved")
    loaded = bayesify.load(tmp_path / "saved", network)
    assert loaded.method == posterior.method
    assert loaded.conversion.converted == posterior.conversion.converted
    assert loaded.learning is None
    assert_same(posterior, loaded, example, learning=False)


def test_a_wider_posterior_is_saved_as_it_is(case: Case, mlp: Example, tmp_path: Path):
    posterior = fitted(case, mlp)
    rescale = posterior.law.rescaling()
    if isinstance(rescale, Refusal):
        assert rescale.endswith(".")
        return
    rescale(1.5)
    bayesify.save(posterior, tmp_path / "saved")
    assert_same(posterior, bayesify.load(tmp_path / "saved", mlp.network()), mlp, learning=False)
    rescale(1.0)
    assert_same(posterior, fitted(case, mlp), mlp)


@pytest.mark.filterwarnings("ignore:This posterior has no uncertainty yet")
def test_an_unfitted_posterior_is_stored_without_the_networks_weights(case: Case, mlp: Example, tmp_path: Path):
    network = mlp.network()
    posterior = bayesify.convert(network, case.silent)
    bayesify.save(posterior, tmp_path / "saved")
    assert_same(posterior, bayesify.load(tmp_path / "saved", network), mlp, learning=False)
    other = mlp.network()
    with torch.no_grad():
        next(other.parameters()).add_(1)
    with pytest.raises(ValueError, match="not the one that"):
        bayesify.load(tmp_path / "saved", other)


def test_deepcopy(posterior: Posterior, mlp: Example):
    duplicate = copy.deepcopy(posterior)
    assert_same(posterior, duplicate, mlp)
    before = {name: tensor.clone() for name, tensor in posterior.state_dict().items()}
    fit(duplicate, mlp, epochs=1, seed=9)
    for name, tensor in posterior.state_dict().items():
        assert torch.equal(tensor, before[name]), f"training the copy changed {name}"


def test_a_copy_made_inside_a_mode_is_fresh(posterior: Posterior, mlp: Example):
    with posterior.drawn(posterior.keys(1, seed=0)[0]):
        duplicate = copy.deepcopy(posterior)
        unpickled = pickle.loads(pickle.dumps(posterior))
    x = mlp.inputs(64)
    for made in (duplicate, unpickled):
        with torch.no_grad():
            passes = torch.stack([made(x) for _ in range(8)])
        assert (passes.amax(0) > passes.amin(0)).any() == is_random(posterior)


def test_pickle(posterior: Posterior, mlp: Example):
    assert_same(posterior, pickle.loads(pickle.dumps(posterior)), mlp)


def test_torch_save(posterior: Posterior, mlp: Example):
    file = io.BytesIO()
    torch.save(posterior, file)
    file.seek(0)
    assert_same(posterior, torch.load(file, weights_only=False), mlp)


@pytest.mark.slow
def test_state_dict_round_trip(case: Case, example: Example):
    posterior = fitted(case, example)
    torch.manual_seed(11)
    other = bayesify.convert(example.make().double(), case.noisy).eval()
    assert any(not torch.equal(t, posterior.state_dict()[name]) for name, t in other.state_dict().items())
    other.load_state_dict(posterior.state_dict())
    assert_same(posterior, other, example)


def test_another_type(posterior: Posterior, mlp: Example):
    x = mlp.inputs(6)
    as_double = bayesify.predict(posterior, x, seed=1)
    single = copy.deepcopy(posterior).to(torch.float32)
    floating = [t for t in single.state_dict().values() if t.is_floating_point()]
    assert {t.dtype for t in floating} == {torch.float32}
    as_single = bayesify.predict(single, x.float(), seed=1)
    assert as_single.probs.dtype == torch.float32
    assert as_double.probs.dtype == torch.float64
    again = bayesify.predict(single.to(torch.float64), x, seed=1)
    assert again.probs.dtype == torch.float64
    # Draws in another type are other random numbers for methods that draw weights, so only what rounding to
    # float32 did may differ between the two float64 posteriors, which draw the same.
    assert_close(again.probs, as_double.probs, rtol=1e-4, atol=1e-5)
