"""predict against a naive loop over the draws."""

import math

import pytest
import torch
from torch import nn

from bayesify import MAP, SWAG, DeepEnsemble, MCDropout, convert, predict
from bayesify.likelihoods import Gaussian
from tests.laws.networks import Attention, TimeFirst, Windows, mlp, spread

EXACT = {"rtol": 1e-11, "atol": 1e-12}
X = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def batch_norm_network():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 3)).double()


POSTERIORS = {
    "map": lambda: convert(mlp(), MAP()),
    "dropout": lambda: convert(mlp(), MCDropout()),
    "dropout inserted": lambda: convert(mlp(), MCDropout(p=0.3, insert_before="linear")),
    "dropout beside batch norm": lambda: convert(batch_norm_network(), MCDropout()),
    "ensemble": lambda: convert(batch_norm_network(), DeepEnsemble(members=5)),
    "swag": lambda: spread(convert(mlp(), SWAG(rank=3))),
}


@pytest.fixture(params=sorted(POSTERIORS))
def posterior(request):
    return POSTERIORS[request.param]()


@torch.no_grad()
def looped(posterior, x, num_draws, seed):
    """Return the draws' outputs, one pass for each, (S, B, ...)."""
    modes = [(module, module.training) for module in posterior.modules()]
    posterior.eval()
    outputs = []
    for key in posterior.keys(num_draws, seed):
        with posterior.drawn(key):
            outputs.append(posterior.outputs(x))
    for module, training in modes:
        module.training = training
    return torch.stack(outputs)


def entropy(probs):
    return -(probs * probs.log()).sum(-1)


@pytest.mark.parametrize("chunk_size", [None, 1, 2, 4, 9, 100])
def test_equals_a_naive_loop_for_every_chunk_size(posterior, chunk_size):
    samples = looped(posterior, X, 7, seed=3).softmax(-1)
    probs = samples.mean(0)
    prediction = predict(posterior, X, num_draws=7, seed=3, chunk_size=chunk_size, keep_samples=True)
    torch.testing.assert_close(prediction.samples, samples, **EXACT)
    torch.testing.assert_close(prediction.probs, probs, **EXACT)
    torch.testing.assert_close(prediction.total, entropy(probs), **EXACT)
    torch.testing.assert_close(prediction.aleatoric, entropy(samples).mean(0), **EXACT)
    gain = (entropy(probs) - entropy(samples).mean(0)).clamp_min(0)
    torch.testing.assert_close(prediction.epistemic, gain, rtol=1e-9, atol=1e-12)
    assert len(prediction) == 9


@pytest.mark.parametrize("make", [TimeFirst, Windows, Attention])
@pytest.mark.parametrize("chunk_size", [1, 2, 3, 6, 12])
def test_other_layouts(make, chunk_size):
    posterior = convert(make(), MCDropout())
    x = torch.randn(12, 6, 6, dtype=torch.float64)
    prediction = predict(posterior, x, num_draws=5, seed=0, chunk_size=chunk_size, keep_samples=True)
    torch.testing.assert_close(prediction.samples, looped(posterior, x, 5, 0).softmax(-1), **EXACT)


def test_the_first_of_one_draw_is_draw(posterior):
    prediction = predict(posterior, X, num_draws=1, seed=11, keep_samples=True)
    with torch.no_grad():
        posterior.eval()
        torch.testing.assert_close(prediction.samples[0], posterior.draw(11)(X).softmax(-1), **EXACT)


def test_seeds():
    posterior = convert(mlp(), MCDropout())
    first, again, other = (predict(posterior, X, seed=seed).probs for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert (first - other).abs().max() > 1e-4
    torch.manual_seed(5)
    assert torch.equal(predict(posterior, X).probs, first)
    one = predict(posterior, X, seed=None).probs
    two = predict(posterior, X, seed=None).probs
    torch.manual_seed(5)
    assert torch.equal(predict(posterior, X, seed=None).probs, one)
    assert not torch.equal(one, two)
    state = torch.get_rng_state()
    predict(posterior, X, seed=0)
    assert torch.equal(torch.get_rng_state(), state)  # a given seed leaves the global generator alone


def test_mean_is_one_pass_without_noise():
    posterior = convert(mlp(), MCDropout())
    prediction = predict(posterior, X, how="mean")
    torch.testing.assert_close(prediction.probs, mlp_mean(posterior), **EXACT)
    assert (prediction.epistemic == 0).all()


def mlp_mean(posterior):
    with posterior.mean(), torch.no_grad():
        return posterior(X).softmax(-1)


@pytest.mark.parametrize("number", [1, 2, 33])
def test_num_draws(number):
    prediction = predict(convert(mlp(), MCDropout()), X, num_draws=number, seed=0, keep_samples=True)
    assert prediction.samples.shape == (number, 9, 3)
    assert predict(convert(mlp(), MCDropout()), X, seed=0).samples is None


def test_more_draws_are_a_longer_list_of_the_same():
    posterior = convert(mlp(), MCDropout())
    few, many = (predict(posterior, X, num_draws=s, seed=0, keep_samples=True).samples for s in (3, 10))
    torch.testing.assert_close(many[:3], few, **EXACT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"how": "linear"}, "how must be one of .'sampling', 'streamlined', .*but it is 'linear'"),
        ({"num_draws": 0}, "num_draws must be a whole number of at least 1"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=message):
        predict(convert(mlp(), MCDropout()), X, **options)


