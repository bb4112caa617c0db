"""check: a fast predictor against Monte Carlo."""

import pytest
import torch
from torch import nn

from bayesify import ABNN, BayesAdapter, Categorical, Gaussian, Linearised, Streamlined, check, convert, predict
from bayesify.evaluation.checking import _advice, _debiased, _interval, _rank_correlation
from bayesify.laws import GaussianLaw, Posterior
from tests.prediction.linearised.networks import NETWORKS, gaussian, randn

X = randn(40, 4)


@pytest.mark.slow
def test_a_linear_network_is_trusted():
    """The linearised predictive of a linear network is its law: 1000 draws have a variance within 10 % in sum."""
    torch.manual_seed(0)
    posterior = gaussian(nn.Linear(4, 3))
    found = check(posterior, [(X, torch.randint(3, (40,)))], how="linearised", num_draws=1000)
    assert abs(found.variance_ratio - 1) < 0.1
    assert found.rank_correlation > 0.95
    assert "Trust how='linearised'" in found.advice
    assert found.nll_difference is not None
    assert abs(found.nll_difference) < 0.05
    assert (found.examples, found.draws) == (40, 1000)
    assert found.cost > 0
    assert found.sampling_cost > found.cost
    assert "variance ratio" in str(found)


def test_inputs_alone_and_regression():
    posterior = gaussian(NETWORKS["mlp"][0](), std=0.1, likelihood=Gaussian(0.2))
    found = check(posterior, [X[:20], X[20:]], num_draws=200)
    assert found.nll_difference is None
    assert found.examples == 40
    scored = check(posterior, [(X, randn(40, 3))], num_draws=200, max_batches=1)
    assert scored.nll_difference is not None


def test_a_wrong_scale_is_found():
    posterior = gaussian(nn.Linear(4, 3))
    found = check(posterior, [X], num_draws=400, how=Streamlined(engine="moments"), variance_scale=0.1)
    assert 0.08 < found.variance_ratio < 0.12
    assert "fit_variance_scale" in found.advice


def test_members():
    network = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3)).double()
    found = check(convert(network, ABNN(members=2, alpha=0.1)), [X], num_draws=40, how=Streamlined(engine="moments"))
    assert 0.5 < found.variance_ratio < 2


def test_rank_correlation_and_advice():
    one = torch.tensor([1.0, 2.0, 2.0, 5.0])
    assert _rank_correlation(one, one) == 1.0
    assert _rank_correlation(one, -one) == -1.0
    assert _rank_correlation(one, torch.ones(4)) == 0.0
    assert "Do not trust how='moments'" in advice("moments", 1.0, 0.3, 0.95)
    assert "how='sampling'" in advice("linearised", 1.0, 0.3, 0.95)
    assert "factor of 10" in advice("moments", 0.1, 0.95, 0.95)
    assert "that is 0.3 times theirs. how=Streamlined(directions=2)" in advice("streamlined", 1.0, 0.95, 0.95, (0.3,))
    surer = _advice(Linearised(), "linearised", 1.0, 0.95, 0.95, (1.0, 1.4, 0.9))
    assert "do not trust the size of its epistemic uncertainty: that of the surer half is 1.4 times" in surer
    assert "that of the unsure half is 0.7 times" in advice("streamlined", 1.0, 0.95, 0.95, (1.0, 1.0, 0.7))
    assert "Trust how='streamlined'" in advice("streamlined", 1.0, 0.95, 0.95, (1.1, None), 0.01)
    wide = advice("streamlined", 1.0, 0.95, 0.95, (1.1,), 0.06)
    assert "Do not trust how='streamlined' here: one draw loses 6.0% of accuracy" in wide


def advice(*arguments):
    return _advice(Streamlined(), *arguments)


@pytest.mark.slow
def test_interval_of_a_rank_correlation():
    """It holds the correlation of many pairs nearly as often as it says, of normals whose correlation is known."""
    generator = torch.Generator().manual_seed(0)
    pearson, number = 0.8, 60
    spearman = 6 / torch.pi * torch.asin(torch.tensor(pearson / 2)).item()
    held = 0
    for _ in range(400):
        one, other = torch.randn(2, number, generator=generator, dtype=torch.float64)
        low, high = _interval(one, pearson * one + (1 - pearson**2) ** 0.5 * other)
        held += low < spearman < high
    assert 0.90 < held / 400 < 0.98  # few examples cost the percentiles a little
    assert _interval(one[:3], other[:3]) is None


