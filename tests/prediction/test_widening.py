"""The width of the noise on validation data: the judge against a naive one, the search, and what goes wrong."""

import copy
import math

import numpy as np
import pytest
import torch
from scipy import optimize, special, stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import (
    ABNN,
    IBNN,
    MAP,
    SWAG,
    BayesAdapter,
    Bernoulli,
    Categorical,
    Custom,
    Gaussian,
    Laplace,
    MCDropout,
    Widening,
    widen,
)
from bayesify.prediction import widening
from bayesify.prediction.trials import Trial, judge
from bayesify.prediction.widening import _largest, _least_nll

F64 = torch.float64


def batches(x, y, size=16):
    return list(zip(x.split(size), y.split(size), strict=True))


def trial(posterior, loader, *, calibrated, **options):
    return judge(posterior, loader, 1.0, calibrated=calibrated, progress=False, options=options)


# -- exact: a linear regression whose best width is known --------------------------------------------------


def regression(noise_std=0.5, std=0.2):
    network = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(network.weight, 1.5)
    method = BayesAdapter(start_std=(std, std))
    return bayesify.convert(network, method, likelihood=Gaussian(noise_std)).eval()


def weights_of(posterior, num_draws, seed):
    """Return the weights of the draws, which the width moves away from 1.5 in proportion."""
    return torch.stack(
        [posterior.law.weights(key)["weight"].detach() for key in posterior.keys(num_draws, seed)]
    ).flatten()


def numbers(rows=90, slope_std=0.8):
    """Return targets whose slopes differ by more than the posterior thinks, and inputs of either sign."""
    torch.manual_seed(4)
    x = torch.randn(rows, 1, dtype=F64)
    slopes = 1.5 + slope_std * torch.randn(rows, 1, dtype=F64)
    return x, slopes * x + 0.5 * torch.randn(rows, 1, dtype=F64)


def exact_nll(x, y, weights, factor, scale=1.0, noise_variance=0.25):
    """Return -ln N(y; w x, scale (noise + variance of w x)) of every example, as draws have mean and variance."""
    slopes = 1.5 + factor * (weights - 1.5)
    mean, variance = slopes.mean() * x, noise_variance + slopes.var(unbiased=False) * x**2
    return torch.as_tensor(-stats.norm.logpdf(y, mean, (scale * variance).sqrt())), ((y - mean) ** 2 / variance)


def crossed_nll(x, y, weights, factor):
    """The definition: every second example, with the variance's scale that is best for the others, and back."""
    total = 0.0
    for half in range(2):
        mine, other = slice(half, None, 2), slice(1 - half, None, 2)
        _, ratios = exact_nll(x[other], y[other], weights, factor)
        total += exact_nll(x[mine], y[mine], weights, factor, scale=ratios.mean())[0].sum().item()
    return total / len(x)


@pytest.mark.parametrize("calibrated", [False, True])
def test_the_width_of_a_linear_regression_is_the_best_one(calibrated):
    posterior = regression()
    x, y = numbers()
    weights = weights_of(posterior, 16, seed=5)

    def nll(exponent):
        if calibrated:
            return crossed_nll(x, y, weights, 10**exponent)
        return exact_nll(x, y, weights, 10**exponent)[0].mean().item()

    best = optimize.minimize_scalar(nll, bounds=(-2, 2), method="bounded", options={"xatol": 1e-9})
    assert widen(posterior, batches(x, y), calibrated=calibrated, num_draws=16, seed=5) is posterior
    found = posterior.widening
    assert len(found.trials) <= 10
    for one in found.trials:
        assert one.nll == pytest.approx(nll(math.log10(one.factor)), rel=1e-9)
        slope = 1.5 + one.factor * (weights.mean().item() - 1.5)
        assert one.error == pytest.approx((y - slope * x).square().mean().sqrt().item(), rel=1e-9)
    assert math.log10(found.factor) == pytest.approx(best.x, abs=0.05)
    assert nll(math.log10(found.factor)) < best.fun + 1e-3
    assert 2 < found.factor < 10  # the slopes' spread is .8, the posterior's was .2
    moved = weights_of(posterior, 16, seed=5)
    assert torch.allclose(moved - 1.5, found.factor * (weights - 1.5), rtol=1e-12)


