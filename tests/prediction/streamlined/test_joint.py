"""Covariances through stacks of linear layers: against the Jacobian and, with all weights random, against draws."""

import pytest
import torch
from torch import nn

from bayesify import Gaussian, Streamlined, predict
from bayesify.laws import GaussianLaw, Posterior
from bayesify.prediction.streamlined import MomentsPass, NoRuleError
from tests.prediction.linearised.networks import exact_covariance, gaussian, randn

EXACT = {"rtol": 1e-9, "atol": 1e-12}
X = randn(3, 4)


def stack(*activations):
    first, second = activations or (nn.Identity(), nn.Identity())
    return nn.Sequential(nn.Linear(4, 6), first, nn.Linear(6, 5), second, nn.Dropout(0.1), nn.Linear(5, 3))


def test_one_random_layer_to_first_order():
    """With one random layer nothing but the linearisation is approximated, and that is what the Jacobian has too."""
    torch.manual_seed(0)
    every = gaussian(stack(nn.ReLU(), nn.Tanh()))
    chosen = {name: every.law.log_std.as_dict()[name] for name in ("0.weight", "0.bias")}
    posterior = Posterior(every.network, GaussianLaw(every.network, log_stds=chosen))
    posterior.set_likelihood(Gaussian(0.1))
    _, covariance = exact_covariance(posterior, X)
    _, found = MomentsPass(posterior, posterior.components()[0], first_order=True, covariance=True)(X)
    torch.testing.assert_close(found, covariance.diagonal(dim1=1, dim2=2), **EXACT)
    _, apart = MomentsPass(posterior, posterior.components()[0], first_order=True)(X)
    assert (apart - found).abs().max() > 0.01 * found.max()  # the covariances matter here


def test_all_layers_random_without_activations():
    """Exact: 40,000 draws have variances within six standard errors, sqrt(kurtosis / 40,000) of them."""
    torch.manual_seed(0)
    posterior = gaussian(stack(), std=0.3, likelihood=Gaussian(0.1))
    found = predict(posterior, X, how=Streamlined(covariance="full"))
    log_stds = posterior.law.log_std.as_dict()
    generator = torch.Generator().manual_seed(0)
    outputs = X.expand(40_000, 3, 4)
    for place in ("0", "2", "5"):
        layer = posterior.network.get_submodule(place)
        drawn = [
            p.detach() + log_stds[f"{place}.{part}"].exp().detach()
            * torch.randn(40_000, *p.shape, dtype=p.dtype, generator=generator)
            for part, p in (("weight", layer.weight), ("bias", layer.bias))
        ]  # fmt: skip
        outputs = outputs @ drawn[0].mT + drawn[1][:, None]
    moved = outputs - outputs.mean(0)
    variance, error = moved.square().mean(0), moved.square().std(0) / 200
    assert ((found.epistemic - variance).abs() < 6 * error).all()
    assert ((found.mean - outputs.mean(0)).abs() < 6 * outputs.std(0) / 200).all()


def test_centred_logits_of_one_layer():
    posterior = gaussian(nn.Linear(4, 3))
    one, other = (
        predict(posterior, X, how=how).logits_variance for how in (Streamlined(covariance="full"), "linearised")
    )
    torch.testing.assert_close(one, other, **EXACT)


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.one(x)
        return h + self.two(h)


@pytest.mark.parametrize("network", [Skip(), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3))])
def test_nothing_is_dropped_silently(network):
    with pytest.raises(NoRuleError, match="no rule for covariances"):
        predict(gaussian(network), X, how=Streamlined(covariance="full"))