def test_modes_are_restored():
    plain = batch_norm_network().train()
    plain[1].eval()
    posterior = convert(plain, MCDropout())
    modes = [module.training for module in posterior.modules()]
    seen = []
    posterior.network[1].register_forward_hook(lambda module, args, output: seen.append(module.training))
    posterior.network[0].register_forward_hook(lambda module, args, output: seen.append(module.training))
    statistics = posterior.network[1].running_mean.clone()
    predict(posterior, X, seed=0)
    assert seen
    assert not any(seen)
    assert [module.training for module in posterior.modules()] == modes
    assert torch.equal(posterior.network[1].running_mean, statistics)

    broken = {"left": 4}

    def fail(module, args):
        broken["left"] -= 1
        if broken["left"] < 0:
            raise KeyError("broken")

    posterior.network[4].register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="broken"):
        predict(posterior, X, seed=0, chunk_size=1)
    assert [module.training for module in posterior.modules()] == modes
    assert all("forward" not in module.__dict__ for module in posterior.modules())
    assert posterior.runtime.runner is None
    assert torch.is_grad_enabled()


def test_inside_inference_mode():
    posterior = convert(mlp(), MCDropout())
    expected = predict(posterior, X, num_draws=20, seed=0, chunk_size=9).probs
    with torch.inference_mode():
        inside = X.clone()
        torch.testing.assert_close(predict(posterior, inside, num_draws=20, seed=0, chunk_size=1).probs, expected)


def test_a_prediction_carries_no_graph(posterior):
    assert not predict(posterior, X.clone().requires_grad_(), num_draws=2, seed=0).probs.requires_grad


# -- dense outputs and regression ---------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [1, 3, None])
def test_segmentation(chunk_size):
    network = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.Dropout2d(0.5), nn.Conv2d(8, 4, 1)).double()
    posterior = convert(network, MCDropout())
    x = torch.randn(5, 2, 6, 7, dtype=torch.float64)
    samples = looped(posterior, x, 6, 0).softmax(2).movedim(2, -1)
    prediction = predict(posterior, x, num_draws=6, seed=0, chunk_size=chunk_size)
    torch.testing.assert_close(prediction.probs, samples.mean(0), **EXACT)
    assert prediction.label.shape == prediction.epistemic.shape == (5, 6, 7)


@pytest.mark.parametrize("chunk_size", [1, 4, None])
def test_regression(chunk_size):
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2)).double()
    posterior = convert(network, MCDropout(), likelihood=Gaussian(noise_std=0.5))
    outputs = looped(posterior, X, 12, 1)
    prediction = predict(posterior, X, num_draws=12, seed=1, chunk_size=chunk_size, keep_samples=True)
    torch.testing.assert_close(prediction.mean, outputs.mean(0), **EXACT)
    torch.testing.assert_close(prediction.epistemic, outputs.var(0, correction=0), **EXACT)
    torch.testing.assert_close(prediction.samples, outputs, **EXACT)
    assert prediction.aleatoric.flatten()[0].item() == pytest.approx(0.25)
    torch.testing.assert_close(prediction.std, (prediction.aleatoric + prediction.epistemic).sqrt())


def test_binary():
    network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    posterior = convert(network, MCDropout(), likelihood="binary")
    samples = looped(posterior, X, 6, 1).sigmoid()[..., 0]
    prediction = predict(posterior, X, num_draws=6, seed=1)
    positive = prediction.probs.reshape(9, -1)[:, -1]
    torch.testing.assert_close(positive, samples.mean(0), **EXACT)
    assert math.isfinite(prediction.epistemic.sum())