def test_the_last_layers_prior():
    """y = w phi with p(w) = N(w0, s^2): the best s is that of the validation targets around the network's."""
    torch.manual_seed(0)
    network = nn.Linear(1, 1, bias=False).double()
    posterior = bayesify.convert(network, Laplace(prior_precision=4.0), likelihood=Gaussian(0.5)).eval()
    x = torch.ones(1, 1, dtype=F64)
    bayesify.fit(posterior, [(x, x)], num_data=1, progress=False)  # h = 1 / .25 = 4 at phi = 1
    w = network.weight.item()
    spread = torch.tensor([-0.65, 0.65], dtype=F64).repeat(20)[:, None]
    widen(posterior, [(torch.ones(40, 1, dtype=F64), w + spread)], calibrated=False, num_draws=40)
    # .25 + v / (4 + 4 / f^2) = .65^2, with v, the draws' variance, near 1
    draws = weights_of(posterior, 40, 0)
    f = posterior.widening.factor
    v = draws.var(unbiased=False).item() * (4 + 4 / f**2)
    shift = (draws.mean().item() - w) ** 2
    best = (v / (0.65**2 + shift - 0.25) / 4 - 1) ** -0.5
    assert f == pytest.approx(best, rel=0.05)
    assert posterior.law.prior_precision.item() == pytest.approx(4 / f**2, rel=1e-6)


# -- the judge -----------------------------------------------------------------------------------------------


def classifier(outputs=3, likelihood="classification", method=None):
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, outputs)).double().eval()
    with torch.no_grad():
        network[-1].weight.mul_(6)
    return bayesify.convert(network, method or MCDropout(), likelihood=likelihood).eval()


def images(rows=60, classes=3):
    torch.manual_seed(2)
    return torch.randn(rows, 4, dtype=F64), torch.randint(classes, (rows,))


def tempered(draws, labels, temperature):
    log_probs = special.log_softmax(draws / temperature, axis=-1)[:, range(len(labels)), labels]
    return -(special.logsumexp(log_probs, axis=0) - math.log(len(draws)))


def draws_of(posterior, x, num_draws):
    with torch.no_grad():
        return torch.stack([posterior.evaluate(x, [key])[0] for key in posterior.keys(num_draws, 0)])


def crossed(draws, labels):
    """The definition: the temperature of each half is the best for the other."""
    total = 0.0
    for half in range(2):
        mine, other = slice(half, None, 2), slice(1 - half, None, 2)
        best = optimize.minimize_scalar(
            lambda t: tempered(draws[:, other], labels[other], math.exp(t)).mean(),  # noqa: B023
            bounds=(-4, 4), method="bounded", options={"xatol": 1e-10},
        )  # fmt: skip
        total += tempered(draws[:, mine], labels[mine], math.exp(best.x)).sum()
    return total / len(labels)


@pytest.mark.parametrize("size", [60, 7])
def test_classes_are_judged_by_the_other_halfs_temperature(size):
    posterior, (x, y) = classifier(), images()
    draws = draws_of(posterior, x, 6).numpy()
    found = trial(posterior, batches(x, y, size), calibrated=True, num_draws=6, seed=0)
    assert found.nll == pytest.approx(crossed(draws, y.numpy()), abs=1e-6)
    plain = trial(posterior, batches(x, y, size), calibrated=False, num_draws=6, seed=0)
    assert plain.nll == pytest.approx(tempered(draws, y.numpy(), 1.0).mean(), rel=1e-9)
    assert plain.nll > found.nll  # these logits are far too large
    mean = special.softmax(draws, -1).mean(0).argmax(-1)
    assert found.error == plain.error == pytest.approx((mean != y.numpy()).mean())


def test_a_temperature_that_was_fitted_before_changes_nothing():
    posterior, (x, y) = classifier(), images()
    before = trial(posterior, batches(x, y), calibrated=True, num_draws=6, seed=0)
    bayesify.calibrate(posterior, batches(x, y), num_draws=6)
    assert posterior.likelihood.temperature > 1.5
    after = trial(posterior, batches(x, y), calibrated=True, num_draws=6, seed=0)
    assert after.nll == pytest.approx(before.nll, abs=1e-6)


