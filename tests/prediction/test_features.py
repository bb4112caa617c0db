"""Features averaged over draws, against a loop over draws with the head cut off."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesify
from bayesify import ABNN, MAP, BayesAdapter, DeepEnsemble, MCDropout
from experiments.verification import cosine_scores


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 6))
        self.head = nn.Linear(6, 3)
        self.aside = nn.Linear(9, 9)  # never called

    def forward(self, x, cut=False):
        h = torch.tanh(self.body(x))
        return h if cut else self.head(h)


METHODS = [MAP(), MCDropout(), ABNN(alpha=0.3), DeepEnsemble(members=3), BayesAdapter(start_std=(0.2, 0.3))]


def _case(method):
    torch.manual_seed(0)
    return bayesify.convert(Net().double(), method), torch.randn(5, 4, dtype=torch.float64)


def _loop(posterior, x, samples, seed):
    posterior.eval()
    found = []
    with torch.no_grad():
        for key in posterior.keys(samples, seed):
            with posterior.drawn(key):
                found.append(posterior(x, cut=True))
    return torch.stack(found)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("chunk", [None, 2])
def test_features_are_the_mean_over_draws(method, chunk):
    posterior, x = _case(method)
    samples = None if isinstance(method, MAP | DeepEnsemble) else 7
    found = bayesify.predict(
        posterior, x, num_draws=samples, seed=3, output="features", chunk_size=chunk, keep_samples=True
    )
    draws = _loop(posterior, x, samples, 3)
    assert_close(found.samples, draws, rtol=1e-10, atol=1e-12)
    assert_close(found.features, draws.mean(0), rtol=1e-10, atol=1e-12)
    assert_close(found.variance, draws.var(0, correction=0), rtol=1e-9, atol=1e-12)
    assert_close(found.score("epistemic"), draws.var(0, correction=0).sum(-1), rtol=1e-9, atol=1e-12)
    assert len(found[1:3]) == 2


def test_features_before_the_first_noise_do_not_differ():
    torch.manual_seed(0)
    network = Net().double()
    posterior = bayesify.convert(network, BayesAdapter(start_std=(0.2, 0.3)), include="head")
    x = torch.randn(5, 4, dtype=torch.float64)
    found = bayesify.predict(posterior, x, num_draws=6, seed=0, output="features")
    with torch.no_grad():
        assert_close(found.features, network.eval()(x, cut=True))
    assert_close(found.variance, torch.zeros_like(found.variance))


def test_the_mean_network_and_a_named_module():
    posterior, x = _case(BayesAdapter(start_std=(0.2, 0.3)))
    mean = bayesify.predict(posterior, x, how="mean", output="features")
    with torch.no_grad(), posterior.eval().mean():
        assert_close(mean.features, posterior(x, cut=True))
        early = bayesify.predict(posterior, x, how="mean", output="features:body.1")
        assert_close(early.features, posterior.network.body[0](x))
    assert not any(module._forward_pre_hooks for module in posterior.network.modules())


def test_a_loader_gives_the_same_and_pairs_can_be_scored():
    posterior, x = _case(MCDropout())
    whole = bayesify.predict(posterior, x, num_draws=4, seed=1, output="features").features
    parts = bayesify.predict(posterior, [x[:2], x[2:]], num_draws=4, seed=1, output="features").features
    assert_close(parts, whole)
    scores = cosine_scores(whole[:4], whole[1:])
    assert_close(scores, torch.cosine_similarity(whole[:4], whole[1:]))


def test_what_is_wrong_is_said():
    posterior, x = _case(MAP())
    with pytest.raises(ValueError, match="output must be"):
        bayesify.predict(posterior, x, output="feature")
    with pytest.raises(ValueError, match="no module 'neck'"):
        bayesify.predict(posterior, x, output="features:neck")
    with pytest.raises(ValueError, match="was not called"):
        bayesify.predict(posterior, x, output="features:aside")
    flat = bayesify.convert(nn.Conv1d(4, 3, 1), MAP())
    with pytest.raises(ValueError, match="calls no linear layer"):
        bayesify.predict(flat, torch.randn(2, 4, 5), output="features")
