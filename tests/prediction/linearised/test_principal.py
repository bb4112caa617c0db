"""The covariance of all logits from a few backward passes: exact where its assumption holds, and for two classes."""

import math
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


def asked(weight, outputs):
    """Return the one direction, (B, C): the difference of the top two, and where W W' is widest."""
    centred_weight = (weight - weight.mean(0)).detach()
    common = output_variances._common(centred_weight)  # by the power method, which may stop early
    margin = deciding(outputs.detach())
    return margin + common * torch.where(margin @ common < 0, -1.0, 1.0)[:, None]


def shape(network, h, outputs):
    """Return N of one example, naively."""
    weight = network[1].weight - network[1].weight.mean(0)
    moved = weight @ torch.diag(h.abs()) @ weight.mT
    probs = outputs.softmax(-1)
    unsure = torch.diag(probs) - probs[:, None] * probs
    return (moved / moved.trace() + output_variances.RIVALS * unsure / unsure.trace()).detach()


def assumed(classes):
    """Return a posterior and an example for which the covariance is .3 N + L.

    Six features have variances in proportion to their size; as many as there are
    classes are zero, and their weights are a root of what is left.
    """
    network = nn.Sequential(nn.Linear(4, 6 + classes), nn.Linear(6 + classes, classes)).double()
    with torch.no_grad():
        for tensor in (network[0].weight, network[0].bias):
            tensor[6:] = 0
        network[1].weight[:, 6:] = 0
        x = randn(1, 4)
        h = network[0](x)[0]
        wanted = 0.3 * shape(network, h, network(x)[0])
        size = h.abs()
        centred = network[1].weight - network[1].weight.mean(0)
        factor = 0.3 / (centred @ torch.diag(size) @ centred.mT).trace()
        left = wanted - factor * centred @ torch.diag(size) @ centred.mT
        values, vectors = torch.linalg.eigh(left)
        network[1].weight[:, 6:] = 10 * vectors * values.clamp_min(0).sqrt()  # known to be no noisier for it
    log_stds = {"0.bias": torch.cat([(factor * size[:6]).log() / 2, torch.full_like(randn(classes), -math.log(10))])}
    log_stds |= {"1.weight": randn(*network[1].weight.shape) - 2, "1.bias": randn(classes)}
    return Posterior(network, GaussianLaw(network, log_stds=log_stds)), x


def centring(classes):
    return torch.eye(classes, dtype=torch.float64) - 1 / classes


@pytest.mark.parametrize("directions", [1, 2])
def test_the_whole_covariance_where_the_assumption_holds(directions, monkeypatch):
    """Features with variances in proportion to |h|, what is unsure beside them, and random last weights."""
    monkeypatch.setattr(output_variances, "WIDER", 1.0)
    posterior, x = assumed(5)
    _, covariance = exact_covariance(posterior, x)
    one_pass = one_pass_of(posterior, Streamlined(engine="principal", directions=directions), x)
    with torch.no_grad():
        (found,) = one_pass.moments(x)
    projection = centring(5)
    torch.testing.assert_close(
        projection @ found.covariance @ projection, projection @ covariance @ projection, rtol=1e-9, atol=1e-11
    )
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():  # of many classes the variances alone are kept
        patch.setattr(output_variances, "MOST_CLASSES", 4)
        (few,) = one_pass.moments(x)
    assert few.covariance is None
    probs = found.mean[0].softmax(-1)
    fisher = torch.diag(probs) - probs[:, None] * probs
    torch.testing.assert_close((fisher.diagonal() * few.variance[0]).sum(), (fisher * covariance[0]).sum(), **EXACT)


def test_what_is_asked_for_counts_as_wider_than_the_rest(monkeypatch):
    posterior, x = assumed(5)

    def found(wider):
        monkeypatch.setattr(output_variances, "WIDER", wider)
        with torch.no_grad():
            one_pass = one_pass_of(posterior, Streamlined(engine="principal"), x)
            (moments,) = one_pass.moments(x)
            last = {name: one_pass.components[0].variances[f"1.{name}"] for name in ("weight", "bias")}
            own = posterior.network[0](x).square() @ last["weight"].mT + last["bias"]
        return moments.covariance, torch.diag_embed(own)

    direction = asked(posterior.network[1].weight, posterior.network(x))[0]
    beside = centring(5) - direction[:, None] * direction / direction.square().sum()
    projected = [beside @ (moments - own) @ beside for moments, own in (found(1.0), found(1.5))]
    torch.testing.assert_close(projected[0], 1.5 * projected[1], **EXACT)


