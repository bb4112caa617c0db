"""Kronecker products without draws: against dense covariances in float64, the whole Jacobian, and draws."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import bayesify
from bayesify import Gaussian, Laplace, Streamlined, predict
from bayesify.prediction.linearised import LinearisedPass, make_plan
from bayesify.prediction.streamlined import MomentsPass
from bayesify.prediction.streamlined.joint import Joint, joint_linear
from bayesify.prediction.streamlined.moments import NoRuleError
from tests.prediction.kronecker import dense, exact_covariance, kronecker
from tests.prediction.linearised.networks import NETWORKS, UNet, randn

EXACT = {"rtol": 1e-9, "atol": 1e-11}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Reads(nn.Module):
    """A layer whose weight is read outside it too."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(x)) @ self.inner.weight)


class Values(nn.Module):
    """Attention whose values are random, with two heads."""

    def __init__(self):
        super().__init__()
        self.query, self.value = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        q, v = (torch.unflatten(y, -1, (2, 3)).transpose(1, 2) for y in (self.query(x), self.value(x)))
        out = functional.scaled_dot_product_attention(q, q, v)
        return out.transpose(1, 2).flatten(1)


# -- first order ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of the reference's vmap
@pytest.mark.parametrize("name", [*(name for name in NETWORKS if name != "odd"), "reads"])
def test_equals_the_jacobian(name):
    make, inputs = (Reads, randn(3, 4)) if name == "reads" else NETWORKS[name]
    posterior = kronecker(make())
    outputs, covariance = exact_covariance(posterior, inputs)
    law = posterior.components()[0]
    with torch.no_grad():
        plan = make_plan(posterior, law, inputs)
        found = LinearisedPass(posterior, law, plan, inputs)
    assert plan.looped == ({"inner.weight", "inner.bias"} if name == "reads" else set())
    torch.testing.assert_close(found.outputs, outputs, **EXACT)
    for _ in range(2):
        cotangent = randn(*outputs.shape)
        expected = torch.einsum("bi,bij,bj->b", cotangent, covariance, cotangent)
        torch.testing.assert_close(found.variance(cotangent), expected, **EXACT)


def centred(covariance):
    projection = torch.eye(covariance.shape[-1], dtype=covariance.dtype) - 1 / covariance.shape[-1]
    return (projection @ covariance @ projection).diagonal(dim1=-2, dim2=-1)


@pytest.mark.parametrize("name", ["mlp", "conv1d"])
def test_one_direction_of_two_classes_is_exact(name):
    make, inputs = NETWORKS[name]
    network = make()
    network[-1] = nn.Linear(network[-1].in_features, 2)
    posterior = kronecker(network)
    _, covariance = exact_covariance(posterior, inputs)
    found = predict(posterior, inputs, how=Streamlined(engine="principal"))
    torch.testing.assert_close(found.logits_variance, centred(covariance), **EXACT)


def test_one_direction_knows_a_random_head():
    """Where the head alone is random its covariance is all there is, for any number of classes."""
    posterior = kronecker(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)), include="2")
    x = randn(3, 4)
    _, covariance = exact_covariance(posterior, x)
    found = predict(posterior, x, how=Streamlined(engine="principal")).logits_variance.sum(-1)
    torch.testing.assert_close(found, centred(covariance).sum(-1), **EXACT)


@pytest.mark.parametrize(("name", "words"), [("mlp", "forward pass"), ("conv1d", "logits move most")])
def test_streamlined_chooses(name, words):
    make, inputs = NETWORKS[name]
    found = predict(kronecker(make()), inputs, how="streamlined")
    assert words in found.predictor
    assert bool((found.logits_variance > 0).all())


# -- moments ----------------------------------------------------------------------------------------------------------


