"""The covariance of all logits from one backward pass: exact where its assumption holds, and for two classes."""

from importlib import import_module

import pytest
import torch
from torch import nn

from bayesify import Streamlined, predict
from bayesify.laws import GaussianLaw, Posterior
from bayesify.prediction.linearised import output_variances
from bayesify.prediction.one_pass import one_pass_of
from tests.prediction.linearised.networks import NETWORKS, UNet, exact_covariance, gaussian, randn

EXACT = {"rtol": 1e-9, "atol": 1e-12}


def centred(covariance):
    classes = covariance.shape[-1]
    projection = torch.eye(classes, dtype=covariance.dtype) - 1 / classes
    return (projection @ covariance @ projection).diagonal(dim1=-2, dim2=-1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of the reference's vmap
@pytest.mark.parametrize("name", ["residual", "tokens", "mlp"])
def test_two_classes_are_exact(name):
    make, inputs = NETWORKS[name]
    network = make()
    *_, (place, head) = [(n, m) for n, m in network.named_modules() if isinstance(m, nn.Linear)]
    setattr(network, place, nn.Linear(head.in_features, 2))
    posterior = gaussian(network)
    _, covariance = exact_covariance(posterior, inputs)
    prediction = predict(posterior, inputs, how=Streamlined(engine="principal", sketch=0))
    torch.testing.assert_close(prediction.logits_variance, centred(covariance), **EXACT)


@pytest.mark.parametrize("dead", [False, True])
def test_features_that_are_as_noisy_as_they_are_large(dead):
    """Features with variances in proportion to |h|, or, where all are zero, with equal ones."""
    network = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).double()
    if dead:
        nn.init.zeros_(network[0].weight)
        nn.init.zeros_(network[0].bias)
    x = randn(1, 4)
    h = network[0](x)[0].detach()
    log_stds = {
        "0.bias": (0.3 * h.abs() if not dead else torch.full_like(h, 0.3)).log() / 2,
        "1.weight": randn(3, 6),
        "1.bias": randn(3),
    }
    posterior = Posterior(network, GaussianLaw(network, log_stds=log_stds))
    _, covariance = exact_covariance(posterior, x)
    prediction = predict(posterior, x, how=Streamlined(engine="principal"))
    # variances of independent logits cannot be those of every covariance, but their sum is
    torch.testing.assert_close(prediction.logits_variance.sum(-1), centred(covariance).sum(-1), **EXACT)
    assert prediction.logits_variance.sum() > 0


def test_needs_a_last_layer():
    images = randn(2, 1, 4, 4)
    with pytest.raises(ValueError, match=r"last nn\.Linear"):
        predict(gaussian(UNet()), images, how=Streamlined(engine="principal"))
    scaled = nn.Sequential(nn.Linear(4, 3), nn.Softplus())
    with pytest.raises(ValueError, match=r"last nn\.Linear"):
        predict(gaussian(scaled), randn(2, 4), how=Streamlined(engine="principal"))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of the reference's vmap
@pytest.mark.parametrize("name", ["mlp", "transformer", "wide tokens"])
def test_variances_that_are_products(name):
    """One standard deviation for each row times one for each column, which both engines multiply faster."""
    wide = (lambda: nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Flatten(1), nn.Linear(18, 3)), randn(3, 2, 9))
    make, inputs = {**NETWORKS, "wide tokens": wide}[name]
    network = make().double().eval()
    log_stds = {
        n: randn(p.shape[0], 1) / 3 + randn(1, p.shape[1]) / 3 - 2 if p.ndim == 2 else randn(*p.shape) / 3 - 2
        for n, p in network.named_parameters()
    }
    posterior = Posterior(network, GaussianLaw(network, log_stds=log_stds))
    _, covariance = exact_covariance(posterior, inputs)
    found = predict(posterior, inputs, how="linearised").logits_variance
    torch.testing.assert_close(found.sum(-1), centred(covariance).sum(-1), **EXACT)
    exact = predict(posterior, inputs, how=Streamlined(engine="moments")).logits_variance
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("bayesify.prediction.streamlined.linear"), "rank_one_factors", lambda _: None)
        posterior.runtime.traces.clear()
        torch.testing.assert_close(
            predict(posterior, inputs, how=Streamlined(engine="moments")).logits_variance, exact, **EXACT
        )


