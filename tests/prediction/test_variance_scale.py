"""The scale of variances, fitted on validation data."""

import math

import pytest
import torch
from torch import nn

from bayesify import Gaussian, MCDropout, Streamlined, convert, fit_variance_scale, predict
from tests.marks import slow_but
from tests.prediction.linearised.networks import gaussian, randn


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


@pytest.mark.parametrize("how", [Streamlined(engine="moments"), "linearised"])
@pytest.mark.parametrize("std", slow_but([0.3], [0.01, 0.3, 2.0]))
@pytest.mark.parametrize("labels", slow_but(["right"], ["random", "right"]))
@pytest.mark.slow
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
    prediction = predict(posterior, x, how=Streamlined(engine="moments"))
    y = prediction.mean + (2.5 * prediction.epistemic + 0.01).sqrt() * randn(4000)
    assert abs(fit_variance_scale(posterior, [(x, y)], how=Streamlined(engine="moments")) - 2.5) < 0.25


def test_refusals():
    posterior = convert(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)).double(), MCDropout())
    with pytest.raises(ValueError, match=r"no variances of its own to scale. Use how='streamlined'"):
        fit_variance_scale(posterior, [], how="sampling")
    with pytest.raises(ValueError, match="gave no batch"):
        fit_variance_scale(posterior, [])


@pytest.mark.slow
@pytest.mark.parametrize("how", [Streamlined(engine="moments"), "linearised", Streamlined(engine="principal")])
def test_scales_of_layers_are_never_worse(how):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    posterior = gaussian(network, std=1.0)
    x = randn(40, 4)
    batches = [(x[:20], torch.randint(3, (20,))), (x[20:], torch.randint(3, (20,)))]
    scales = fit_variance_scale(posterior, batches, how=how, per_layer=True)
    assert list(scales) == ["0", "2"]
    best = nll(posterior, batches, scales, how)
    assert best <= nll(posterior, batches, 1.0, how) + 1e-12
    if how == "linearised":
        # V = s_0 V_0 + s_2 V_2, so that no common scale is better by more than the search's tolerance
        assert best <= nll(posterior, batches, fit_variance_scale(posterior, batches, how=how), how) + 1e-3


def test_scales_of_layers_are_those_of_their_weights():
    posterior = gaussian(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
    x = randn(5, 4)
    found = predict(posterior, x, how="linearised", variance_scale={"0": 0.25}).logits_variance
    with torch.no_grad():
        for name, log_std in posterior.law.log_std.as_dict().items():
            if name.startswith("0."):
                log_std.sub_(math.log(2))
    torch.testing.assert_close(predict(posterior, x, how="linearised").logits_variance, found, rtol=1e-9, atol=0)
    with pytest.raises(ValueError, match="no layer 'nowhere'"):
        predict(posterior, x, how=Streamlined(engine="moments"), variance_scale={"nowhere": 2.0})
    with pytest.raises(ValueError, match="at least 0"):
        predict(posterior, x, how=Streamlined(engine="moments"), variance_scale={"0": -1.0})
    dropout = convert(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)).double(), MCDropout())
    with pytest.raises(ValueError, match="no layer with Gaussian weights"):
        fit_variance_scale(dropout, [(x, torch.zeros(5).long())], per_layer=True)


def test_scales_of_layers_have_a_known_answer():
    """Residuals with the variance 4 V_0 + V_1 / 4: what is found fits 4000 of them as well as these numbers do."""
    torch.manual_seed(0)
    posterior = gaussian(nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1)), std=1.0, likelihood=Gaussian(0.01))
    x = 2 * randn(4000, 2)
    prediction = predict(posterior, x, how="linearised", variance_scale={"0": 4.0, "1": 0.25})
    y = prediction.mean + prediction.std * randn(4000)
    scales = fit_variance_scale(posterior, [(x, y)], how="linearised", per_layer=True)
    assert abs(scales["0"] / 4 - 1) < 0.25  # the first layer causes most of the variance
    best, true = (nll(posterior, [(x, y)], numbers, "linearised") for numbers in (scales, {"0": 4.0, "1": 0.25}))
    assert best <= true + 1e-4
