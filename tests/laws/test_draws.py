"""A draw is one function: on any input, in any batch, alone or together with others."""

import pytest
import torch
from torch import nn

from bayesify import MCDropout, convert
from bayesify.laws import Key, ShapeError
from tests.laws.networks import Attention, TimeFirst, Windows, mlp

KEYS = [Key(5, index) for index in range(4)]
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def inputs_for(network, rows):
    torch.manual_seed(rows)
    shape = (rows, 4) if isinstance(network, nn.Sequential) else (rows, 6, 6)
    return torch.randn(shape, dtype=torch.float64)


def image_network():
    layers = [nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout2d(0.5), nn.Conv2d(6, 4, 2), nn.Dropout(0.3)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 3)).double().eval()


@pytest.mark.parametrize("make", [mlp, TimeFirst, Windows, Attention])
def test_a_draw_is_the_same_function_in_every_batch(make):
    posterior = convert(make(), MCDropout())
    x = inputs_for(posterior.network, 12)  # the lengths 6 and 3 x 2 divide, equal and exceed some of the batch sizes
    draw = posterior.draw(seed=1)
    alone = torch.cat([draw(row[None]) for row in x])
    assert alone.std(0).min() > 0
    for size in (2, 3, 4, 6, 12):
        torch.testing.assert_close(torch.cat([draw(part) for part in x.split(size)]), alone, **EXACT)
    other = posterior.draw(seed=2)(x)
    assert (other - alone).abs().min() > 1e-6


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 7])
@pytest.mark.parametrize("make", [mlp, TimeFirst, Windows, image_network])
def test_folded_tiled_and_looped_agree(make, rows):
    posterior = convert(make(), MCDropout())
    x = (
        torch.randn(rows, 2, 5, 5, dtype=torch.float64)
        if make is image_network
        else inputs_for(posterior.network, rows)
    )
    looped = torch.cat([posterior.evaluate(x, [key]) for key in KEYS])
    torch.testing.assert_close(posterior.evaluate(x, KEYS), looped, **EXACT)
    torch.testing.assert_close(posterior.evaluate(x, KEYS, tiled=True), looped, **EXACT)
    with posterior.drawn(*KEYS):
        torch.testing.assert_close(posterior(x), looped.flatten(0, 1), **EXACT)
    assert (looped[0] - looped[1]).abs().max() > 1e-3


def test_the_layout_does_not_depend_on_the_batch_that_comes_first():
    network = TimeFirst()
    x = inputs_for(network, 6)  # T = B = 6: the shape alone does not tell
    one, other = convert(network, MCDropout()), convert(network, MCDropout())
    other.draw(0)(x[:1])
    torch.testing.assert_close(one.draw(0)(x), other.draw(0)(x), **EXACT)


class Positions(nn.Module):
    """Dropout on something that has no batch dimension."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(6, 6))
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(6, 3)
        self.double().eval()

    def forward(self, x):
        return self.head((x + self.dropout(self.positions)).tanh().mean(1))


def test_noise_on_something_without_a_batch():
    posterior = convert(Positions(), MCDropout())
    x = inputs_for(posterior.network, 6)
    draw = posterior.draw(0)
    together = draw(x)
    for size in (1, 2, 3):
        torch.testing.assert_close(torch.cat([draw(part) for part in x.split(size)]), together, **EXACT)
    assert posterior.law.together(posterior.trace(x)) == "one"
    with pytest.raises(ShapeError, match="'dropout' acts on something without a batch"):
        posterior.evaluate(x, KEYS)
    assert torch.isfinite(posterior(x[:5])).all()  # a fresh pass needs to know no layout


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # which the plain network uses
def test_an_encoder_in_evaluation_mode_does_not_skip_dropout():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    network = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()
    posterior = convert(network, MCDropout())
    x = torch.randn(3, 5, 8)
    padding = torch.tensor([[False] * 5, [False] * 4 + [True], [False] * 2 + [True] * 3])
    with torch.no_grad():  # without gradients torch would take a fused kernel that knows no dropout
        plain = network(x, src_key_padding_mask=padding)
        first, second = (posterior.draw(seed)(x, src_key_padding_mask=padding) for seed in (0, 1))
        with posterior.mean():
            mean = posterior(x, src_key_padding_mask=padding)
    assert (first - second)[~padding].abs().max() > 0.1
    torch.testing.assert_close(mean[~padding], plain[~padding])


def test_autocast():
    posterior = convert(mlp().float(), MCDropout())
    x = torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = posterior.draw(0)(x)
        folded = posterior.evaluate(x, KEYS)
    assert out.dtype == folded.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), posterior.draw(0)(x), rtol=0.05, atol=0.05)


def test_an_output_without_the_batch_first_is_an_error():
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, x):
            return self.dropout(x).sum(0)

    with pytest.raises(ShapeError, match="first output dimension must be the batch"):
        convert(Wrong(), MCDropout()).evaluate(torch.randn(3, 4), [Key(0)])