def test_draws_are_pooled_as_the_posterior_pools_them():
    x, y = images()
    posterior = classifier(likelihood=Categorical(exponent=0.0))
    mean = special.log_softmax(draws_of(posterior, x, 6).numpy(), -1)

    def nll(rows, temperature):
        pooled = special.log_softmax(special.log_softmax(mean[:, rows] / temperature, -1).mean(0), -1)
        return -pooled[range(len(y[rows])), y[rows]]

    total = 0.0
    for half in range(2):
        mine, other = slice(half, None, 2), slice(1 - half, None, 2)
        best = optimize.minimize_scalar(
            lambda t: nll(other, math.exp(t)).mean(),  # noqa: B023
            bounds=(-4, 4),
            method="bounded",
            options={"xatol": 1e-10},
        )
        total += nll(mine, math.exp(best.x)).sum()
    found = trial(posterior, batches(x, y), calibrated=True, num_draws=6, seed=0)
    assert found.nll == pytest.approx(total / len(y), abs=1e-6)


@pytest.mark.parametrize("calibrated", [False, True])
def test_labels_that_do_not_count(calibrated):
    x, y = images()
    kept = torch.arange(60) % 6 < 4  # both halves keep theirs in turn
    marked = y.where(kept, 7)
    some = trial(classifier(), batches(x[kept], y[kept]), calibrated=calibrated, num_draws=6, seed=0)
    posterior = classifier(likelihood=Categorical(ignore_index=7))
    all_of_them = trial(posterior, batches(x, marked), calibrated=calibrated, num_draws=6, seed=0)
    assert all_of_them.error == pytest.approx(some.error)
    assert all_of_them.nll == pytest.approx(some.nll, abs=1e-9)


def test_yes_or_no_are_two_classes():
    posterior, (x, y) = classifier(1, Bernoulli()), images(classes=2)
    draws = draws_of(posterior, x, 6)
    pairs = torch.cat([torch.zeros_like(draws), draws], -1).numpy()
    found = trial(posterior, batches(x, y[:, None].double()), calibrated=True, num_draws=6, seed=0)
    assert found.nll == pytest.approx(crossed(pairs, y.numpy()), abs=1e-6)


# -- the search ----------------------------------------------------------------------------------------------


class Curve:
    """A function of the exponent that counts how often it is asked."""

    def __init__(self, nll=lambda x: 0.0, error=lambda x: 0.0):
        self.nll, self.error, self.asked = nll, error, []

    def __call__(self, x):
        assert abs(x) <= 2
        if x not in self.asked:
            self.asked.append(x)
        return Trial(10**x, self.nll(x), self.error(x))


@pytest.mark.parametrize("best", np.linspace(-1.7, 1.7, 9))
def test_ten_trials_find_the_least_nll_of_a_smooth_curve(best):
    # As of noise: no slope far to the left, a dip, and a steep rise to the right.
    def nll(x):
        return -0.2 * math.exp(-2 * (x - best) ** 2) + 2 / (1 + math.exp(-6 * (x - best - 2)))

    curve = Curve(nll)
    found = _least_nll(curve)
    least = optimize.minimize_scalar(nll, bounds=(best - 0.5, best + 0.5), method="bounded")
    assert len(curve.asked) <= 10
    assert math.log10(found.factor) == pytest.approx(least.x, abs=0.06)
    assert found.nll < least.fun + 2e-3


@pytest.mark.parametrize("best", [-1.7, -0.6, 0.3, 1.4])
def test_six_trials_find_it_to_half_a_decade(best):
    curve = Curve(lambda x: (x - best) ** 2)
    found = _least_nll(curve, precise=False)
    assert math.log10(found.factor) == pytest.approx(round(2 * best) / 2)
    assert len(curve.asked) <= 6


