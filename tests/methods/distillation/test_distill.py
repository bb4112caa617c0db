"""Distilling banks: what comes out is a posterior like any other, and near the bank."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import SGLD, SWAG, DeepEnsemble, distill, sample_bank
from bayesify.laws import Posterior
from bayesify.methods.distillation import agreement

ALL = ["wgan-gp", "wgan", "gan", "pca", "mixture", "swag"]
QUICK = {"steps": 5, "hidden": (8, 8), "latent": 3, "components": 2, "num_bn_draws": 4, "batch": 16, "progress": False}


def mlp(batch_norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(6)] if batch_norm else []
    return nn.Sequential(nn.Linear(4, 6), *norm, nn.ReLU(), nn.Linear(6, 3)).eval()


def bank(size: int = 40) -> Posterior:
    """Two groups of networks, each with noise of rank two and a little of its own."""
    made = bayesify.convert(mlp(), SGLD(samples_per_chain=size))
    torch.manual_seed(1)
    columns = made.law.samples.shape[1]
    centres, directions = torch.randn(2, columns), 0.3 * torch.randn(2, columns)
    for row in range(size):
        made.law.append(centres[row % 2] + torch.randn(2) @ directions + 0.02 * torch.randn(columns))
    return made


X = torch.randn(20, 4)


@pytest.mark.parametrize("how", ALL)
@pytest.mark.slow
def test_a_distilled_posterior_is_a_posterior(how: str, tmp_path: Path):
    posterior = distill(bank(), how, **QUICK)
    prediction = bayesify.predict(posterior, X, num_draws=6, seed=0)
    assert (prediction.epistemic > 0).any()
    draw = posterior.draw(3)
    torch.testing.assert_close(draw(X)[:5], draw(X[:5]))
    bayesify.save(posterior, tmp_path / "made")
    loaded = bayesify.load(tmp_path / "made", mlp())
    assert loaded.method == posterior.method
    assert loaded.law.name == posterior.law.name
    if posterior.method is None:
        assert loaded.law.config() == posterior.law.config()
    assert torch.equal(bayesify.predict(loaded, X, num_draws=6, seed=0).probs, prediction.probs)
    with posterior.mean():
        assert posterior(X).isfinite().all()
    again = sample_bank(posterior, 7)
    assert again.law.samples.shape == (7, 51)


@pytest.mark.parametrize("how", ["wgan-gp", "mixture", "pca"])
def test_the_seed_decides(how: str):
    one, same, other = (distill(bank(), how, seed=seed, **QUICK) for seed in (0, 0, 1))
    states = [made.state_dict() for made in (one, same, other)]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    if how == "wgan-gp":
        assert not torch.equal(one.law.generator[0].weight, other.law.generator[0].weight)


def test_pca_has_the_samples_moments():
    source = bank(30)
    posterior = distill(source, "pca", latent=29, progress=False)
    last = posterior.law.generator[-1]
    covariance = last.weight @ last.weight.T
    np.testing.assert_allclose(covariance.detach(), np.cov(source.law.samples.T.numpy()), atol=2e-5)
    torch.testing.assert_close(posterior.law.centre(), source.law.samples.mean(0), rtol=1e-4, atol=1e-5)


def test_residual_noise_puts_the_variance_back():
    source = bank(40)
    posterior = distill(source, "pca", latent=2, residual=True, progress=False)
    explained, variance = posterior.law.generator[-1].weight.square().sum(1), source.law.samples.var(0)
    assert bool((explained < variance).all())
    torch.testing.assert_close(explained + posterior.law.residual_std.square(), variance)
    draws = torch.stack([posterior.law.sample(key) for key in posterior.keys(400, seed=0)])
    # 400 draws of a chi-square with few effective degrees: a relative standard error of about 7 %, times five.
    assert draws.var(0).sum().item() == pytest.approx(variance.sum().item(), rel=0.35)
    # Without what G makes, 400 independent draws of each of 51 weights: a relative standard error of 1 %, times five.
    with torch.no_grad():
        posterior.law.generator[-1].weight.zero_()
    noise = torch.stack([posterior.law.sample(key) for key in posterior.keys(400, seed=0)])
    assert noise.var(0).sum().item() == pytest.approx(posterior.law.residual_std.square().sum().item(), rel=0.05)


def test_residual_noise_is_what_the_coordinates_of_a_generator_leave_out(tmp_path: Path):
    source = bank(40)
    options = {"latent": 3, "hidden": (2,), "steps": 20, "progress": False}
    plain, posterior = (distill(source, residual=residual, **options) for residual in (False, True))
    assert torch.equal(plain.law.generator[-1].weight, posterior.law.generator[-1].weight)
    axes = torch.linalg.svd(source.law.samples - source.law.samples.mean(0), full_matrices=False).Vh[:2]
    left = (source.law.samples - source.law.samples @ axes.T @ axes).var(0)
    torch.testing.assert_close(posterior.law.residual_std.square(), left, rtol=1e-4, atol=1e-6)
    bayesify.save(posterior, tmp_path / "made")
    again = bayesify.load(tmp_path / "made", mlp())
    key = posterior.keys(1, seed=3)[0]
    assert torch.equal(again.law.sample(key), posterior.law.sample(key))
    assert not torch.equal(posterior.law.sample(key), plain.law.sample(key))


def test_swag_has_the_samples_moments():
    source = bank(30)
    posterior = distill(source, "swag", latent=5, progress=False)
    torch.testing.assert_close(posterior.law.average, source.law.samples.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(posterior.law.variance(), source.law.samples.var(0, correction=0), rtol=1e-3, atol=1e-5)


def test_a_mixture_finds_the_groups():
    source = bank(60)
    posterior = distill(source, "mixture", components=2, progress=False)
    assert posterior.law.shares.tolist() == pytest.approx([0.5, 0.5])
    groups = torch.stack([source.law.samples[0::2].mean(0), source.law.samples[1::2].mean(0)])
    distances = torch.cdist(posterior.law.means, groups)
    assert distances.amin(1).max() < 1e-3
    torch.testing.assert_close(posterior.law.centre(), source.law.samples.mean(0), rtol=1e-4, atol=1e-4)
    components = torch.cdist(torch.stack([posterior.law.sample(k) for k in posterior.keys(200, 0)]), groups).argmin(1)
    assert 60 < components.sum() < 140  # 5.6 standard errors of a fair coin


@pytest.mark.slow
def test_distillation_comes_near_the_bank_and_stops():
    source = bank(100)
    options = {"latent": 8, "hidden": (32, 32), "lr": 1e-3, "batch": 64, "progress": False, "check_steps": 50}
    posterior = distill(source, inputs=X, steps=600, patience=3, **options)
    found = posterior.agreements
    assert list(found)[:2] == [50, 100]
    best = min(found, key=lambda step: found[step].total)
    assert max(found) - best <= 3 * 50
    assert found[best].total < 0.5 * found[50].total or best == 50
    now = agreement(posterior, bayesify.predict(source, X, seed=0), X, num_draws=50)
    assert now == found[best], "the best generator is the one that is returned"
    point = bayesify.predict(sample_bank(source, 1), X)
    worse = agreement(sample_bank(source, 1), bayesify.predict(source, X, seed=0), X)
    assert found[best].total < 0.5 * worse.total
    assert (point.epistemic.abs() < 1e-6).all()


def test_agreement_of_a_posterior_with_itself():
    source = bank()
    reference = bayesify.predict(source, X, seed=0)
    same = agreement(source, reference, X)
    assert (same.divergence, same.epistemic_error, same.same_label) == (0, 0, 1)


@pytest.mark.parametrize("how", ALL)
@pytest.mark.slow
def test_batch_normalisation(how: str):
    torch.manual_seed(1)
    data = DataLoader(TensorDataset(torch.randn(16, 4), torch.arange(16) % 3), batch_size=8)
    posterior = bayesify.convert(mlp(batch_norm=True), SWAG(rank=2, epochs=3, num_bn_draws=6, lr=0.1))
    bayesify.fit(posterior, data, progress=False, accuracy_tolerance=1)
    source = sample_bank(posterior.eval(), 6)
    with pytest.raises(ValueError, match="loader="):
        distill(source, how, **QUICK)
    made = distill(source, how, loader=data, **QUICK)
    assert bayesify.predict(made, X, num_draws=4, seed=0).probs.isfinite().all()
    with pytest.raises(ValueError, match="4"):
        bayesify.predict(made, X, num_draws=5, seed=0)


def test_an_ensemble_can_be_distilled():
    posterior = bayesify.convert(mlp(), DeepEnsemble(members=4))
    made = distill(sample_bank(posterior, 4), **QUICK)
    assert made.law.source == "deep-ensemble"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"algorithm": "vae"}, "algorithm must be one of"),
        ({"hidden": ()}, "hidden layer"),
        ({"steps": 0}, "at least 1"),
    ],
)
def test_bad_settings(change: dict, words: str):
    with pytest.raises(ValueError, match=words):
        distill(bank(), **{**QUICK, **change})


def test_only_banks_are_distilled():
    with pytest.raises(TypeError, match="sample_bank"):
        distill(bayesify.convert(mlp(), bayesify.MAP()))
    with pytest.raises(ValueError, match="at least two"):
        distill(bayesify.convert(mlp(), bayesify.SGLD()))