def deciding(outputs):
    """Return the unit vector of the difference of the top two, (B, C)."""
    top = outputs.topk(2, -1).indices
    one, other = (torch.nn.functional.one_hot(top[:, index], outputs.shape[-1]) for index in (0, 1))
    return (one - other).to(outputs) / 2**0.5


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of the reference's vmap
@pytest.mark.parametrize("name", ["residual", "tokens", "mlp"])
@pytest.mark.parametrize("directions", [2, 4])
def test_several_directions_are_exact_for_what_decides(name, directions):
    """The difference of the top two of six, whose covariance with the others is a guess; and it is a covariance."""
    make, inputs = NETWORKS[name]
    network = make()
    *_, (place, head) = [(n, m) for n, m in network.named_modules() if isinstance(m, nn.Linear)]
    setattr(network, place, nn.Linear(head.in_features, 6))
    posterior = gaussian(network)
    outputs, covariance = exact_covariance(posterior, inputs)
    one_pass = one_pass_of(posterior, Streamlined(engine="principal", directions=directions, sketch=0), inputs)
    with torch.no_grad():
        (found,) = one_pass.moments(inputs)
    margin = deciding(outputs)[..., None]
    torch.testing.assert_close(margin.mT @ found.covariance @ margin, margin.mT @ covariance @ margin, **EXACT)
    assert torch.linalg.eigvalsh(found.covariance).min() > -1e-12


def test_the_whole_covariance_where_the_assumption_holds():
    """Features with variances in proportion to |h|, and random last weights: every entry, after centring."""
    network = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5)).double()
    x = randn(3, 4)[:1]
    h = network[0](x)[0].detach()
    log_stds = {"0.bias": (0.3 * h.abs()).log() / 2, "1.weight": randn(5, 6), "1.bias": randn(5)}
    posterior = Posterior(network, GaussianLaw(network, log_stds=log_stds))
    _, covariance = exact_covariance(posterior, x)
    one_pass = one_pass_of(posterior, Streamlined(engine="principal", directions=2), x)
    with torch.no_grad():
        (found,) = one_pass.moments(x)
    projection = torch.eye(5, dtype=torch.float64) - 1 / 5
    torch.testing.assert_close(
        projection @ found.covariance @ projection, projection @ covariance @ projection, rtol=1e-9, atol=1e-11
    )
    many = predict(posterior, x, how=Streamlined(engine="principal", directions=2))
    with pytest.MonkeyPatch.context() as patch:  # of many classes the variances alone are kept
        patch.setattr(output_variances, "MOST_CLASSES", 4)
        few = predict(posterior, x, how=Streamlined(engine="principal", directions=2))
    torch.testing.assert_close(many.logits_variance, few.logits_variance, rtol=1e-9, atol=0)
    assert not torch.allclose(many.epistemic, few.epistemic)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of the reference's vmap
def test_a_common_direction_that_is_the_margin_leaves_another():
    """With three classes two directions are all there are, also where both choices are the same."""
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        network[2].weight.copy_(torch.tensor([1.0, -1.0, 0.0])[:, None] * randn(6))
        network[2].bias.copy_(torch.tensor([5.0, 4.0, -20.0]))
    posterior = gaussian(network, std=0.1)
    inputs = randn(5, 4)
    _, covariance = exact_covariance(posterior, inputs)
    found = predict(posterior, inputs, how=Streamlined(engine="principal", directions=2))
    torch.testing.assert_close(found.logits_variance.sum(-1), centred(covariance).sum(-1), rtol=1e-8, atol=1e-12)
