"""Noise in normalisation layers: its law, its shapes, the original layer beneath. Bounds are 4.9 standard errors."""

import copy
import pickle

import pytest
import torch
from torch import nn

from bayesify import ABNN, convert
from bayesify.laws import Key, NormSite, Pass
from tests.marks import TORCH
from tests.torchvision_stub import import_torchvision

BOUND = 4.9
EXACT = {"rtol": 1e-13, "atol": 1e-13}

# Each type of layer, with eps other than the default, and the shape of an input with batch 6.
LAYERS = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(5, eps=1e-3, momentum=0.3), (6, 5)),
    "BatchNorm1d, sequences": (lambda: nn.BatchNorm1d(5), (6, 5, 4)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(5, eps=1e-3), (6, 5, 4, 3)),
    "BatchNorm2d, affine-free": (lambda: nn.BatchNorm2d(5, affine=False), (6, 5, 4, 3)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(5), (6, 5, 2, 3, 2)),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(5, eps=1e-3), (6, 5, 4, 3)),
    "LayerNorm": (lambda: nn.LayerNorm(5, eps=1e-12), (6, 4, 5)),
    "LayerNorm, several dimensions": (lambda: nn.LayerNorm((4, 5)), (6, 3, 4, 5)),
    "LayerNorm, no bias": (lambda: nn.LayerNorm(5, bias=False), (6, 5)),
    "LayerNorm, affine-free": (lambda: nn.LayerNorm(5, elementwise_affine=False), (6, 4, 5)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 6), (6, 6, 4, 3)),
    "GroupNorm, affine-free": (lambda: nn.GroupNorm(2, 6, affine=False), (6, 6, 4)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(5), (6, 5, 4)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(5, affine=True, track_running_stats=True), (6, 5, 4, 3)),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(5, affine=True), (6, 5, 2, 3, 2)),
    "RMSNorm": (lambda: nn.RMSNorm(5, eps=1e-3), (6, 4, 5)),
    "RMSNorm, affine-free": (lambda: nn.RMSNorm(5, elementwise_affine=False), (6, 4, 5)),
}
SHAPES = ("sample-channel", "element", "channel")


def make(name):
    """Return a layer in float64 with tensors as training leaves them, and an input."""
    factory, shape = LAYERS[name]
    generator = torch.Generator().manual_seed(0)
    layer = factory().double().eval()
    with torch.no_grad():
        for tensor in [*layer.parameters(), *layer.buffers()]:
            if tensor.is_floating_point():
                tensor.add_(torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype))
    return layer, torch.randn(shape, generator=generator, dtype=torch.float64)


def channel_shape(layer, shape):
    """Return the shape of one example's noise per channel, that broadcasts against its output."""
    if hasattr(layer, "normalized_shape"):
        lead = len(shape) - 1 - len(layer.normalized_shape)
        return (1,) * lead + tuple(layer.normalized_shape)
    return (shape[1],) + (1,) * (len(shape) - 2)


