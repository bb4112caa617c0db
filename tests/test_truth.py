"""Is the decomposition true? On data whose noise is known, and against posteriors that are known."""

import dataclasses
import functools

import pytest
import torch
from torch import nn

from bayesify import Gaussian, Laplace, convert, fit, predict
from experiments import truth
from experiments.hmc import hmc


@pytest.mark.slow
def test_hmc_samples_a_posterior_that_is_known():
    """Linear regression: mean and covariance of 64 chains against the closed form (4.9 standard errors)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 3, generator=generator, dtype=torch.float64) @ torch.tensor(
        [[1.0, 0.6, 0.0], [0.0, 1.0, 0.3], [0.0, 0.0, 1.0]], dtype=torch.float64
    )
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    y = y + 0.5 * torch.randn(30, generator=generator, dtype=torch.float64)
    precision = x.T @ x / 0.25 + torch.eye(3, dtype=torch.float64)
    covariance = precision.inverse()
    mean = covariance @ (x.T @ y / 0.25)

    def potential(w):
        return (y - x @ w).square().sum() / (2 * 0.25) + w.square().sum() / 2

    start = torch.zeros(64, 3, dtype=torch.float64)
    settings = {"num_samples": 100, "burn_in": 50, "leapfrogs": 10, "step": 0.1}
    samples, accepted = hmc(potential, start, generator=generator, **settings)
    assert 0.6 < accepted.mean() < 0.95
    # Each chain's mean is an independent estimate: their spread gives the standard error, however slow the chains mix.
    each = samples.mean(0)
    assert ((each.mean(0) - mean).abs() < 4.9 * each.std(0) / 8).all()
    centred = samples - mean
    second = torch.einsum("smi,smj->mij", centred, centred) / len(samples)
    assert ((second.mean(0) - covariance).abs() < 4.9 * second.std(0) / 8).all()


@pytest.mark.parametrize("structure", ["last-layer", "kronecker"])
def test_linear_regression_has_the_closed_forms_two_parts(structure):
    """y = w.x + b + e: the noise is aleatoric, x' Cov(w, b) x epistemic, and only the second falls with n."""
    noise_std, prior_precision = 0.5, 2.0
    generator = torch.Generator().manual_seed(0)
    new = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    before = torch.full((7,), torch.inf, dtype=torch.float64)
    for n in (10, 100, 1000):
        x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
        y = x.sum(1, keepdim=True) + noise_std * torch.randn(n, 1, generator=generator, dtype=torch.float64)
        ones = torch.cat([x, torch.ones(n, 1, dtype=torch.float64)], 1)
        precision = ones.T @ ones / noise_std**2 + prior_precision * torch.eye(4, dtype=torch.float64)
        mode = torch.linalg.solve(precision, ones.T @ y / noise_std**2)
        network = nn.Linear(3, 1).double()
        with torch.no_grad():
            network.weight.copy_(mode[:3].T)
            network.bias.copy_(mode[3])
        method = Laplace(structure=structure, prior_precision=prior_precision)
        posterior = convert(network, method, likelihood=Gaussian(noise_std=noise_std))
        fit(posterior, [(x, y)], num_data=n, progress=False)
        rows = torch.cat([new, torch.ones(7, 1, dtype=torch.float64)], 1)
        expected = (rows @ precision.inverse() * rows).sum(1)
        prediction = predict(posterior, new, how="linearised")
        torch.testing.assert_close(prediction.epistemic, expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(prediction.aleatoric, torch.full_like(expected, noise_std**2), rtol=1e-5, atol=0)
        torch.testing.assert_close(prediction.total, expected + noise_std**2, rtol=1e-5, atol=0)
        assert (prediction.epistemic < before).all()
        before = prediction.epistemic


trained, method_for = truth.trained, truth.method_for


@functools.cache
def plain_network(n):
    """Return the network that all methods begin with, which each copies."""
    return trained(*truth.classes(n, 0), "classification")


def smaller(part, name, n):
    """Return a method as in the experiment, but for at most four members."""
    method = method_for(part, name, n)
    return dataclasses.replace(method, members=4) if name == "deep-ensemble" else method


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # short runs have reasons to be told of
@pytest.mark.parametrize("name", list(truth.methods_for(128, 1)))
def test_the_two_parts_are_those_of_data_with_known_noise(name, monkeypatch):
    """A fifth of the labels is wrong: aleatoric uncertainty tends to .5004 nats, epistemic falls as data grow."""
    monkeypatch.setattr(truth, "STEPS", 400)
    monkeypatch.setattr(truth, "trained", lambda x, y, likelihood: plain_network(len(x)))
    monkeypatch.setattr(truth, "method_for", smaller)
    few, many = (truth.size_row(truth.classes, name, n) for n in (128, 8192))
    assert abs(many["aleatoric"] - truth.ENTROPY) < 0.1
    assert abs(many["total"] - truth.ENTROPY) < 0.1
    if name == "map":
        assert many["epistemic"] == 0
    elif name == "abnn":  # its noise has a scale that is set, and that data do not change
        assert 0 < many["epistemic"] < 0.1
    else:
        assert many["epistemic"] < 0.7 * few["epistemic"]
