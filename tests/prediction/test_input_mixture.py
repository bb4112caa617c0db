"""Prediction without draws from a mixture of Gaussians over layer inputs, component by component."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

from bayesify import IBNN, Gaussian, Streamlined, convert, fit_variance_scale, predict
from bayesify._core.trees import call
from bayesify.prediction.linearised import make_plan
from tests.prediction.linearised.networks import NETWORKS, randn
from tests.prediction.streamlined.test_predict import centred, monte_carlo

EXACT = {"rtol": 1e-9, "atol": 1e-12}
X = randn(5, 4)
CASES = ["mlp", "residual", "twice", "transformer", "time first", "conv1d", "conv3d"]


def mixture(network, components=2, *, means_std=0.3, start_std=(0.2, 0.05), **settings):
    method = IBNN(components=components, means_std=means_std, start_std=start_std, **settings)
    return convert(network.double().eval(), method)


def test_one_linear_layer_is_the_mixture_in_closed_form():
    """W (z o x) + b: a mean W (m_k o x) + b and a variance W^2 (s_k^2 o x^2) for each component."""
    network = nn.Linear(4, 3)
    posterior = mixture(network, 3)
    posterior.set_likelihood(Gaussian(0.5))
    weight, bias = posterior.network.weight.detach(), posterior.network.bias.detach()
    means = torch.stack([(m * X) @ weight.T + bias for m in posterior.law.component_means.detach()])
    variances = torch.stack([(s**2 * X**2) @ weight.T**2 for s in posterior.law.component_stds.detach()])
    for how in (Streamlined(engine="moments"), "linearised", "streamlined"):
        prediction = predict(posterior, X, how=how)
        torch.testing.assert_close(prediction.mean, means.mean(0), **EXACT)
        torch.testing.assert_close(prediction.epistemic, variances.mean(0) + means.var(0, correction=0), **EXACT)
        assert torch.equal(prediction.aleatoric, torch.full_like(prediction.mean, 0.25))
    spread = torch.full((4,), 0.1, dtype=torch.float64)
    pairs = posterior.law.component_means, posterior.law.component_stds
    second = torch.stack([((m**2 + s**2) * 0.1) @ weight.T**2 for m, s in zip(*pairs, strict=True)]).detach()
    both = predict(posterior, X, how=Streamlined(engine="moments"), input_variance=spread)
    expected = (variances + second[:, None]).mean(0) + means.var(0, correction=0)
    torch.testing.assert_close(both.epistemic, expected, **EXACT)


def test_classes_are_averaged_over_components():
    posterior = mixture(NETWORKS["mlp"][0](), 3)
    inputs = NETWORKS["mlp"][1]
    whole = predict(posterior, inputs, how=Streamlined(engine="moments"))
    parts = []
    for component in range(3):
        alone = mixture(NETWORKS["mlp"][0](), 1)
        alone.network.load_state_dict(posterior.network.state_dict())
        alone.law.component_means.data = posterior.law.component_means.data[component : component + 1]
        alone.law.component_rhos.data = posterior.law.component_rhos.data[component : component + 1]
        parts.append(predict(alone, inputs, how=Streamlined(engine="moments")))
    probs = torch.stack([part.probs for part in parts])
    torch.testing.assert_close(whole.probs, probs.mean(0), **EXACT)
    means = torch.stack([part.logits_mean for part in parts])
    within = torch.stack([part.logits_variance for part in parts]).mean(0)
    torch.testing.assert_close(whole.logits_variance, within + means.var(0, correction=0), **EXACT)
    assert (whole.epistemic > torch.stack([part.epistemic for part in parts]).mean(0) - 1e-12).all()


@torch.no_grad()
def exact_variances(posterior, inputs, component):
    """Diagonal of J diag(s^2) J', J the Jacobian of the centred outputs by the factors, at a component's means."""
    network = posterior.network

    def outputs(factors):
        return centred(call(lambda *a, **k: functional_call(network, posterior.law.folded(factors), a, k), inputs))

    jacobian = jacrev(outputs)(posterior.law.component_means[component])
    return (jacobian**2) @ posterior.law.component_stds[component] ** 2


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of the reference's vmap
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_linearised_equals_the_jacobian(name, bias):
    make, inputs = NETWORKS[name]
    posterior = mixture(make(), 1, bias=bias)
    expected = exact_variances(posterior, inputs, 0)
    prediction = predict(posterior, inputs, how="linearised")
    torch.testing.assert_close(prediction.logits_variance.sum(-1), expected.sum(-1), rtol=1e-8, atol=1e-12)
    if not bias and name != "twice":  # whose table is read outside its module
        assert not make_plan(posterior, posterior.components()[0], inputs).looped


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "transformer", "time first", "conv1d"])
def test_moments_against_draws(name):
    """Within a quarter of Monte Carlo's variance with 2000 draws, whose own error is 3 % of a variance."""
    torch.manual_seed(0)
    make, inputs = NETWORKS[name]
    posterior = mixture(make(), 2, means_std=0.05, start_std=(0.05, 0.0))
    expected = centred(monte_carlo(posterior, inputs)).var(0)
    prediction = predict(posterior, inputs, how=Streamlined(engine="moments"))
    assert 0.75 < (prediction.logits_variance.sum() / expected.sum()).item() < 1.25


def test_nothing_random_is_the_plain_network():
    network = NETWORKS["mlp"][0]().double().eval()
    posterior = mixture(network, 2, means_std=0.0, start_std=(0.0, 0.0))
    inputs = NETWORKS["mlp"][1]
    prediction = predict(posterior, inputs, how=Streamlined(engine="moments"))
    torch.testing.assert_close(prediction.probs, network(inputs).softmax(-1), **EXACT)
    assert prediction.epistemic.max() < 1e-12
    assert all("forward" not in module.__dict__ for module in posterior.modules())


def test_scale_and_laws():
    posterior = mixture(NETWORKS["mlp"][0](), 2)
    inputs = NETWORKS["mlp"][1]
    loader = [(inputs, torch.zeros(len(inputs), dtype=torch.long))]
    assert fit_variance_scale(posterior, loader) > 0
    assert [len(law.means) for law in posterior.components()] == [len(posterior.law.latents)] * 2
