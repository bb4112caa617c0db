"""The law of dropout masks. Statistical bounds are 4.9 standard errors: one false alarm in a million."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayesify import MCDropout, convert
from bayesify.laws import DropoutSite, Key, Pass
from tests.laws.networks import captured, mlp

BOUND = 4.9


def mask_of(layer, shape, key=None, dtype=torch.float64):
    """Return what a converted layer does to ones, for a draw or a fresh pass."""
    posterior = convert(nn.Sequential(layer), MCDropout())
    ones = torch.ones(shape, dtype=dtype)
    if key is None:
        return posterior(ones)
    with posterior.drawn(key):
        return posterior(ones)


def assert_uncorrelated(a, b):
    pair = torch.stack([a.flatten(), b.flatten()])
    assert abs(torch.corrcoef(pair)[0, 1].item()) < BOUND / pair.shape[1] ** 0.5


def test_a_draw_is_the_network_with_its_masks():
    network = mlp()
    posterior = convert(network, MCDropout())
    first, second = captured(posterior, Key(3, 7), torch.rand(5, 4, dtype=torch.float64))
    assert set(first.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(first[:1].expand_as(first), first)  # one mask for all examples

    x = torch.randn(11, 4, dtype=torch.float64)
    hidden = network[0](x).tanh() * first[0]
    hidden = network[3](hidden).tanh() * second[0]
    with posterior.drawn(Key(3, 7)):
        torch.testing.assert_close(posterior(x), network[6](hidden), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("key", [None, Key(0), Key(1, 5)])
def test_rate_and_scale(p, key):
    mask = mask_of(nn.Dropout(p), (1, 100_000), key)
    torch.testing.assert_close(mask.unique(), torch.tensor([0, 1 / (1 - p)], dtype=torch.float64))
    assert abs((mask == 0).double().mean().item() - p) < BOUND * (p * (1 - p) / mask.numel()) ** 0.5


def test_rates_of_zero_and_one():
    ones = torch.ones(2, 8)
    assert torch.equal(mask_of(nn.Dropout(0.0), (2, 8), Key(0), torch.float32), ones)
    assert torch.equal(mask_of(nn.Dropout(1.0), (2, 8), Key(0), torch.float32), 0 * ones)
    assert torch.equal(mask_of(nn.AlphaDropout(1.0), (2, 8), Key(0), torch.float32), 0 * ones)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_dtype_and_a_small_rate(dtype):
    p, number = 0.001, 1_000_000  # half-precision uniforms would be zero far too often
    mask = mask_of(nn.Dropout(p), (1, number), Key(0), dtype)
    assert mask.dtype == dtype
    assert abs((mask == 0).double().mean().item() - p) < BOUND * (p * (1 - p) / number) ** 0.5


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Dropout1d(0.4), (3, 64, 5)),
        (nn.Dropout2d(0.4), (3, 64, 5, 2)),
        (nn.Dropout3d(0.4), (3, 64, 2, 3, 2)),
        (nn.FeatureAlphaDropout(0.4), (3, 64, 5, 2)),
    ],
)
def test_channel_dropout_drops_whole_channels(layer, shape):
    for key in (None, Key(0)):
        mask = mask_of(layer, shape, key).flatten(2)
        assert torch.equal(mask[..., :1].expand_as(mask), mask)
        channels = mask[..., 0]
        assert len(channels.unique()) == 2
        same = bool((channels[0] == channels[1]).all())
        assert same == (key is not None)  # a draw has one mask, a fresh pass one per example


@pytest.mark.parametrize("p", [0.05, 0.3, 0.8])
def test_alpha_dropout_keeps_mean_and_variance(p):
    layer = DropoutSite("", p, alpha=True)
    x = torch.tensor([-1.0, 1.0], dtype=torch.float64)  # mean zero, variance one
    kept = layer._combine(x, torch.ones(2, dtype=torch.float64))
    dropped = layer._combine(x, torch.zeros(2, dtype=torch.float64))
    mean = (1 - p) * kept.mean() + p * dropped.mean()
    variance = (1 - p) * kept.square().mean() + p * dropped.square().mean() - mean**2
    assert mean.item() == pytest.approx(0, abs=1e-12)
    assert variance.item() == pytest.approx(1, abs=1e-12)


def test_alpha_dropout_has_the_values_of_torch():
    ones = torch.ones(1000, dtype=torch.float64)
    ours = mask_of(nn.AlphaDropout(0.3), (1, 1000), Key(0)).unique()
    torch.testing.assert_close(ours, F.alpha_dropout(ones, 0.3, training=True).unique(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("width", [6, 5000], ids=["from a shared block", "from its own generator"])
def test_draws_are_independent(width):
    number = 20_000 // width + 2
    posterior = convert(nn.Sequential(nn.Dropout(0.5)), MCDropout())
    for keys in ([Key(0, i) for i in range(number)], [Key(i) for i in range(number)]):
        masks = posterior.evaluate(torch.ones(1, width), keys)
        assert abs(masks.mean().item() - 1) < BOUND / masks.numel() ** 0.5
        assert_uncorrelated(masks[1:], masks[:-1])


def test_sites_are_independent():
    posterior = convert(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), MCDropout())
    ones = torch.ones(1, 20_000)
    p = Pass("draw", (Key(0),), rows=1)
    with posterior.patched(posterior.patch(p)):
        assert_uncorrelated(posterior.network[0](ones), posterior.network[1](ones))


def test_a_layer_used_twice_has_two_masks():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, x):
            return torch.stack([self.dropout(x), self.dropout(x)], 1)

    draw = convert(Twice(), MCDropout()).draw(0)
    once, twice = draw(torch.ones(1, 20_000))[0]
    assert_uncorrelated(once, twice)
    assert torch.equal(draw(torch.ones(3, 20_000))[2], torch.stack([once, twice]))


def test_fresh_passes_are_independent_over_examples_and_passes():
    posterior = convert(nn.Sequential(nn.Dropout(0.5)), MCDropout())
    ones = torch.ones(4, 10_000)
    once, again = posterior(ones), posterior(ones)
    assert_uncorrelated(once, again)
    assert_uncorrelated(once[:-1], once[1:])
