"""The scale of variances, fitted on validation data."""

import math

import pytest
import torch
from torch import nn

from bayesify import Gaussian, MCDropout, convert, fit_variance_scale, predict
from tests.predict.linearised.networks import gaussian, randn


def nll(posterior, batches, scale, how):
    total, count = 0.0, 0
    for x, y in batches:
        prediction = predict(posterior, x, how=how, variance_scale=scale)
        if hasattr(prediction, "log_probs"):
            total -= prediction.log_probs.gather(-1, y[:, None]).sum().item()
        else:
            total -= torch.distributions.Normal(prediction.mean, prediction.std).log_prob(y).sum().item()
        count += len(y)
    return total / count


@pytest.mark.parametrize("how", ["moments", "linearised"])
@pytest.mark.parametrize("std", [0.01, 0.3, 2.0])
@pytest.mark.parametrize("labels", ["random", "right"])
def test_never_worse_than_one(how, std, labels):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    posterior = gaussian(network, std=std)
    x = randn(60, 4)
    y = torch.randint(3, (60,)) if labels == "random" else network(x).argmax(-1)
    batches = [(x[:40], y[:40]), (x[40:], y[40:])]
    scale = fit_variance_scale(posterior, batches, how=how)
    assert scale * (1 + 1e-9) >= 1e-4
    assert scale <= 1e4 * (1 + 1e-9)
    best = nll(posterior, batches, scale, how)
    assert best <= nll(posterior, batches, 1.0, how) + 1e-12
    grid = [nll(posterior, batches, math.exp(value), how) for value in torch.linspace(-9, 9, 60).tolist()]
    assert best <= min(grid) + 1e-9


def test_regression_has_a_known_answer():
    """Residuals with the variance s v + noise have their best scale near s: 4000 of them, within a tenth."""
    torch.manual_seed(0)
    posterior = gaussian(nn.Linear(4, 1), std=1.0, likelihood=Gaussian(0.1))
    x = randn(4000, 4)
    prediction = predict(posterior, x, how="moments")
    y = prediction.mean + (2.5 * prediction.epistemic + 0.01).sqrt() * randn(4000)
    assert abs(fit_variance_scale(posterior, [(x, y)], how="moments") - 2.5) < 0.25


def test_refusals():
    posterior = convert(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)).double(), MCDropout())
    with pytest.raises(ValueError, match="how must be one of"):
        fit_variance_scale(posterior, [], how="sampling")
    with pytest.raises(ValueError, match="gave no batch"):
        fit_variance_scale(posterior, [])
