"""Kinds of layers and networks: a draw is the plain network with the draw's weights and masks."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayesify import MCDropout, convert
from tests.laws.networks import METHODS, configurations, placed, spread


@pytest.fixture(params=sorted(configurations()))
def method(request):
    return configurations()[request.param]


@pytest.mark.parametrize("name", ["map", "swag", "deep-ensemble", "mc-dropout"])
def test_a_bare_layer(name):
    layer = nn.Linear(4, 3).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    posterior = convert(layer, METHODS[name])
    assert posterior.conversion.rows[0].name == ""
    if name == "deep-ensemble":
        with posterior.member(1):
            tensors = placed(posterior)
            torch.testing.assert_close(posterior(x), F.linear(x, tensors["weight"], tensors["bias"]))
    else:
        with posterior.mean():
            torch.testing.assert_close(posterior(x), layer(x))


def test_a_bare_dropout():
    posterior = convert(nn.Dropout(0.5), MCDropout())
    out = posterior.draw(0)(torch.ones(3, 50))
    assert set(out.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(out[0], out[2])


class Functional(nn.Module):
    """Layers that forward uses as it likes, some of them twice, some through their weights."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.ModuleList([nn.Linear(4, 4)])})
        self.scale = nn.Parameter(torch.ones(4))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x, *, factor=1.0):
        h = F.relu(self.layers["a"](x)) * self.scale
        h = self.dropout(h) + self.layers["b"][0](self.layers["a"](h))
        return {"logits": F.linear(h, self.layers["a"].weight) * factor}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 5, 2, batch_first=True, dropout=0.3, bidirectional=True)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(10, 3)

    def forward(self, x):
        return self.head(self.dropout(self.lstm(x)[0][:, -1]))


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.dropout(self.attention(x, x, x)[0]).mean(1))


class Encoder(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(4, 3)
        self.batch_first = batch_first

    def forward(self, x):
        h = self.encoder(x) if self.batch_first else self.encoder(x.transpose(0, 1)).transpose(0, 1)
        return self.head(h.mean(1))


KINDS = {
    "functional": (Functional, (3, 4)),
    "lstm": (Recurrent, (3, 6, 4)),
    "attention": (Attends, (3, 6, 4)),
    "encoder": (lambda: Encoder(True), (3, 6, 4)),
    "encoder, time first": (lambda: Encoder(False), (3, 6, 4)),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_draws_of_weights_are_the_network_with_those_weights(kind):
    make, shape = KINDS[kind]
    plain = make().double().eval()
    x = torch.randn(shape, dtype=torch.float64)
    for name in ("swag", "deep-ensemble"):
        posterior = spread(convert(plain, METHODS[name]))
        outs = []
        for key in posterior.keys(2, 0):
            with posterior.drawn(key):
                tensors = placed(posterior)
                assert set(tensors) == {parameter for parameter, _ in plain.named_parameters()}
                naive = copy.deepcopy(plain)
                naive.load_state_dict(tensors)
                outs.append(posterior.outputs(x))
                torch.testing.assert_close(outs[-1], posterior.read(naive(x)), rtol=1e-12, atol=1e-12)
        assert (outs[0] - outs[1]).abs().max() > 1e-4


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_everywhere_has_an_effect_and_a_mean(kind):
    make, shape = KINDS[kind]
    plain = make().double().eval()
    x = torch.randn(shape, dtype=torch.float64)
    for method in (MCDropout(), MCDropout(p=0.5, insert_before="linear")):
        posterior = convert(plain, method)
        with posterior.mean():
            torch.testing.assert_close(posterior.outputs(x), posterior.read(plain(x)), rtol=1e-12, atol=1e-12)
        for name in posterior.conversion.converted:
            alone = convert(plain, method, include=name)
            first, second = (alone.read(alone.draw(seed)(x)) for seed in (0, 1))
            assert (first - second).abs().max() > 1e-6, name


def test_dropout_inside_fused_layers_is_in_the_table():
    reasons = {row.name: row.reason for row in convert(Recurrent(), MCDropout()).conversion.rows}
    assert reasons["lstm"] == "its own dropout of 0.3 is inside a fused kernel, and stays off"
    reasons = {row.name: row.reason for row in convert(Attends(), MCDropout()).conversion.rows}
    assert "0.2 is inside a fused kernel" in reasons["attention"]


# -- convolutions -------------------------------------------------------------------------------------------------

OPTIONS = {"kernel_size": 3, "stride": 2, "dilation": 2, "groups": 2, "padding": 3}
PADDINGS = ("zeros", "reflect", "replicate", "circular")
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS = [
    *((kind, {**OPTIONS, "padding_mode": mode}) for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d) for mode in PADDINGS),
    (nn.Conv2d, {"kernel_size": 3, "padding": "same", "dilation": 2}),
    (nn.Conv2d, {"kernel_size": 3, "padding": "valid", "bias": False}),
    *((kind, {**OPTIONS, "output_padding": 1}) for kind in TRANSPOSED),
]


@torch.no_grad()
@pytest.mark.parametrize(("kind", "options"), CONVOLUTIONS)
def test_convolutions(kind, options, method):
    """Each draw is the convolution with the draw's weights on the input with the draw's mask."""
    plain = kind(8, 4, **options).double()
    dimensions = int(kind.__name__[-2])
    x = torch.randn(2, 8, *(7, 8, 9)[:dimensions], dtype=torch.float64)
    transposed = plain.transposed
    if method.name == "abnn" or (method.name == "mc-dropout" and transposed):
        with pytest.raises(ValueError, match="found nothing to convert"):
            convert(plain, method)
        return
    posterior = spread(convert(plain, method))
    for key in posterior.keys(2, 0):
        with posterior.drawn(key):
            out = posterior(x)
            naive = copy.deepcopy(plain)
            naive.load_state_dict(placed(posterior), strict=False)
            mask = 1.0
            if method.name == "mc-dropout":
                (site,) = posterior.law.places
                mask = site.act(posterior.present(2), torch.ones_like(x))
                flat = mask.flatten(2)
                assert torch.equal(flat, flat[:1, :, :1].expand_as(flat))
        torch.testing.assert_close(out, naive(x * mask), rtol=1e-12, atol=1e-12)


def test_an_images_colours_are_not_dropped():
    posterior = convert(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)), MCDropout(p=0.1, insert_before="conv"))
    assert [(row.name, row.converted) for row in posterior.conversion.rows] == [("0", False), ("1", True)]
    assert posterior.conversion.rows[0].reason == "3 input channels are too few to drop whole ones"