@pytest.mark.parametrize("seed", range(20))
def test_the_result_is_the_best_that_was_tried(seed):
    values = np.random.default_rng(seed).normal(size=4001)
    curve = Curve(lambda x: values[round((x + 2) * 1000)])
    found = _least_nll(curve)
    assert found.nll == min(curve.nll(x) for x in curve.asked) <= curve.nll(0)
    assert len(curve.asked) <= 10


def test_a_flat_curve_changes_nothing():
    assert _least_nll(Curve()).factor == 1


def test_what_is_not_finite_is_never_chosen():
    curve = Curve(lambda x: math.inf if x > 0.6 else -x)
    assert _least_nll(curve).factor == pytest.approx(10**0.5)
    with pytest.raises(ValueError, match="no finite NLL"):
        _least_nll(Curve(lambda x: math.inf))


@pytest.mark.parametrize("edge", np.linspace(-1.8, 1.8, 9))
def test_the_largest_factor_within_the_tolerance(edge):
    curve = Curve(error=lambda x: 0.1 if x <= edge else 0.2)
    found = _largest(curve, 0.08, 0.02 + 1e-12)
    assert 0 <= edge - math.log10(found.factor) <= 4 / 2**8
    assert len(curve.asked) == 8


def test_ends_are_said(monkeypatch):
    posterior, (x, y) = classifier(), images()
    monkeypatch.setattr(widening, "judge", lambda *a, **b: Trial(a[2], -a[2], 0.0))
    with pytest.warns(UserWarning, match="100 times as wide"):
        widen(posterior, batches(x, y))
    monkeypatch.setattr(widening, "judge", lambda *a, **b: Trial(a[2], a[2], 0.0))
    with pytest.warns(UserWarning, match="helps nothing"):
        widen(posterior, batches(x, y))


# -- widen ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [MCDropout(), ABNN(members=2), IBNN(components=2)], ids=lambda m: m.name)
def test_with_a_tolerance_the_error_stays_near_that_without_noise(method):
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Dropout(0.1), nn.Linear(16, 3)).double().eval()
    posterior = bayesify.convert(network, method)
    x, _ = images(200)
    with torch.no_grad():
        y = network(x).argmax(1)
    widen(posterior, [(x, y)], tolerance=0.05, num_draws=8)
    found = posterior.widening
    chosen = next(one for one in found.trials if one.factor == found.factor)
    assert found.tolerance == 0.05
    assert found.reference <= 0.02
    assert 0 < chosen.error <= found.reference + 0.05  # and noise there is
    assert all(one.error > found.reference + 0.05 for one in found.trials if one.factor > found.factor)
    probs = bayesify.predict(posterior, x, num_draws=8)
    assert (probs.label != y).double().mean().item() == pytest.approx(chosen.error)


def test_a_tolerance_that_nothing_meets():
    posterior = regression(std=3000.0)
    x, y = numbers()
    before = copy.deepcopy(posterior.state_dict())
    with pytest.raises(ValueError, match=r"No factor from 0\.01 on keeps the error"):
        widen(posterior, [(x, y)], tolerance=1e-6, num_draws=4)
    assert_as_before(posterior, before)


def assert_as_before(posterior, before):
    assert posterior.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in posterior.state_dict().items())
    assert posterior.widening is None


@pytest.mark.parametrize("method", [MCDropout(), ABNN(), BayesAdapter(), IBNN()], ids=lambda m: m.name)
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_stops_it_leaves_the_posterior_as_it_was(method, error):
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.1), nn.Linear(8, 3)).eval()
    posterior = bayesify.convert(network, method)
    x, y = images()

    class Stops:
        left = 9

        def __iter__(self):
            for batch in batches(x.float(), y, 20):
                self.left -= 1
                if not self.left:
                    raise error
                yield batch

    before = copy.deepcopy(posterior.state_dict())
    with pytest.raises(error):
        widen(posterior, Stops(), num_draws=2)
    assert_as_before(posterior, before)