def test_draws_are_scored_one_by_one():
    """A network that is always right at its mean, and draws of its one bias that decide by chance."""
    network = nn.Linear(1, 2, bias=True).double()
    with torch.no_grad():
        network.weight.zero_()
        network.bias.copy_(torch.tensor([0.01, 0.0]))
    x, labels = torch.zeros(6, 1, dtype=torch.float64), torch.zeros(6, dtype=torch.long)
    posterior = Posterior(network, GaussianLaw(network, log_stds={"bias": torch.zeros(2, dtype=torch.float64)}))
    found = check(posterior, [(x, labels)], num_draws=40)
    samples = predict(posterior, x, num_draws=8, seed=0, keep_samples=True).samples
    assert found.lost_accuracy == pytest.approx(1 - (samples.argmax(-1) == 0).double().mean().item())
    assert found.lost_accuracy > 0.05
    assert "one draw loses" in found.advice
    assert f"one draw loses    {found.lost_accuracy:.1%}" in str(found)
    assert check(posterior, [x], num_draws=4).lost_accuracy is None


def test_the_draws_information_is_that_of_many():
    """2 I(S) - I(S / 2) of few draws is right on average, where I(S) is too small by a tenth."""
    generator = torch.Generator().manual_seed(0)
    outputs = 0.3 * torch.randn(10, 20_000, 3, generator=generator, dtype=torch.float64)
    parts = [Categorical().from_samples(some).epistemic for some in (outputs, outputs[:5], outputs[5:])]
    many = Categorical().from_samples(outputs.transpose(0, 1).flatten(0, 1)[:, None]).epistemic
    assert _debiased(*parts).mean().item() == pytest.approx(many.item(), rel=0.01)
    assert parts[0].mean() < 0.92 * many


def test_a_sketch_says_how_far_it_is_off():
    torch.manual_seed(0)
    network = nn.Sequential(
        *(nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 12, 3), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 3)),
    )
    posterior = convert(network, BayesAdapter(start_std=(0.02, 0.02)))
    images = torch.randn(12, 3, 8, 8)
    found = check(posterior, [images[:6], images[6:]], num_draws=8)
    rough, exact = (predict(posterior, images, how=Streamlined(sketch=number)).output_variance for number in (1, 0))
    assert found.sketch_error == pytest.approx((rough / exact - 1).abs().median().item(), rel=1e-3)
    assert f"variances within {found.sketch_error:.1%}" in str(found)
    low, high = found.rank_interval
    assert low < found.rank_correlation < high
    assert f"({low:.3f} to {high:.3f}; two halves" in str(found)
    assert check(posterior, [images], how=Streamlined(sketch=0), num_draws=4).sketch_error is None


def test_a_sketch_of_free_variances_says_how_far_it_is_off():
    """Variances that are no product of rows and columns are taken as one; the error is that of the exact sum."""
    torch.manual_seed(0)
    network = nn.Sequential(
        *(nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 12, 3), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 1)),
    ).double()
    free = {name: -4 + 2 * torch.randn_like(p) for name, p in network.named_parameters() if p.ndim == 4}
    posterior = Posterior(network, GaussianLaw(network, log_stds=free), likelihood=Gaussian())
    images = torch.randn(6, 3, 8, 8, dtype=torch.float64)
    variances = {name: (2 * value).exp() for name, value in free.items()}

    def exact(image):
        parameters = [network.get_parameter(name) for name in free]
        gradients = torch.autograd.grad(network(image[None]).sum(), parameters)
        return sum((variances[name] * g.square()).sum() for name, g in zip(free, gradients, strict=True))

    wanted = torch.stack([exact(image) for image in images])
    whole = predict(posterior, images, how=Linearised()).output_variance.flatten()
    torch.testing.assert_close(whole, wanted, rtol=1e-9, atol=0)
    for how in (Linearised(sketch=1), Streamlined(engine="margin")):
        found = check(posterior, [images], how=how, num_draws=4)
        rough = predict(posterior, images, how=how).output_variance.flatten()
        error = float((rough / wanted - 1).abs().median())
        assert found.sketch_error == pytest.approx(error, rel=1e-6)
        assert error > 0.01  # the product is not these variances


def test_refusals():
    posterior = gaussian(nn.Linear(4, 3))
    with pytest.raises(ValueError, match="how must be one of"):
        check(posterior, [X], how="sampling")
    with pytest.raises(ValueError, match="at least 4"):
        check(posterior, [X], num_draws=2)
    with pytest.raises(ValueError, match="gave no batch"):
        check(posterior, [])