@pytest.mark.parametrize("directions", [1, 2])
def test_features_that_are_all_zero_count_as_equally_noisy(directions):
    network = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5)).double()
    nn.init.zeros_(network[0].weight)
    nn.init.zeros_(network[0].bias)
    posterior = Posterior(network, GaussianLaw(network, log_stds={"2.bias": randn(5)}))
    prediction = predict(posterior, randn(3, 4), how=Streamlined(engine="principal", directions=directions))
    _, covariance = exact_covariance(posterior, randn(3, 4))
    torch.testing.assert_close(prediction.logits_variance, centred(covariance), **EXACT)


@pytest.mark.parametrize("confident", [0.0, 5.0, 400.0])
def test_the_shape_of_the_covariance(confident):
    """Its entries, diagonal and quadratic form, also in single precision where a probability is 1 to rounding."""
    weight, h, outputs, direction = randn(4, 6), randn(3, 6), randn(3, 4), randn(3, 4)
    weight = weight - weight.mean(0)
    outputs[:, 1] += confident
    log_probs = outputs.log_softmax(-1)
    rival = log_probs.topk(2, -1).values[:, 1:]
    pairs = log_probs[:, :, None] + log_probs[:, None] - rival[..., None]
    pairs = pairs.masked_fill(torch.eye(4).bool(), -torch.inf).exp()  # p_i p_j / p_2
    unsure = torch.diag_embed(pairs.sum(-1)) - pairs
    moved = weight @ torch.diag_embed(h.abs()) @ weight.mT
    expected = sum(
        share * each / each.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None]
        for share, each in ((1, moved), (output_variances.RIVALS, unsure))
    )
    for dtype, close in (
        (torch.float64, {"rtol": 1e-10, "atol": 1e-13}),
        (torch.float32, {"rtol": 1e-4, "atol": 1e-6}),
    ):
        found = output_variances._Shape(weight.to(dtype), h.abs().to(dtype), outputs.to(dtype))
        torch.testing.assert_close(found.matrix().double(), expected, **close)
        torch.testing.assert_close(found.variances().double(), expected.diagonal(dim1=1, dim2=2), **close)
        along = (direction[:, None] @ expected @ direction[..., None])[:, 0, 0]
        torch.testing.assert_close(found.along(direction.to(dtype)).double(), along, **close)
        information = (unsure * expected).sum((1, 2))
        torch.testing.assert_close(found.information().double(), information, **close)
        for factor in (0.8, 1.0, 1.5):
            changed = found.informed(expected.diagonal(dim1=1, dim2=2).to(dtype), factor * found.information())
            have = (unsure.diagonal(dim1=1, dim2=2) * changed).sum(-1)
            torch.testing.assert_close(have, factor * information, **close)


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
@pytest.mark.parametrize("directions", [1, 2, 4])
def test_directions_are_exact_for_what_they_are_asked(name, directions):
    """Of six classes, whose covariance with the others is a guess; and it is a covariance."""
    make, inputs = NETWORKS[name]
    network = make()
    *_, (place, head) = [(n, m) for n, m in network.named_modules() if isinstance(m, nn.Linear)]
    setattr(network, place, nn.Linear(head.in_features, 6))
    posterior = gaussian(network)
    outputs, covariance = exact_covariance(posterior, inputs)
    one_pass = one_pass_of(posterior, Streamlined(engine="principal", directions=directions, sketch=0), inputs)
    with torch.no_grad():
        (found,) = one_pass.moments(inputs)
    margin = (asked(network.get_submodule(place).weight, outputs) if directions == 1 else deciding(outputs))[..., None]
    torch.testing.assert_close(margin.mT @ found.covariance @ margin, margin.mT @ covariance @ margin, **EXACT)
    assert torch.linalg.eigvalsh(found.covariance).min() > -1e-12


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