def beta_of(layer, y):
    bias = getattr(layer, "bias", None)
    return torch.zeros(()).double() if bias is None else bias.detach().reshape(channel_shape(layer, y.shape))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_alpha_zero_is_the_original_bit_for_bit(name, shape):
    layer, x = make(name)
    posterior = convert(nn.Sequential(layer), ABNN(alpha=0.0, noise=shape))
    expected = layer(x)
    # In torch 2.6 an instance norm is not even equal to itself: its last bit hangs on where the memory lies.
    rounding = 2e-15 if "InstanceNorm" in name and TORCH < (2, 13) else 0.0

    def same(found):
        return float((found - expected).abs().max()) <= rounding

    assert all(same(function(x)) for function in (posterior, posterior.draw(3), posterior.eval()))
    with posterior.member(1), posterior.mean():
        assert same(posterior(x))
    silenced = convert(nn.Sequential(layer), ABNN(alpha=0.5, noise=shape))
    with silenced.member(0), silenced.mean():
        assert same(silenced(x))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_a_draw_multiplies_what_was_scaled_and_leaves_beta_alone(name, shape):
    layer, x = make(name)
    posterior = convert(nn.Sequential(layer), ABNN(alpha=0.3, noise=shape, members=1))
    y = layer(x)
    beta = beta_of(layer, y)
    u = posterior.draw(7)(x)
    factor = (u - beta) / (y - beta)
    eps = (factor - 1) / 0.3
    expected = eps[:1].expand_as(eps)  # one function for all examples
    if shape != "element":
        # one number for each channel: every position's is the mean's
        dims = [d for d in range(1, y.ndim) if channel_shape(layer, y.shape)[d - 1] == 1 and y.shape[d] > 1]
        expected = expected.mean(dims, keepdim=True).expand_as(eps) if dims else expected
    torch.testing.assert_close(eps, expected, rtol=1e-9, atol=1e-9)
    assert len(eps[0].unique()) > 1
    # The closed form, from the noise that was drawn.
    torch.testing.assert_close(u, (y - beta) * (1 + 0.3 * expected) + beta, rtol=1e-9, atol=1e-9)
    # With noise per channel a draw is the layer with other scales.
    if shape != "element" and getattr(layer, "weight", None) is not None:
        scaled = copy.deepcopy(layer)
        scale = 1 + 0.3 * eps[0]
        for dim in range(scale.ndim):
            if channel_shape(layer, y.shape)[dim] == 1:
                scale = scale.narrow(dim, 0, 1)
        scaled.weight.mul_(scale.reshape(layer.weight.shape))
        torch.testing.assert_close(u, scaled(x), rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_law_is_standard_normal(shape, fresh):
    """On ones, a layer without tensors of its own shows the noise itself."""
    site = NormSite("site", 0.1, shape, (1,))
    ones = torch.ones(50, 500, 2, 2, dtype=torch.float64)
    p = Pass("fresh", rows=50) if fresh else Pass("draw", (Key(3, 1),), rows=50)
    eps = (site.act(p, ones, None) - 1) / 0.1
    if shape != "element":
        assert torch.equal(eps, eps[..., :1, :1].expand_as(eps))
        eps = eps[..., 0, 0]
    if not fresh or shape == "channel":
        assert torch.equal(eps, eps[:1].expand_as(eps))
        eps = eps[0]
    number = eps.numel()
    assert abs(eps.mean()) < BOUND / number**0.5
    assert abs(eps.square().mean() - 1) < BOUND * (2 / number) ** 0.5
    assert abs(eps.pow(4).mean() - 3) < BOUND * (96 / number) ** 0.5
    assert len(eps.unique()) == number


@torch.no_grad()
def test_time_first_activations_have_noise_for_each_example():
    class TimeFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(5, elementwise_affine=False)

        def forward(self, x):
            return self.norm(x.transpose(0, 1)).transpose(0, 1)

    network = TimeFirst().double().eval()
    x = torch.randn(4, 4, 5, dtype=torch.float64)  # as many positions as examples, so that the shape says nothing
    factor = convert(network, ABNN(alpha=0.3, members=1))(x) / network(x)
    torch.testing.assert_close(factor, factor[:, :1].expand_as(factor), rtol=1e-9, atol=1e-9)
    assert (factor[0] - factor[1]).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_keeps_small_noise(dtype):
    site = NormSite("site", 0.01, "element", (-1,))
    y = torch.full((1, 200_000), 1.0, dtype=dtype)
    beta = torch.full((200_000,), 100.0)  # y - beta = -99, whose noise of .99 half precision can show
    u = site.act(Pass("draw", (Key(0),), rows=1), y, beta)
    assert u.dtype == dtype
    assert abs(u.float().std() - 0.99) < BOUND * 0.99 / (2 * 200_000) ** 0.5


def test_gradients_are_those_of_the_formula():
    """In float64, by autograd through the formula written out, for gamma, beta and the input."""
    layer = nn.BatchNorm2d(5, eps=1e-3).double().train()
    x = torch.randn(6, 5, 4, 3, dtype=torch.float64)
    posterior = convert(nn.Sequential(layer), ABNN(alpha=0.3, members=1, statistics="updated"))
    posterior.train()
    torch.manual_seed(4)
    first = x.clone().requires_grad_()
    u = posterior(first)
    weight = torch.randn_like(u)
    (u * weight).sum().backward()

    second = x.clone().requires_grad_()
    gamma, beta = (p.detach().clone().requires_grad_() for p in (layer.weight, layer.bias))
    mean, variance = second.mean((0, 2, 3)), second.var((0, 2, 3), correction=0)
    xhat = (second - mean[:, None, None]) / (variance + 1e-3).sqrt()[:, None, None]
    with torch.no_grad():
        noisy = (u - beta[:, None, None]) / (gamma[:, None, None] * xhat)
        factor = noisy.mean((2, 3), keepdim=True)
    (((gamma[:, None, None] * factor * xhat) + beta[:, None, None]) * weight).sum().backward()
    torch.testing.assert_close(first.grad, second.grad, rtol=1e-9, atol=1e-9)
    member = posterior.law.member_tensors(0)
    torch.testing.assert_close(member["0.weight"].grad, gamma.grad, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(member["0.bias"].grad, beta.grad, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_libraries_own_layers():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    for layer in (LlamaRMSNorm(5, eps=1e-3), T5LayerNorm(5)):
        layer.weight.uniform_(0.5, 2)
        x = torch.randn(4, 3, 5)
        posterior = convert(nn.Sequential(layer), ABNN(alpha=0.3, members=1))
        factor = posterior.draw(0)(x) / layer(x)
        torch.testing.assert_close(factor, factor[:1, :1].expand_as(factor), rtol=1e-4, atol=1e-4)
        assert (factor - 1).abs().max() > 0.01


@torch.no_grad()
def test_layers_that_also_activate():
    import_torchvision()
    from timm.layers import BatchNormAct2d

    layer = BatchNormAct2d(5, eps=1e-3).double().eval()
    layer.weight.uniform_(0.5, 2)
    layer.bias.uniform_(-1, 1)
    x = torch.randn(4, 5, 3, 3, dtype=torch.float64)
    posterior = convert(nn.Sequential(layer), ABNN(alpha=0.3, members=1))
    before = nn.functional.batch_norm(
        x, layer.running_mean, layer.running_var, layer.weight, layer.bias, False, 0.0, 1e-3
    )
    beta = layer.bias[:, None, None]
    posterior.network[0].act = nn.Identity()
    factor = (posterior.draw(0)(x) - beta) / (before - beta)
    torch.testing.assert_close(factor, factor[:1, :, :1, :1].expand_as(factor), rtol=1e-9, atol=1e-9)
    posterior.network[0].act = nn.ReLU()
    expected = ((before - beta) * factor + beta).relu()
    torch.testing.assert_close(posterior.draw(0)(x), expected, **EXACT)
    for other in (copy.deepcopy(posterior), pickle.loads(pickle.dumps(posterior))):
        torch.testing.assert_close(other.draw(0)(x), expected, **EXACT)
        other.law.member_tensors(0)["0.bias"].add_(1)  # the copy's beta, not the original's
        assert not torch.isclose(other.draw(0)(x), expected).all()
    torch.testing.assert_close(posterior.draw(0)(x), expected, **EXACT)


@torch.no_grad()
def test_a_layer_that_fails_in_a_draw_has_its_own_scales_again():
    layer, x = make("LayerNorm")
    posterior = convert(nn.Sequential(layer), ABNN(alpha=0.3, members=1))
    draw, own = posterior.draw(7), posterior.network[0].weight
    expected = draw(x)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        draw(x[..., :3])
    assert posterior.network[0].weight is own
    torch.testing.assert_close(draw(x), expected, **EXACT)
    assert all("forward" not in vars(module) for module in posterior.network.modules())