def of_one_layer(covariance, mean, spread, weight):
    """Return Cov[(W, b) (x, 1)] = m' S m + tr(S C) + W C W' by loops, for a dense S and x with mean m, covariance C."""
    outputs = len(weight)
    columns = len(covariance) // outputs
    blocks = covariance.view(outputs, columns, outputs, columns)
    extended = torch.cat([mean, torch.ones(columns - len(mean), dtype=mean.dtype)])
    found = weight @ spread @ weight.T
    for i in range(outputs):
        for j in range(outputs):
            block = blocks[i, :, j]
            found[i, j] += extended @ block @ extended
            found[i, j] += (block[: len(mean), : len(mean)] * spread).sum()
    return found


@pytest.mark.parametrize("bias", [True, False])
def test_moments_of_a_linear_layer(bias):
    posterior = kronecker(nn.Linear(4, 3, bias=bias), Gaussian(1.0))
    x, spread = randn(2, 4), randn(2, 4).square()
    found = predict(posterior, x, how=Streamlined(engine="moments"), input_variance=spread)
    plain = predict(posterior, x, how=Streamlined(engine="moments"))
    weight = posterior.network.weight.detach()
    for row in range(2):
        for one, v in ((found, spread[row]), (plain, torch.zeros(4).double())):
            expected = of_one_layer(dense(posterior, "weight")[0], x[row], v.diag(), weight)
            torch.testing.assert_close(one.epistemic[row], expected.diagonal(), **EXACT)
    torch.testing.assert_close(found.mean, posterior.network(x).detach(), **EXACT)


@pytest.mark.parametrize("bias", [True, False])
def test_covariance_of_a_linear_layer(bias):
    posterior = kronecker(nn.Linear(4, 3, bias=bias), Gaussian(1.0))
    x, root = randn(2, 4), randn(2, 4, 4)
    weights = MomentsPass(posterior, posterior.components()[0], first_order=True, covariance=True).weights
    covariance = root @ root.mT
    made = joint_linear(Joint.make(x, covariance), weights["weight"], weights.get("bias", posterior.network.bias))
    for row in range(2):
        weight = posterior.network.weight.detach()
        expected = of_one_layer(dense(posterior, "weight")[0], x[row], covariance[row], weight)
        torch.testing.assert_close(made.covariance[row], expected, **EXACT)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
def test_moments_of_a_convolution(bias, groups):
    """A convolution is a linear layer on patches."""
    layer = nn.Conv2d(4, 6, (2, 3), stride=(1, 2), padding=1, dilation=(2, 1), groups=groups, bias=bias)
    posterior = kronecker(layer, Gaussian(1.0))
    x, spread = randn(1, 4, 4, 5), randn(1, 4, 4, 5).square()
    found = predict(posterior, x, how=Streamlined(engine="moments"), input_variance=spread)
    options = {"stride": (1, 2), "padding": 1, "dilation": (2, 1)}
    means, variances = (
        functional.unfold(y, (2, 3), **options)[0].unflatten(0, (groups, -1)) for y in (x, spread)
    )  # (G, D, positions)
    weights = posterior.network.weight.detach().reshape(groups, 6 // groups, -1)
    expected = torch.stack(
        [
            torch.cat(
                [
                    of_one_layer(dense(posterior, "weight")[g], means[g, :, p], variances[g, :, p].diag(), weights[g])
                    .diagonal()
                    for g in range(groups)
                ]
            )
            for p in range(means.shape[-1])
        ],
        -1,
    )  # fmt: skip
    torch.testing.assert_close(found.epistemic[0].flatten(1), expected, **EXACT)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of the reference's vmap
def test_tokens_are_mixed_before_correlated_values():
    posterior = kronecker(Values(), Gaussian(1.0), include="value")
    x = randn(2, 4, 6)
    _, covariance = exact_covariance(posterior, x)
    found = predict(posterior, x, how=Streamlined(engine="moments")).epistemic
    torch.testing.assert_close(found, covariance.diagonal(dim1=1, dim2=2), **EXACT)
    # An input that is random too goes through the same weights: (W, b) (A x, 1) with Cov A x = diag(A^2 v).
    spread = randn(2, 4, 6).square()
    found = predict(posterior, x, how=Streamlined(engine="moments"), input_variance=spread).epistemic.view(2, 4, 2, 3)
    q = torch.unflatten(posterior.network.query(x), -1, (2, 3)).transpose(1, 2).detach()
    attention = (q @ q.mT / 3**0.5).softmax(-1)
    weight, whole = posterior.network.value.weight.detach(), dense(posterior, "value.weight")[0]
    for row, head, token in ((0, 0, 1), (1, 1, 3)):
        along = attention[row, head, token]
        expected = of_one_layer(whole, along @ x[row], (along**2 @ spread[row]).diag(), weight).diagonal()
        torch.testing.assert_close(found[row, token, head], expected[3 * head : 3 * head + 3], **EXACT)


def test_a_stack_has_the_covariance_of_draws():
    """Exact without activations: 40,000 draws have variances within six standard errors."""
    posterior = kronecker(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 3)), Gaussian(1.0))
    x = randn(3, 4)
    found = predict(posterior, x, how=Streamlined(covariance="full"))
    outputs, generator = x, torch.Generator().manual_seed(0)
    for place, layer in enumerate(posterior.network):
        root = torch.linalg.cholesky(dense(posterior, f"{place}.weight")[0])
        drawn = torch.randn(40_000, len(root), dtype=root.dtype, generator=generator) @ root.T
        drawn = drawn.view(40_000, layer.out_features, -1) + torch.cat([layer.weight, layer.bias[:, None]], 1).detach()
        outputs = outputs @ drawn[..., :-1].mT + drawn[..., -1][:, None]
    moved = outputs - outputs.mean(0)
    variance, error = moved.square().mean(0), moved.square().std(0) / 200
    assert ((found.epistemic - variance).abs() < 6 * error).all()


