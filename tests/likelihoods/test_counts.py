"""Counts: Poisson and negative binomial."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from bayesify import (
    CountPrediction,
    NegativeBinomial,
    Poisson,
    Prediction,
    RegressionPrediction,
    convert,
    evaluate,
    load,
    save,
)
from bayesify.likelihoods import as_likelihood, count_prediction, likelihood_from_dict
from bayesify.likelihoods.count_prediction import count_cdf, count_log_prob
from bayesify.methods import MAP
from tests.marks import slow_but

F64 = torch.float64
MEANS = torch.tensor([0.01, 0.5, 3.0, 100.0, 1e4, 1e4], dtype=F64)
SIZES = torch.tensor([0.01, 0.5, 2.0, 99.9, 5.0, 1e5], dtype=F64)


def nbinom(mean, dispersion):
    size = 1 / np.asarray(dispersion)
    return stats.nbinom(size, size / (size + np.asarray(mean)))


def learned(dispersion):
    likelihood = NegativeBinomial().double()
    with torch.no_grad():
        likelihood.log_dispersion.fill_(math.log(dispersion))
    return likelihood


# -- the distribution -------------------------------------------------------------------------------------------------


def test_probabilities_and_cumulated_ones_are_those_of_scipy():
    expected = stats.nbinom(SIZES, SIZES / (SIZES + MEANS))
    for share in (0.3, 1.0, 1.7):
        count = (share * MEANS).floor()
        np.testing.assert_allclose(count_log_prob(count, MEANS.log(), SIZES), expected.logpmf(count), rtol=1e-8)
        np.testing.assert_allclose(count_cdf(count, MEANS, SIZES), expected.cdf(count), rtol=1e-9, atol=1e-13)


def test_a_large_size_is_poissons():
    counts, size = torch.tensor([0.0, 3.0, 90.0, 1e4], dtype=F64), torch.full((4,), 1e15, dtype=F64)
    rates = torch.tensor([0.1, 5.0, 100.0, 1e4], dtype=F64)
    expected = stats.poisson(rates)
    np.testing.assert_allclose(count_log_prob(counts, rates.log(), size), expected.logpmf(counts), rtol=1e-11)
    np.testing.assert_allclose(count_cdf(counts, rates, size), expected.cdf(counts), rtol=1e-9)  # as torch's


def test_both_ways_of_the_series_meet():
    count, log_mean = torch.tensor([0.0, 7.0, 500.0], dtype=F64), torch.tensor([1.0, 2.0, 6.0], dtype=F64)
    at = torch.full((3,), 100.0, dtype=F64)
    left, right = (count_log_prob(count, log_mean, at * (1 + move)) for move in (-1e-13, 1e-13))
    torch.testing.assert_close(left, right, rtol=1e-11, atol=0)


# -- log-probability --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6,), (6, 1), (2, 3)])
def test_log_prob_is_that_of_torch_and_scipy(shape):
    log_rate, count = torch.randn(shape, dtype=F64), torch.poisson(3 * torch.ones(shape, dtype=F64))
    flat, counts = (x[..., 0] if shape[-1] == 1 else x for x in (log_rate, count))
    expected = torch.distributions.Poisson(flat.exp()).log_prob(counts)
    torch.testing.assert_close(Poisson().log_prob(log_rate, count), expected, rtol=1e-12, atol=0)
    loss = torch.nn.PoissonNLLLoss(full=False, reduction="none")(flat, counts) + torch.lgamma(counts + 1)
    torch.testing.assert_close(Poisson().nll(log_rate, count.long()), loss.mean(), rtol=1e-12, atol=0)
    for likelihood in (NegativeBinomial(0.4), learned(0.4)):
        found = likelihood.double().log_prob(log_rate, count).detach()
        np.testing.assert_allclose(found, nbinom(flat.exp(), 0.4).logpmf(counts), rtol=1e-7)


def test_gradients_are_right_for_small_and_large_dispersions():
    count = torch.tensor([0.0, 3.0, 40.0], dtype=F64)
    for log_dispersion in (-20.0, -4.7, -4.5, 2.0):
        log_mean = torch.tensor([-1.0, 1.0, 3.0], dtype=F64, requires_grad=True)
        own = torch.tensor(log_dispersion, dtype=F64, requires_grad=True)
        torch.autograd.gradcheck(lambda m, d: count_log_prob(count, m, (-d).exp()), (log_mean, own), atol=1e-5)


@pytest.mark.parametrize("dispersion", [0.5, 1e-4])
def test_the_dispersion_is_learned(dispersion):
    generator = np.random.default_rng(0)
    rate = generator.gamma(2.0, 5.0, 4000)
    count = torch.from_numpy(generator.poisson(rate * generator.gamma(1 / dispersion, dispersion, 4000))).double()
    likelihood = NegativeBinomial().double()
    nll = likelihood.learn(torch.from_numpy(rate).log()[:, None], count)
    assert nll <= -nbinom(rate, dispersion).logpmf(count.numpy()).mean()
    if dispersion > 0.01:
        assert likelihood.dispersion.item() == pytest.approx(dispersion, rel=0.1)
    else:
        assert likelihood.dispersion.item() < 0.01


# -- predictions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3,), (3, 1), (1, 1), (1,), (3, 2)])
@pytest.mark.parametrize("dispersion", [0.0, 0.3])
def test_draws_in_groups_have_the_laws_of_total_mean_and_variance(shape, dispersion):
    outputs = torch.randn(8, *shape, dtype=F64)
    likelihood = NegativeBinomial(dispersion).double() if dispersion else Poisson().double()
    stream = likelihood.stream(keep_samples=True)
    for some in outputs.split([1, 5, 2]):
        stream.add(some, part=1, view=2)
    found = stream.result()
    rates = (outputs[..., 0] if shape[-1] == 1 and len(shape) > 1 else outputs).exp()
    assert type(found) is CountPrediction
    torch.testing.assert_close(found.samples, rates, rtol=1e-14, atol=0)
    torch.testing.assert_close(found.mean, rates.mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(found.epistemic, rates.var(0, correction=0), rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(found.aleatoric, (rates + dispersion * rates**2).mean(0), rtol=1e-7, atol=0)
    torch.testing.assert_close(found.total, found.aleatoric + found.epistemic, rtol=0, atol=0)


@pytest.mark.parametrize("likelihood", [Poisson(), NegativeBinomial(0.3)], ids=["poisson", "negative binomial"])
def test_a_gaussian_logarithm_has_the_integral(likelihood):
    mean, variance = torch.tensor([[-1.0], [0.5], [2.0]], dtype=F64), torch.tensor([[0.01], [0.3], [1.0]], dtype=F64)
    found = likelihood.double().from_gaussian(mean, variance)
    alpha = float(likelihood.dispersion)
    for row in range(3):
        rates = stats.lognorm(s=math.sqrt(variance[row].item()), scale=math.exp(mean[row].item()))
        assert found.mean[row].item() == pytest.approx(rates.mean(), rel=1e-12)
        assert found.epistemic[row].item() == pytest.approx(rates.var(), rel=1e-10)
        assert found.aleatoric[row].item() == pytest.approx(rates.mean() + alpha * rates.moment(2), rel=1e-6)
    z = torch.special.ndtri((torch.arange(100_000, dtype=F64) + 0.5) / 100_000)[:, None, None]  # draws without chance
    draws = likelihood.from_samples(mean + variance.sqrt() * z)
    for name in ("mean", "epistemic", "aleatoric"):
        torch.testing.assert_close(getattr(found, name), getattr(draws, name), rtol=5e-3, atol=0, msg=name)
    covariance = variance[..., None]
    assert torch.equal(likelihood.from_gaussian(mean, covariance=covariance).variance, found.variance)


def test_gamma_rates_have_exactly_the_predicted_probabilities():
    """Counts of a Poisson distribution whose rate is gamma distributed are negative binomial."""
    shape, scale = 2.5, 1.6
    rates = stats.gamma(shape, scale=scale).ppf((np.arange(10_000) + 0.5) / 10_000)
    found = Poisson().from_samples(torch.from_numpy(rates).log()[:, None, None])
    counts = torch.arange(15)
    exact = stats.nbinom(shape, 1 / (1 + scale)).logpmf(counts)
    repeated = Prediction.join([found] * 15)
    np.testing.assert_allclose(repeated.log_prob(counts), exact, atol=2e-3)
    mixture = torch.cat([Poisson().mixture_log_prob(torch.from_numpy(rates[::5]).log()[:, None], counts[k : k + 1])
                         for k in range(15)])  # fmt: skip
    np.testing.assert_allclose(repeated.log_prob(counts), mixture, atol=2e-2)


@pytest.mark.parametrize(("std", "bound"), [(0.1, 1e-4), (0.25, 4e-3), (0.5, 0.025)])
def test_lognormal_rates_nearly_have_them(std, bound):
    """What is approximate: the matched negative binomial beside the mixture, for Gaussian outputs."""
    counts, z = np.arange(30), np.linspace(-8, 8, 2001)
    found = Prediction.join([Poisson().double().from_gaussian(*torch.tensor([[1.0], [std**2]], dtype=F64))] * 30)
    weights = stats.norm.pdf(z) / stats.norm.pdf(z).sum()
    exact = stats.poisson.pmf(counts[:, None], np.exp(1.0 + std * z)) @ weights
    probs = found.log_prob(torch.from_numpy(counts)).exp().numpy()
    assert bound / 4 < 0.5 * np.abs(probs - exact).sum() < bound  # total variation


def test_it_is_a_distribution():
    prediction = CountPrediction(*(torch.full((2000,), value, dtype=F64) for value in (7.0, 9.0, 5.0)))
    counts = torch.arange(2000)
    p = prediction.log_prob(counts[:, None]).exp()
    assert p.sum().item() == pytest.approx(1, abs=1e-12)
    assert (p * counts).sum().item() == pytest.approx(7, rel=1e-10)
    assert (p * (counts - 7) ** 2).sum().item() == pytest.approx(14, rel=1e-10)


@pytest.mark.parametrize("level", slow_but([0.95], [0.1, 0.5, 0.95, 0.9999]))
def test_intervals_are_those_of_scipy(level):
    variance = MEANS + MEANS**2 / SIZES
    low, high = CountPrediction(MEANS, variance / 2, variance / 2).interval(level)
    expected = stats.nbinom(SIZES, SIZES / (SIZES + MEANS))
    np.testing.assert_array_equal(low, expected.ppf((1 - level) / 2))
    np.testing.assert_array_equal(high, expected.ppf((1 + level) / 2))
    poisson = CountPrediction(MEANS, MEANS, torch.zeros_like(MEANS)).interval(level)
    np.testing.assert_array_equal(poisson[1], stats.poisson(MEANS).ppf((1 + level) / 2))
    with pytest.raises(ValueError, match="level is a probability"):
        CountPrediction(MEANS, MEANS, MEANS).interval(1 + level)


def test_what_is_not_finite_stays_so():
    mean = torch.tensor([torch.nan, 2.0])
    prediction = CountPrediction(mean, torch.ones(2) * 2, torch.zeros(2))
    assert prediction.interval()[0].isnan().tolist() == [True, False]
    assert prediction.log_prob(torch.tensor([1, 1])).isnan().tolist() == [True, False]


def test_single_precision_does_not_invent_dispersion():
    rates = torch.full((1, 5, 1), 12.3456).log()
    prediction = Poisson().from_samples(rates)
    np.testing.assert_allclose(
        prediction.log_prob(torch.arange(5)), stats.poisson(12.3456).logpmf(np.arange(5)), rtol=1e-6
    )


def test_mixtures_joins_and_divergences():
    one, two = (Poisson().from_samples(torch.randn(4, 3, 1, dtype=F64)) for _ in range(2))
    mixed = Prediction.mixture([one, two], [0.5, 0.5])
    assert type(mixed) is CountPrediction
    torch.testing.assert_close(mixed.mean, (one.mean + two.mean) / 2, rtol=1e-12, atol=0)
    spread = (one.mean - two.mean).square() / 4 + (one.epistemic + two.epistemic) / 2
    torch.testing.assert_close(mixed.epistemic, spread, rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match="no divergence of a CountPrediction from a CountPrediction: compare log_prob"):
        one.divergence(two)
    assert isinstance(one, RegressionPrediction)


def test_a_figure_of_a_count_has_bars():
    prediction = Poisson().from_samples(torch.tensor([[[1.0]]], dtype=F64))
    axes = prediction.plot().axes[0]
    counts = [round(bar.get_x() + bar.get_width() / 2) for bar in axes.patches]
    np.testing.assert_allclose([bar.get_height() for bar in axes.patches], stats.poisson(math.e).pmf(counts), rtol=1e-9)


# -- curvature --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", [Poisson(), NegativeBinomial(0.7)], ids=["poisson", "negative binomial"])
def test_the_curvature_is_the_expected_hessian(likelihood):
    log_rate = torch.randn(4, 2, dtype=F64)
    expected = torch.zeros_like(log_rate)
    likelihood = likelihood.double()
    for count in range(300):
        leaf = log_rate.clone().requires_grad_()
        log_prob = likelihood.log_prob(leaf, torch.full_like(log_rate, count))
        (slope,) = torch.autograd.grad(log_prob.sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad(slope.sum(), leaf)
        expected -= log_prob.exp().detach() * second
    found = likelihood.output_factor(log_rate)
    assert found.shape == (4, 2, 1, 1)
    torch.testing.assert_close(found.square().flatten(1), expected, rtol=1e-9, atol=0)
    generator = torch.Generator().manual_seed(0)
    drawn = likelihood.output_factor(log_rate, num_draws=2000, generator=generator)[:, :, 0]
    torch.testing.assert_close(drawn @ drawn.mT, expected.diag_embed(), rtol=0, atol=0.08 * expected.max().item())


# -- calibration, targets, files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Poisson, NegativeBinomial])
def test_calibration_finds_the_dispersion(make):
    generator = np.random.default_rng(1)
    rate = generator.gamma(3.0, 4.0, 5000)
    count = torch.from_numpy(generator.poisson(rate * generator.gamma(1 / 0.4, 0.4, 5000)))
    outputs = torch.from_numpy(rate).log()[None, :, None]
    likelihood = make().double()
    before, after = likelihood.calibrate([(outputs[:, :2000], count[:2000]), (outputs[:, 2000:], count[2000:])])
    assert likelihood.dispersion.item() == pytest.approx(0.4, rel=0.1)
    assert after == pytest.approx(-likelihood.from_samples(outputs).log_prob(count).mean().item(), rel=1e-9)
    assert after < before
    again = likelihood.calibrate([(outputs, count)])
    assert again[1] <= again[0] + 1e-12
    assert again[1] == pytest.approx(after, rel=1e-6)


def test_counts_that_vary_less_than_poissons_are_left_alone():
    outputs, count = torch.full((1, 50, 1), 2.0, dtype=F64).log(), torch.full((50,), 2)
    likelihood = Poisson().double()
    before, after = likelihood.calibrate([(outputs, count)])
    assert likelihood.dispersion.item() < 1e-6
    assert after == pytest.approx(before, abs=1e-6)
    with pytest.raises(ValueError, match="not finite, so there is nothing to calibrate"):
        likelihood.calibrate([(outputs * torch.nan, count)])


@pytest.mark.parametrize("likelihood", [Poisson(), NegativeBinomial()], ids=["poisson", "negative binomial"])
@pytest.mark.parametrize(
    ("output", "target", "sentence"),
    [
        (
            torch.zeros(3, 2),
            torch.zeros(3),
            r"\(3, 2\) do not fit targets of shape \(3,\).*one logarithm of a rate per",
        ),
        (torch.zeros(2), torch.tensor([0, -2]), "whole numbers of at least 0, and they run from -2 to 0"),
        (torch.zeros(2), torch.tensor([0.5, 2.0]), "whole numbers .* likelihood='regression'"),
        (torch.zeros(2), torch.tensor([torch.nan, 2.0]), "whole numbers"),
    ],
)
def test_what_does_not_fit_gets_a_sentence(likelihood, output, target, sentence):
    with pytest.raises(ValueError, match=sentence):
        likelihood.nll(output, target)


def test_names_and_settings():
    assert isinstance(as_likelihood("counts"), Poisson)
    assert isinstance(as_likelihood("negative-binomial"), NegativeBinomial)
    assert repr(NegativeBinomial(0.5)) == "NegativeBinomial(dispersion=0.5)"
    rebuilt = likelihood_from_dict(NegativeBinomial(0.5).to_dict())
    assert rebuilt.dispersion.item() == 0.5
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="dispersion must be None or a positive number"):
            NegativeBinomial(wrong)


@pytest.mark.parametrize("likelihood", [Poisson(), NegativeBinomial(), NegativeBinomial(0.2)], ids=str)
def test_the_calibration_is_saved(likelihood, tmp_path):
    network = torch.nn.Linear(3, 1)
    posterior = convert(network, MAP(), likelihood=likelihood)
    likelihood.set_dispersion(0.123)
    save(posterior, tmp_path / "posterior")
    assert load(tmp_path / "posterior", network).likelihood.dispersion.item() == pytest.approx(0.123)


def test_a_rate_of_zero_is_never_anything_else():
    rates = torch.tensor([[-200.0, 1.0]]).view(1, 2, 1)  # exp(-200) is 0 in float32
    prediction = Poisson().from_samples(rates)
    assert prediction.mean[0] == 0
    assert [end[0].item() for end in prediction.interval(0.95)] == [0, 0]
    found = evaluate(convert(torch.nn.Identity(), MAP(), likelihood=Poisson()), [(rates[0], torch.tensor([0, 3]))])
    expected = -stats.poisson(prediction.mean).logpmf([0, 3]).mean()
    assert found.metrics["nll"] == pytest.approx(expected, rel=1e-6)
    assert found.metrics["coverage"] == 1


def test_poissons_cumulated_probabilities_need_no_fraction(monkeypatch):
    """Its steps grow with the root of the mean, and every row waits for the last."""
    mean = torch.tensor([1e6], dtype=F64)
    fractions = []
    plain = count_prediction._fraction
    monkeypatch.setattr(count_prediction, "_fraction", lambda x, a, b: fractions.append(x) or plain(x, a, b))
    np.testing.assert_allclose(count_cdf(mean, mean, 1e15 + 0 * mean), stats.poisson(1e6).cdf(1e6), rtol=1e-6)
    assert all((x == 0).all() for x in fractions)


def test_an_infinite_count_is_none():
    with pytest.raises(ValueError, match="whole numbers of at least 0, and they run from 1 to inf"):
        Poisson().check(torch.zeros(2, 1), torch.tensor([1.0, math.inf]))
