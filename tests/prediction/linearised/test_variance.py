"""Variances to first order, against the whole Jacobian in float64 and against enumerated masks."""

import itertools

import pytest
import torch
from torch import nn

from bayesify import ABNN, MCDropout, convert
from bayesify.laws import GaussianLaw, Posterior
from bayesify.layers import ConvolutionGradients
from bayesify.prediction.linearised import LinearisedPass, make_plan
from tests.prediction.linearised.networks import NETWORKS, exact_covariance, gaussian, randn

EXACT = {"rtol": 1e-10, "atol": 1e-12}


def linearised(posterior, inputs, component=0, **options):
    found = posterior.components()[component]
    with torch.no_grad():
        return LinearisedPass(posterior, found, make_plan(posterior, found, inputs), inputs, **options)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of the reference's vmap
@pytest.mark.parametrize("name", NETWORKS)
def test_equals_the_jacobian(name):
    make, inputs = NETWORKS[name]
    posterior = gaussian(make())
    outputs, covariance = exact_covariance(posterior, inputs)
    found = linearised(posterior, inputs)
    torch.testing.assert_close(found.outputs, outputs, **EXACT)
    for _ in range(3):
        cotangent = randn(*outputs.shape)
        expected = torch.einsum("bi,bij,bj->b", cotangent, covariance, cotangent)
        torch.testing.assert_close(found.variance(cotangent), expected, **EXACT)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of the reference's vmap
@pytest.mark.parametrize("signs", [0, 1])
@pytest.mark.parametrize("name", NETWORKS)
def test_several_functions_in_one_pass(name, signs):
    make, inputs = NETWORKS[name]
    posterior = gaussian(make())
    outputs, covariance = exact_covariance(posterior, inputs)
    found = linearised(posterior, inputs, signs=signs, several=True)
    for _ in range(2):  # once more with what was kept
        cotangents = randn(3, *outputs.shape)
        expected = torch.einsum("nbi,bij,nbj->nb", cotangents, covariance, cotangents)
        apart = torch.stack([found.variance(cotangent) for cotangent in cotangents])
        torch.testing.assert_close(found.variances(cotangents), apart, **EXACT)
        assert signs or torch.allclose(apart, expected, **EXACT)
    assert not found.plan.apart