def test_noise_that_overflows_is_only_not_chosen():
    class Steep(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            logits = 30 * self.linear(x)
            return logits.exp() - logits.neg().exp()

    torch.manual_seed(0)
    network = Steep()
    nn.init.normal_(network.linear.weight, std=0.01)
    nn.init.zeros_(network.linear.bias)
    posterior = bayesify.convert(network, BayesAdapter(start_std=(0.05, 0.05)))
    x, y = images()
    widen(posterior, [(x.float(), y)], num_draws=4)
    assert posterior.widening.trials[-1].nll == math.inf
    assert math.isfinite(min(one.nll for one in posterior.widening.trials))


def test_the_order_of_the_data_does_not_matter_without_calibration():
    posterior, (x, _) = classifier(), images()
    y = bayesify.predict(posterior, x, how="mean").label
    found = []
    for loader in (batches(x, y), DataLoader(TensorDataset(x, y), batch_size=11, shuffle=True)):
        made = widen(copy.deepcopy(posterior), loader, calibrated=False, num_draws=4)
        found.append([one.nll for one in made.widening.trials])
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def test_the_likelihood_is_left_alone():
    posterior, (x, y) = classifier(), images()
    widen(posterior, batches(x, y), num_draws=4)
    assert posterior.likelihood.temperature == 1


@pytest.mark.filterwarnings("ignore:The noise was made")  # labels at random want as much as there is
@pytest.mark.parametrize("calibrated", [False, True])
def test_views_are_seen(calibrated):
    posterior, (x, y) = classifier(), images()
    views = [lambda x: x, lambda x: -x]
    with torch.no_grad():
        found = widen(copy.deepcopy(posterior), [(x, y)], calibrated=calibrated, num_draws=4, views=views).widening
        by_hand = []
        for factor in (0.1, 1.0):
            one = copy.deepcopy(posterior)
            one.law.rescale(factor)
            by_hand.append(trial(one, [(x, y)], calibrated=calibrated, num_draws=4, seed=0, views=views))
            plain = trial(one, [(x, y)], calibrated=calibrated, num_draws=4, seed=0)
            assert abs(plain.nll - by_hand[-1].nll) > 1e-3
    tried = {one.factor: one.nll for one in found.trials}
    assert [tried[0.1], tried[1.0]] == pytest.approx([one.nll for one in by_hand], rel=1e-9)


def test_a_record_of_what_was_tried():
    posterior, (x, y) = classifier(), images()
    assert posterior.widening is None
    widen(posterior, batches(x, y), num_draws=4)
    found = posterior.widening
    assert isinstance(found, Widening)
    factors = [one.factor for one in found.trials]
    assert factors == sorted(set(factors))
    assert str(found).count("chosen") == 1


def test_refusals():
    x, y = images()
    loader = batches(x, y)
    with pytest.raises(TypeError, match="needs a posterior"):
        widen(nn.Linear(4, 3), loader)
    with pytest.raises(TypeError, match="read only once"):
        widen(classifier(), iter(loader))
    with pytest.raises(TypeError, match="widen takes a loader of batches"):
        widen(classifier(), x)
    with pytest.raises(ValueError, match="tolerance"):
        widen(classifier(), loader, tolerance=-0.1)
    with pytest.raises(ValueError, match="gave no batch"):
        widen(classifier(), [])
    with pytest.raises(ValueError, match="at least two"):
        widen(classifier(), [(x[:1], y[:1])])
    with pytest.raises(ValueError, match="has none to widen"):
        widen(classifier(method=MAP()), loader)
    with pytest.raises(ValueError, match="no uncertainty yet: the spread of 0 snapshots"):
        widen(classifier(method=SWAG()), loader)
    with pytest.raises(ValueError, match="no uncertainty yet: There is no curvature yet"):
        widen(classifier(method=Laplace()), loader)


def test_a_likelihood_without_noise_has_the_error_alone():
    posterior = regression()
    posterior.set_likelihood(Custom(lambda output, target: -(output - target).abs()[:, 0]))
    x, y = numbers()
    with pytest.raises(ValueError, match=r"tolerance=\.\.\. goes by the error alone"):
        widen(posterior, batches(x, y), num_draws=8)
    widen(posterior, batches(x, y), num_draws=8, tolerance=0.1)
    assert posterior.widening.factor > 1
