"""Numbers with noise of Student's distribution."""

import math

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from bayesify import Gaussian, Prediction, RegressionPrediction, StudentPrediction, StudentT, convert, load, save
from bayesify.likelihoods import as_likelihood, likelihood_from_dict
from bayesify.methods import MAP

F64 = torch.float64


def learned(dof, scale):
    likelihood = StudentT().double()
    with torch.no_grad():
        likelihood.log_excess.fill_(math.log(dof - 2))
        likelihood.log_scale.fill_(math.log(scale))
    return likelihood


def panels(edges):
    """Return the points and weights of Gauss's rule in each panel."""
    x, w = np.polynomial.legendre.leggauss(40)
    low, high = np.asarray(edges)[:-1, None], np.asarray(edges)[1:, None]
    return ((low + high) / 2 + (high - low) / 2 * x).ravel(), ((high - low) / 2 * w).ravel()


def convolved(y, variance, dof, scale):
    """Return the density of N(0, variance) + scale t at y: an integral over the Gaussian, in many panels."""
    std = math.sqrt(variance)
    near = scale * np.array([-60, -20, -8, -4, -2, -1, 0, 1, 2, 4, 8, 20, 60])
    m, w = panels(np.sort(np.concatenate([np.linspace(-9, 9, 13) * std, np.clip(y + near, -9 * std, 9 * std)])))
    return (stats.t.pdf(y - m, dof, scale=scale) * stats.norm.pdf(m, scale=std)) @ w


@pytest.mark.parametrize("shape", [(6,), (6, 1), (2, 3)])
@pytest.mark.parametrize("dof", [2.5, 4.0, 300.0])
def test_log_prob_is_that_of_scipy(shape, dof):
    mean, target = torch.randn(shape, dtype=F64), 5 * torch.randn(shape, dtype=F64)
    expected = stats.t(dof, mean, 0.3).logpdf(target)
    expected = expected[..., 0] if shape[-1] == 1 else expected
    for likelihood in (StudentT(dof, scale=0.3).double(), learned(dof, 0.3)):
        np.testing.assert_allclose(likelihood.log_prob(mean, target).detach(), expected, rtol=1e-7)
        assert likelihood.nll(mean, target).item() == pytest.approx(-expected.mean(), rel=1e-7)


def test_scale_and_degrees_of_freedom_are_learned():
    target = torch.from_numpy(stats.t(3.5, 1.0, 0.4).rvs(4000, random_state=0))
    likelihood = StudentT().double()
    nll = likelihood.learn(torch.ones(4000, 1, dtype=F64), target)
    expected = optimize.minimize(
        lambda p: -stats.t(2 + math.exp(p[0]), 1.0, math.exp(p[1])).logpdf(target).mean(), [0.0, 0.0]
    )
    assert nll == pytest.approx(expected.fun, abs=1e-6)
    assert likelihood.dof.item() == pytest.approx(2 + math.exp(expected.x[0]), rel=1e-2)
    assert likelihood.scale.item() == pytest.approx(math.exp(expected.x[1]), rel=1e-3)


def test_outliers_pull_less_than_with_gaussian_noise():
    target = torch.tensor([0.0, 0.1, -0.1, 50.0], dtype=F64)
    where = {}
    for name, likelihood in (("t", StudentT(3.0, scale=0.1)), ("normal", Gaussian(0.1))):
        grid = torch.linspace(-1, 20, 2101, dtype=F64)
        nll = -likelihood.log_prob(grid[:, None].expand(-1, 4), target.expand(len(grid), 4)).sum(1)
        where[name] = grid[nll.argmin()].item()
    assert abs(where["t"]) < 0.05
    assert where["normal"] == pytest.approx(12.5, abs=0.01)