class Alone(torch.autograd.Function):
    """Twice the input, without a rule for several gradients."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        assert float(grad.sum()) < float("inf")  # which asks for one number
        return 2 * grad


class Doubled(nn.Sequential):
    def forward(self, x):
        return Alone.apply(super().forward(x))


def test_a_network_that_takes_one_gradient_at_a_time():
    posterior, x = gaussian(Doubled(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))), randn(5, 3)
    found = linearised(posterior, x, several=True)
    cotangents = randn(2, 5, 2)
    together = found.variances(cotangents, last=True)
    assert found.plan.apart
    found = linearised(posterior, x)
    torch.testing.assert_close(together, torch.stack([found.variance(one) for one in cotangents]), **EXACT)


@pytest.mark.parametrize(("name", "looped"), [("odd", {"weight"}), ("twice", set()), ("transformer", set())])
def test_what_is_looped_over(name, looped):
    make, inputs = NETWORKS[name]
    posterior = gaussian(make())
    assert make_plan(posterior, posterior.components()[0], inputs).looped == looped


def test_some_parameters_alone():
    make, inputs = NETWORKS["residual"]
    network = make().double().eval()
    every = gaussian(network)
    kept = ["second.weight", "head.bias", "norm.bias"]
    log_stds = {name: every.law.log_std.as_dict()[name] for name in kept}
    some = Posterior(network, GaussianLaw(network, log_stds=log_stds))
    cotangent = randn(3, 3)
    _, covariance = exact_covariance(some, inputs)
    expected = torch.einsum("bi,bij,bj->b", cotangent, covariance, cotangent)
    torch.testing.assert_close(linearised(some, inputs).variance(cotangent), expected, **EXACT)


def test_the_network_is_left_as_it_was():
    make, inputs = NETWORKS["twice"]
    posterior = gaussian(make())
    before = dict(posterior.network.named_parameters())
    posterior.network.scale.requires_grad_(False)
    linearised(posterior, inputs).variance(randn(3, 7))
    after = dict(posterior.network.named_parameters())
    assert all(after[name] is before[name] for name in before)
    assert [name for name, p in after.items() if not p.requires_grad] == ["scale"]
    assert all(p.grad is None for p in after.values())
    assert all("forward" not in module.__dict__ for module in posterior.modules())


@pytest.mark.parametrize("channels", [False, True])
def test_dropout_masks_enumerated(channels):
    """With linear layers behind it, the output is linear in the mask, and the variance is exact."""
    drop = nn.Dropout1d(0.3) if channels else nn.Dropout(0.3)
    posterior = convert(nn.Sequential(nn.Conv1d(2, 3, 1), drop, nn.Flatten(1), nn.Linear(6, 2)).double(), MCDropout())
    x = randn(3, 2, 2)
    h = posterior.network[0](x).detach()
    masks = itertools.product([0.0, 1.0], repeat=3 if channels else 6)
    mean, square = 0.0, 0.0
    for bits in masks:
        mask = torch.tensor(bits, dtype=torch.float64)
        weight = 0.7 ** mask.sum() * 0.3 ** (1 - mask).sum()
        shaped = mask.reshape(3, -1).expand(3, 2)
        output = posterior.network[3]((h * shaped / 0.7).flatten(1)).detach()
        mean, square = mean + weight * output, square + weight * output**2
    found = linearised(posterior, x)
    torch.testing.assert_close(found.outputs, mean, **EXACT)
    for unit in range(2):
        cotangent = torch.eye(2, dtype=torch.float64)[unit].expand(3, 2)
        torch.testing.assert_close(found.variance(cotangent), (square - mean**2)[:, unit], **EXACT)


def test_alpha_dropout_masks_enumerated():
    posterior = convert(nn.Sequential(nn.AlphaDropout(0.3), nn.Linear(3, 1)).double(), MCDropout())
    (layer,) = posterior.law.places
    assert layer.alpha
    x = randn(4, 3)
    mean, square = 0.0, 0.0
    for bits in itertools.product([0.0, 1.0], repeat=3):
        uniform = torch.tensor(bits, dtype=torch.float64)  # 1 is kept
        weight = 0.7 ** uniform.sum() * 0.3 ** (1 - uniform).sum()
        output = posterior.network[1](layer._combine(x, layer._mask.of(uniform, x.dtype))).detach()
        mean, square = mean + weight * output, square + weight * output**2
    found = linearised(posterior, x)
    torch.testing.assert_close(found.outputs, mean, **EXACT)
    torch.testing.assert_close(found.variance(torch.ones(4, 1).double()), (square - mean**2)[:, 0], **EXACT)


@pytest.mark.parametrize("shape", ["sample-channel", "element"])
def test_noise_behind_normalisation(shape):
    network = nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten(1), nn.Linear(12, 2)).double().eval()
    nn.init.normal_(network[1].bias)
    nn.init.normal_(network[1].weight)
    posterior = convert(network, ABNN(alpha=0.4, noise=shape, members=1))
    x = randn(4, 1, 3, 3)
    with torch.no_grad():
        xhat = network[1](network[0](x)) - network[1].bias[:, None, None]
        moved = 0.4 * xhat.flatten(1)[:, None, :] * network[3].weight  # (B, O, C H W)
        groups = moved.reshape(4, 2, 3, 4)
        expected = (groups.sum(-1) if shape == "sample-channel" else groups).square().flatten(2).sum(-1)
    found = linearised(posterior, x)
    torch.testing.assert_close(found.outputs, network(x).detach(), **EXACT)
    for unit in range(2):
        cotangent = torch.eye(2, dtype=torch.float64)[unit].expand(4, 2)
        torch.testing.assert_close(found.variance(cotangent), expected[:, unit], **EXACT)


def test_a_noisy_layer_with_time_first():
    class TimeFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(x.transpose(0, 1)).transpose(0, 1).sum(1)

    posterior = convert(TimeFirst(), MCDropout())
    x = randn(2, 4, 3)
    for unit in range(3):
        cotangent = torch.eye(3, dtype=torch.float64)[unit].expand(2, 3)
        torch.testing.assert_close(linearised(posterior, x).variance(cotangent), x[..., unit].square().sum(1), **EXACT)


def test_statistics_of_the_batch_are_refused():
    network = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, track_running_stats=False)).double()
    with pytest.raises(ValueError, match="uses the batch's own statistics"):
        linearised(gaussian(network), randn(4, 2))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of the reference's vmap
@pytest.mark.parametrize("options", [{"padding": 1}, {"stride": 2, "padding": 2, "dilation": 2}, {"bias": False}])
def test_pairs_of_few_positions(options, monkeypatch):
    """A convolution with few positions and variances that are a product, in many backward passes."""
    network = nn.Sequential(
        nn.Conv2d(16, 4, 3, **options), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    network = network.double().eval()
    log_stds = {n: randn(*p.shape) / 3 - 2 for n, p in network.named_parameters()}
    log_stds["0.weight"] = randn(4, 1, 1, 1) / 3 + randn(1, 16, 3, 3) / 3 - 2
    posterior, images = Posterior(network, GaussianLaw(network, log_stds=log_stds)), randn(3, 16, 5, 5)
    _, covariance = exact_covariance(posterior, images)
    monkeypatch.setattr(ConvolutionGradients, "weight", None)  # which would be the other way
    component = posterior.components()[0]
    with torch.no_grad():
        found = LinearisedPass(posterior, component, make_plan(posterior, component, images), images, several=True)
    for _ in range(2):
        cotangent = randn(3, 3)
        expected = torch.einsum("bi,bij,bj->b", cotangent, covariance, cotangent)
        torch.testing.assert_close(found.variance(cotangent), expected, **EXACT)
    cotangents = randn(4, 3, 3)
    expected = torch.einsum("nbi,bij,nbj->nb", cotangents, covariance, cotangents)
    torch.testing.assert_close(found.variances(cotangents), expected, **EXACT)