# -- what is no product, and what has no rule ------------------------------------------------------------------------


def test_scales_of_layers():
    posterior = kronecker(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2)), Gaussian(1.0))
    x = randn(3, 4)
    alone = [
        predict(posterior, x, how="linearised", variance_scale={name: float(name == only) for name in ("0", "1", "2")})
        for only in ("0", "1", "2")
    ]
    whole = predict(posterior, x, how="linearised", variance_scale={"0": 2.0, "1": 3.0, "2": 0.5})
    expected = sum(scale * one.epistemic for scale, one in zip((2.0, 3.0, 0.5), alone, strict=True))
    torch.testing.assert_close(whole.epistemic, expected, **EXACT)


def test_nothing_is_random_before_the_data():
    posterior = bayesify.convert(nn.Linear(4, 3).double(), Laplace(structure="kronecker"))
    with pytest.warns(UserWarning, match="no uncertainty yet: There is no curvature yet"):
        found = predict(posterior, randn(2, 4), how="streamlined")
    assert float(found.logits_variance.abs().max()) == 0


def test_a_weight_that_is_read_elsewhere_is_an_error():
    with pytest.raises(ValueError, match=r"matmul takes a weight whose entries are correlated.*how='linearised'"):
        predict(kronecker(Reads()), randn(2, 4), how=Streamlined(engine="moments"))
    with pytest.raises(NoRuleError, match=r"matmul.*no rule for covariances"):
        predict(kronecker(Reads()), randn(2, 4), how=Streamlined(covariance="full"))


def test_convolutions_have_no_covariances():
    network = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(1), nn.Linear(9, 3))
    with pytest.raises(NoRuleError, match=r"conv1d.*no rule for covariances"):
        predict(kronecker(network), randn(2, 2, 4), how=Streamlined(covariance="full"))


def test_pixels():
    found = predict(kronecker(UNet()), randn(2, 1, 4, 4), how="streamlined")
    assert found.probs.shape == (2, 4, 4, 3)
    assert bool((found.logits_variance > 0).all())


@pytest.mark.slow
def test_exported():
    posterior = kronecker(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))
    x = randn(5, 4)
    for how in (Streamlined(engine="moments"), "linearised"):
        outputs = bayesify.export(posterior, x, how=how).module()(x)
        torch.testing.assert_close(outputs["epistemic"], predict(posterior, x, how=how).epistemic, **EXACT)
