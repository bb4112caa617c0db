"""Noise made wider: the formula of each law, what it leaves alone, what it refuses, what files keep of it."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import ABNN, APD, IBNN, IVON, MAP, SGLD, SWAG, BayesAdapter, DeepEnsemble, Gaussian, Laplace, MCDropout
from bayesify.laws import DropoutSite, NormSite, Refusal, tracking_norms
from bayesify.laws.dropout import HIGHEST

F64 = torch.float64
EXACT = {"rtol": 1e-11, "atol": 1e-13}
FACTORS = (0.03, 4.0)


def network(*, batch_norm=False, dropout=0.3):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(6) if batch_norm else nn.LayerNorm(6)
    return nn.Sequential(nn.Linear(4, 6), norm, nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 3)).double().eval()


def data(rows=24):
    torch.manual_seed(1)
    x = torch.randn(rows, 4, dtype=F64)
    return x, x[:, :3].argmax(1)


def fitted(made, method, **options):
    posterior = bayesify.convert(made, method, **options)
    loader = DataLoader(TensorDataset(*data()), batch_size=8)
    bayesify.fit(posterior, loader, progress=False, accuracy_tolerance=1.0)
    return posterior.eval()


WEIGHTS = {
    "bayes-adapter": BayesAdapter(start_std=(0.01, 0.1)),
    "ivon": IVON(start_std=0.1),
    "ibnn": IBNN(components=3, means_std=0.2, start_std=(0.3, 0.1), bias=True),
    "abnn": ABNN(members=2, alpha=0.3),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("factor", FACTORS)
def test_a_draw_is_that_much_further_from_its_mean(name, factor):
    posterior = bayesify.convert(network(), WEIGHTS[name])
    key = posterior.keys(5, 3)[3]
    with posterior.member(key.path[0]) if key.path else posterior.mean(), torch.no_grad():
        mean = posterior.law.patch(replaced(posterior.present(), kind="mean")).tensors
    before = posterior.law.weights(key)
    posterior.law.rescale(factor)
    after = posterior.law.weights(key)
    moved = 0.0
    for tensor, value in after.items():
        centre = mean.get(tensor, posterior.network.get_parameter(tensor))
        assert_close(value - centre, factor * (before[tensor] - centre), **EXACT)
        moved += (value - centre).abs().sum().item()
    assert moved > 0


def replaced(p, **changes):
    for name, value in changes.items():
        setattr(p, name, value)
    return p


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("factor", FACTORS)
def test_swag(rank, factor):
    posterior = fitted(network(), SWAG(rank=rank, epochs=3, snapshots_per_epoch=2, lr=0.1, scale=0.5))
    law, key = posterior.law, posterior.keys(1, 0)[0]
    before = law.sample(key) - law.centre()
    law.rescale(factor)
    assert_close(law.sample(key) - law.centre(), factor * before, **EXACT)
    if rank == 0:
        (component,) = law.components()
        found = torch.cat([component.variances[name].flatten() for name in law.names])
        assert_close(found, law.variance() * (0.5 * factor) ** 2, **EXACT)


@pytest.mark.parametrize("factor", FACTORS)
def test_a_mixture_of_gaussians_keeps_its_means(factor):
    bank = bayesify.sample_bank(bayesify.convert(network(), BayesAdapter(start_std=(0.1, 0.1))), 12)
    law = bayesify.distill(bank, "mixture", components=2).law
    means, stds = law.means.clone(), law.stds.clone()
    law.rescale(factor)
    assert torch.equal(law.means, means)
    assert_close(law.stds, stds * factor, **EXACT)


LINEAR = {
    "bayes-adapter": BayesAdapter(start_std=(0.01, 0.1)),
    "ibnn": IBNN(components=1, means_std=0.0, start_std=(0.3, 0.1)),
    "mc-dropout": MCDropout(),
    "abnn": ABNN(members=1, alpha=0.3),
}


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("factor", FACTORS)
def test_the_variance_of_outputs_that_are_linear_in_the_noise_grows_with_the_square(name, factor):
    torch.manual_seed(0)
    layers = {"mc-dropout": [nn.Dropout(0.2), nn.Linear(4, 2)], "abnn": [nn.LayerNorm(4), nn.Linear(4, 2)]}
    made = nn.Sequential(*layers.get(name, [nn.Linear(4, 2)])).double().eval()
    posterior = bayesify.convert(made, LINEAR[name], likelihood=Gaussian(1.0))
    x = data()[0]
    before = bayesify.predict(posterior, x, how="linearised")
    posterior.law.rescale(factor)
    after = bayesify.predict(posterior, x, how="linearised")
    assert before.epistemic.min() > 0
    assert_close(after.epistemic, factor**2 * before.epistemic, **EXACT)
    assert_close(after.mean, before.mean, **EXACT)


@pytest.mark.parametrize("alpha", [False, True])
def test_dropout_by_counting(alpha):
    site = DropoutSite("", 0.2, alpha=alpha).rescaled(1.7)
    odds = 1.7**2 * 0.2 / 0.8
    assert site.p == pytest.approx(odds / (1 + odds), rel=1e-14)
    torch.manual_seed(0)
    x, number = torch.tensor(1.3, dtype=F64), 400_000
    y = site._combine(x.expand(number), site._mask.of(torch.rand(number, dtype=F64), F64))
    before, after = DropoutSite("", 0.2, alpha=alpha).terms(x), site.terms(x)
    std = after.std_scale * x + after.std_shift
    assert y.mean().item() == pytest.approx((after.scale * x).item(), abs=5 * std.item() / number**0.5)
    assert y.std().item() == pytest.approx(std.item(), rel=0.01)
    assert after.std_scale / after.scale == pytest.approx(1.7 * before.std_scale / before.scale, rel=1e-12)


def test_rates_without_noise_stay_and_none_becomes_one():
    assert [DropoutSite("", p).rescaled(50.0).p for p in (0.0, 1.0)] == [0.0, 1.0]
    assert DropoutSite("", 0.9999).rescaled(1000.0).p == HIGHEST < 1
    assert NormSite("", 0.25, "channel", (1,)).rescaled(3).alpha == 0.75


@pytest.mark.parametrize("factor", FACTORS)
def test_last_layer_laplace_has_another_prior(factor):
    posterior = fitted(network(), Laplace(prior_precision=2.0))
    law = posterior.law
    vectors, values = law._matrix, law._values
    hessian = (vectors * values) @ vectors.T
    law.rescale(factor)
    expected = torch.linalg.inv(hessian + 2.0 / factor**2 * torch.eye(len(hessian), dtype=F64))
    assert_close(law.covariance(), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("factor", FACTORS)
def test_diagonal_and_kronecker_laplace_have_another_prior(factor):
    posterior = fitted(network(), Laplace(structure="diagonal", prior_precision=2.0))
    posterior.law.rescale(factor)
    curvature = posterior.law.curvature.as_dict()
    for name, log_std in posterior.law.log_std.as_dict().items():
        assert_close((2 * log_std).exp(), 1 / (curvature[name] + 2.0 / factor**2), **EXACT)
    law = fitted(network(), Laplace(structure="kronecker", prior_precision=2.0, prior_per="layer")).law
    law.rescale(factor)
    for name in law.blocks:
        assert_close(law.variance(name), 1 / (law.eigenvalues(name) + 2.0 / factor**2), **EXACT)


EVERY = {
    **WEIGHTS,
    "mc-dropout": MCDropout(),
    "laplace": Laplace(),
    "laplace, diagonal": Laplace(structure="diagonal"),
    "swag": SWAG(rank=2, epochs=3, snapshots_per_epoch=2),
}


@pytest.mark.parametrize("name", EVERY)
def test_factors_are_of_the_width_at_the_start_and_one_brings_it_back(name):
    posterior = bayesify.convert(network(), EVERY[name])
    posterior = fitted(network(), EVERY[name]) if posterior.learned is not True else posterior
    x, _ = data()
    state = copy.deepcopy(posterior.state_dict())
    before = bayesify.predict(posterior, x, num_draws=4)
    rescale = posterior.law.rescaling()
    rescale(0.1)
    rescale(3.0)
    twice = bayesify.predict(posterior, x, num_draws=4)
    assert not torch.equal(twice.probs, before.probs)
    rescale(1.0)
    assert posterior.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[key]) for key, tensor in posterior.state_dict().items())
    assert torch.equal(bayesify.predict(posterior, x, num_draws=4).probs, before.probs)
    posterior.law.rescale(3.0)
    assert torch.equal(bayesify.predict(posterior, x, num_draws=4).probs, twice.probs)


def test_constants_stay_constants():
    posterior = bayesify.convert(nn.Embedding(5, 2, padding_idx=1), BayesAdapter())
    posterior.law.rescale(10.0)
    assert torch.equal(posterior.law.log_std.weight[1], torch.full((2,), -math.inf))
    assert posterior.law.log_std.weight[[0, 2, 3, 4]].isfinite().all()


# -- refusals -------------------------------------------------------------------------------------------------------

NOTHING = {
    "plain": (MAP(), "Convert it with a method that has"),
    "members": (DeepEnsemble(members=2, start="network"), "Convert it with a method that has"),
    "no std": (BayesAdapter(start_std=(0.0, 0.0)), "start_std above 0"),
    "no factors": (IBNN(start_std=(0.0, 0.0)), "start_std"),
    "no alpha": (ABNN(alpha=0.0), "alpha is 0"),
    "no rate": (MCDropout(p=0.0), "rates of all dropout layers are 0"),
    "no curvature": (Laplace(), "There is no curvature yet"),
    "no snapshots": (SWAG(), "snapshots"),
    "no samples": (SGLD(), "calibrate"),
    "generator": (APD(), "calibrate"),
}


@pytest.mark.parametrize("name", NOTHING)
def test_what_has_no_width_says_so(name):
    method, words = NOTHING[name]
    posterior = bayesify.convert(network(), method)
    answer = posterior.law.rescaling()
    assert isinstance(answer, Refusal)
    assert words in answer
    with pytest.raises(ValueError, match=words):
        posterior.law.rescale(2.0)


def test_statistics_of_draws_would_be_stale():
    posterior = fitted(network(batch_norm=True), SWAG(rank=2, epochs=2, num_bn_draws=3, snapshots_per_epoch=2))
    assert tracking_norms(posterior.network)
    with pytest.raises(ValueError, match="batch-normalisation statistics of their own"):
        posterior.law.rescale(2.0)


@pytest.mark.parametrize("factor", [0.0, -1.0, math.inf, math.nan])
def test_factors_are_positive(factor):
    with pytest.raises(ValueError, match="positive number"):
        bayesify.convert(network(), MCDropout()).law.rescale(factor)


def test_a_mixture_widens_the_members_that_have_noise():
    made = network()
    posteriors = [bayesify.convert(made, MAP()), bayesify.convert(made, MCDropout())]
    mixture = bayesify.ensemble(posteriors)
    mixture.law.rescale(2.0)
    assert mixture.law.laws[1].places[0].p == pytest.approx(4 * 3 / 7 / (1 + 4 * 3 / 7))


# -- files and states -----------------------------------------------------------------------------------------------


def same(one, other):
    x, _ = data()
    assert torch.equal(*(bayesify.predict(p, x, num_draws=6, seed=2).probs for p in (one, other)))


@pytest.mark.parametrize("name", EVERY)
def test_files_keep_the_width(name, tmp_path):
    posterior = bayesify.convert(network(), EVERY[name])
    posterior = fitted(network(), EVERY[name]) if posterior.learned is not True else posterior
    posterior.law.rescale(1.7)
    x, _ = data()
    wide = bayesify.predict(posterior, x, num_draws=6, seed=2).probs
    bayesify.save(posterior, tmp_path)
    loaded = bayesify.load(tmp_path, network())
    assert loaded.method == posterior.method
    assert torch.equal(bayesify.predict(loaded, x, num_draws=6, seed=2).probs, wide)
    loaded.law.rescale(1 / 1.7)
    bayesify.save(loaded, tmp_path)
    same(bayesify.load(tmp_path, network()), loaded)


def test_files_of_mixtures_keep_the_width(tmp_path):
    made = network()
    mixture = bayesify.ensemble([bayesify.convert(made, MCDropout()), bayesify.convert(made, ABNN(members=1))])
    mixture.law.rescale(1.7)
    bayesify.save(mixture, tmp_path)
    same(bayesify.load(tmp_path, made), mixture)


def test_a_network_with_other_rates_is_still_refused(tmp_path):
    posterior = bayesify.convert(network(), MCDropout())
    posterior.law.rescale(1.7)
    bayesify.predict(posterior, data()[0])
    bayesify.save(posterior, tmp_path)
    with pytest.raises(ValueError, match="the dropout rate of '3' was"):
        bayesify.load(tmp_path, network(dropout=0.4))


@pytest.mark.parametrize("name", ["mc-dropout", "abnn", "swag"])
def test_states_and_copies_keep_the_width(name):
    make = bayesify.convert if name != "swag" else fitted
    wide, plain = make(network(), EVERY[name]), make(network(), EVERY[name])
    narrow = copy.deepcopy(plain.state_dict())
    wide.law.rescale(1.7)
    same(copy.deepcopy(wide), wide)
    plain.load_state_dict(wide.state_dict())
    same(plain, wide)
    wide.load_state_dict(narrow)  # a state of before brings the width of before
    same(wide, make(network(), EVERY[name]))


def test_another_type_has_the_width_that_it_stores():
    posterior = bayesify.convert(network(), MCDropout())
    posterior.law.rescale(1.7)
    posterior.to(torch.bfloat16)
    scale = torch.tensor(1.7).bfloat16().item()
    assert posterior.law.places[0].p == DropoutSite("3", 0.3).rescaled(scale).p