# -- predictions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3,), (3, 1), (1, 1), (3, 2)])
def test_draws_in_groups_are_mean_variance_and_noise(shape):
    outputs = torch.randn(8, *shape, dtype=F64)
    stream = StudentT(4.0, scale=0.5).double().stream(keep_samples=True)
    for some in outputs.split([1, 5, 2]):
        stream.add(some, part=1, view=2)
    found = stream.result()
    means = outputs[..., 0] if shape[-1] == 1 and len(shape) > 1 else outputs
    assert type(found) is StudentPrediction
    assert torch.equal(found.samples, means)
    torch.testing.assert_close(found.mean, means.mean(0), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(found.epistemic, means.var(0, correction=0), rtol=1e-10, atol=0)
    noise = torch.full_like(found.mean, stats.t(4, scale=0.5).var())
    torch.testing.assert_close(found.aleatoric, noise, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dof", [2.1, 5.0, 1e4])
@pytest.mark.parametrize("variance", [1e-6, 0.3, 25.0])
def test_a_gaussian_mean_has_the_convolution(dof, variance):
    targets = torch.tensor([0.0, 0.7, -3.0, 15.0], dtype=F64)
    likelihood = StudentT(dof, scale=0.5).double()
    found = likelihood.from_gaussian(torch.zeros(4, 1, dtype=F64), torch.full((4, 1), variance, dtype=F64))
    expected = np.log([convolved(y, variance, dof, 0.5) for y in targets.tolist()])
    near = expected > -200  # of what scipy can integrate
    np.testing.assert_allclose(found.log_prob(targets)[near], expected[near], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dof", [2.1, 5.0, 1e6])
def test_without_epistemic_variance_it_is_students_own(dof):
    targets = torch.tensor([0.0, 1.0, -30.0, 1e6], dtype=F64)
    found = StudentT(dof, scale=2.0).double().from_gaussian(torch.zeros(4, dtype=F64), torch.zeros(4, dtype=F64))
    expected = stats.t(dof, scale=2.0).logpdf(targets)
    rows = slice(None) if dof < 100 else slice(3)  # so far out, a Gaussian's tail is below all numbers
    np.testing.assert_allclose(found.log_prob(targets)[rows], expected[rows], rtol=1e-9)
    for level in (0.01, 0.5, 0.95, 0.9999):
        low, high = found.interval(level)
        np.testing.assert_allclose(high, stats.t(dof, scale=2.0).interval(level)[1], rtol=1e-8)
        assert torch.equal(low, -high)


def test_intervals_hold_their_level():
    likelihood = StudentT(3.0, scale=0.5).double()
    found = likelihood.from_gaussian(torch.tensor([1.0], dtype=F64), torch.tensor([0.7], dtype=F64))
    low, high = (end.item() for end in found.interval(0.9))
    points, weights = panels(np.linspace(low, high, 5))
    inside = np.array([convolved(y - 1.0, 0.7, 3.0, 0.5) for y in points]) @ weights
    assert inside == pytest.approx(0.9, abs=1e-6)
    with pytest.raises(ValueError, match="level is a probability"):
        found.interval(95)


def test_log_prob_is_near_the_mixture_of_many_draws():
    likelihood = StudentT(3.0, scale=0.5).double()
    z = torch.special.ndtri((torch.arange(4000, dtype=F64) + 0.5) / 4000)
    draws = 1 + 0.8 * z[:, None]
    targets = torch.tensor([-4.0, 0.0, 1.0, 2.5], dtype=F64)
    found = Prediction.join([likelihood.from_samples(draws)] * 4).log_prob(targets)
    mixture = likelihood.mixture_log_prob(draws.expand(-1, 4), targets)
    torch.testing.assert_close(found, mixture, rtol=0, atol=2e-3)


def test_mixtures_rows_and_divergences():
    likelihood = StudentT(3.0, scale=0.5).double()
    one, two = (likelihood.from_samples(torch.randn(4, 3, dtype=F64)) for _ in range(2))
    mixed = Prediction.mixture([one, two], [0.25, 0.75])
    assert type(mixed) is StudentPrediction
    torch.testing.assert_close(mixed.mean, 0.25 * one.mean + 0.75 * two.mean, rtol=1e-12, atol=0)
    assert torch.equal(mixed.dof, torch.full((3,), 3.0, dtype=F64))
    target = torch.randn(3, dtype=F64)
    torch.testing.assert_close(one[1:].log_prob(target[1:]), one.log_prob(target)[1:], rtol=1e-14, atol=0)
    with pytest.raises(ValueError, match="no divergence of a StudentPrediction"):
        one.divergence(two)
    assert isinstance(one, RegressionPrediction)


# -- curvature, calibration, files ------------------------------------------------------------------------------------


def test_the_curvature_is_the_expected_hessian():
    likelihood = StudentT(3.5, scale=0.7).double()
    points, weights = panels([-60, -20, -8, -4, -2, -1, 0, 1, 2, 4, 8, 20, 60])
    leaf = torch.zeros(len(points), dtype=F64, requires_grad=True)
    log_prob = likelihood.log_prob(leaf, torch.from_numpy(points))
    (slope,) = torch.autograd.grad(log_prob.sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), leaf)
    expected = -float((second * log_prob.exp()).detach().numpy() @ weights)
    found = likelihood.output_factor(torch.zeros(2, 3, dtype=F64))
    assert found.shape == (2, 3, 1, 1)
    torch.testing.assert_close(found.square(), torch.full_like(found, expected), rtol=1e-5, atol=0)
    generator = torch.Generator().manual_seed(0)
    drawn = likelihood.output_factor(torch.zeros(2, 3, dtype=F64), num_draws=2000, generator=generator)[:, :, 0]
    wanted = expected * torch.eye(3, dtype=F64).expand(2, 3, 3)
    torch.testing.assert_close(drawn @ drawn.mT, wanted, rtol=0, atol=0.1 * expected)


def test_calibration_finds_the_scale_of_the_variance():
    target = torch.from_numpy(stats.t(4.0, scale=0.6).rvs(600, random_state=1))
    outputs = torch.zeros(1, 600, 1, dtype=F64)
    likelihood = StudentT(4.0, scale=0.2).double()
    before, after = likelihood.calibrate([(outputs[:, :100], target[:100]), (outputs[:, 100:], target[100:])])
    assert likelihood.variance_scale.item() == pytest.approx(9, rel=0.15)
    assert after == pytest.approx(-likelihood.from_samples(outputs).log_prob(target).mean().item(), rel=1e-9)
    assert after < before
    again = likelihood.calibrate([(outputs, target)])
    assert again[1] <= again[0]
    with pytest.raises(ValueError, match="nothing to calibrate"):
        likelihood.calibrate([(outputs * torch.nan, target)])


def test_settings_names_and_targets():
    assert as_likelihood("student-t").to_dict() == {"kind": "student-t", "dof": None, "scale": None}
    rebuilt = likelihood_from_dict(StudentT(5, scale=2.0).to_dict())
    assert (rebuilt.dof.item(), rebuilt.scale.item()) == (5, 2)
    assert list(rebuilt.parameters()) == []
    for wrong in (2.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="number above 2"):
            StudentT(wrong)
    with pytest.raises(ValueError, match="scale must be None or a positive number"):
        StudentT(scale=0.0)
    with pytest.raises(ValueError, match=r"\(3, 2\) do not fit targets of shape \(3,\).*one mean per target"):
        StudentT().nll(torch.zeros(3, 2), torch.zeros(3))
    with pytest.raises(ValueError, match="has no parameters to learn"):
        rebuilt.learn(torch.zeros(2), torch.zeros(2))


def test_what_is_learned_is_saved(tmp_path):
    network = torch.nn.Linear(3, 1)
    posterior = convert(network, MAP(), likelihood=learned(7.0, 0.3).float())
    posterior.likelihood.variance_scale.fill_(1.5)
    save(posterior, tmp_path / "posterior")
    loaded = load(tmp_path / "posterior", network).likelihood
    for name in ("dof", "scale", "variance_scale"):
        assert torch.equal(getattr(loaded, name), getattr(posterior.likelihood, name)), name


def test_degrees_of_freedom_that_reach_2_leave_a_finite_variance():
    """As heavy tails without a variance make them; in float32, 2 + exp(-18) is 2."""
    likelihood = StudentT(scale=1.0)
    with torch.no_grad():
        likelihood.log_excess.fill_(-18.0)
    prediction = likelihood.from_gaussian(torch.zeros(2, 1), torch.zeros(2, 1))
    targets = torch.tensor([0.0, 3.0])
    assert prediction.variance.isfinite().all()
    expected = stats.t.logpdf(targets, likelihood.dof.item())
    np.testing.assert_allclose(prediction.log_prob(targets), expected, rtol=1e-6)
    with pytest.raises(ValueError, match="above 2, by 1e-05 or more"):
        StudentT(2.0000001)
