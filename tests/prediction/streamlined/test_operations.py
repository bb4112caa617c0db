"""Operations that real networks call, in float64: against the Jacobian, closed forms, loops, and draws.

Draws are those of `test_rules`: 200,000, within six standard errors. Where a rule only matches moments, the tolerance
is stated beside it.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from bayesify.prediction.streamlined import Moments, NoRuleError
from bayesify.prediction.streamlined.moments import Settings, using
from tests.prediction.streamlined.test_rules import EXACT, agrees, drawn, first_order, randn, random

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # of the references' vmap
X = random(3, 4, 6)
IMAGE = random(2, 3, 5, 4)
WEIGHT = randn(6, 5)
INDEX = torch.tensor([[[0, 2, 1, 3, 3, 0]], [[1, 1, 1, 0, 2, 3]], [[3, 2, 1, 0, 0, 0]]])
FIRST = {
    "cumsum": (lambda x: x.cumsum(1), X),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), X),
    "logsumexp of two": (lambda x: x.logsumexp((1, 2), keepdim=True), X),
    "normalize": (lambda x: functional.normalize(x, dim=-1), X),
    "normalize channels": (functional.normalize, IMAGE),
    "length": (lambda x: x.norm(dim=-1, keepdim=True), X),
    "vector norm": (lambda x: torch.linalg.vector_norm(x, dim=1), X),
    "largest of sizes": (lambda x: torch.linalg.vector_norm(x, float("inf"), dim=-1), X),
    "max": (lambda x: x.max(-1).values, X),
    "min, places": (lambda x: x.gather(1, torch.min(x, 1, keepdim=True).indices), X),
    "max with a number": (lambda x: torch.max(x, torch.zeros((), dtype=x.dtype)), X),
    "topk": (lambda x: x.topk(2, dim=1).values, X),
    "sort": (lambda x: x.sort(-1, descending=True).values, X),
    "logsigmoid": (functional.logsigmoid, X),
    "softsign": (functional.softsign, X),
    "comparison and where": (lambda x: torch.where(x > 0.2, x.square(), 0.1 * x), X),
    "comparison as a factor": (lambda x: (x.abs() >= 0.5).double() * x, X),
    "scatter": (lambda x: X.centre.scatter(1, INDEX, 2 * x[:, 1:2]), X),
    "scatter a number": (lambda x: x.scatter(1, INDEX, 3.0), X),
    "scatter add": (lambda x: torch.zeros(3, 4, 6).double().scatter_add(1, INDEX, x[:, 1:2]), X),
    "index add": (lambda x: x.index_add(1, torch.tensor([1, 1]), randn_fixed, alpha=2), X),
    "variance": (lambda x: x.var(-1), X),
    "standard deviation": (lambda x: x.std((1, 2), unbiased=False, keepdim=True), X),
    "variance and mean": (lambda x: torch.stack(torch.var_mean(x, -1, correction=0)), X),
    "einsum, linear": (lambda x: torch.einsum("btd,de->bte", x, WEIGHT), X),
    "einsum, one": (lambda x: torch.einsum("b t d -> d b", x), X),
    "einsum, dots": (lambda x: torch.einsum("...d,ed->...e", x, WEIGHT.T), X),
    "einsum, outer": (lambda x: torch.einsum("btd,k->bkt", x, WEIGHT[0]), X),
    "einsum, implicit": (lambda x: torch.einsum("btd,bte", x, X.centre), X),
    "triangle": (torch.tril, X),
    "bilinear": (lambda x: functional.interpolate(x, size=(7, 3), mode="bilinear", align_corners=False), IMAGE),
    "corners": (lambda x: functional.interpolate(x, size=(8, 9), mode="bilinear", align_corners=True), IMAGE),
    "bicubic": (lambda x: functional.interpolate(x, scale_factor=(2, 1.5), mode="bicubic"), IMAGE),
    "antialiased": (lambda x: functional.interpolate(x, size=(3, 2), mode="bilinear", antialias=True), IMAGE),
    "area": (lambda x: functional.interpolate(x, size=(3, 2), mode="area"), IMAGE),
    "linear in time": (lambda x: functional.interpolate(x, scale_factor=2, mode="linear"), X),
    "uneven windows": (lambda x: functional.adaptive_avg_pool2d(x, (3, None)), IMAGE),
    "windows at the border": (lambda x: functional.avg_pool2d(x, 2, 2, ceil_mode=True), IMAGE),
    "windows without padding": (lambda x: functional.avg_pool2d(x, 3, 2, 1, count_include_pad=False), IMAGE),
    "even windows": (lambda x: functional.adaptive_avg_pool2d(x, (5, 2)), IMAGE),
}
randn_fixed = randn(3, 2, 6)


@pytest.mark.parametrize("name", FIRST)
def test_first_order_is_the_jacobian(name):
    function, x = FIRST[name]
    value, variance = first_order(function, x)
    with torch.no_grad(), using(Settings(first_order=True)):
        found = function(x)
    torch.testing.assert_close(found.centre, value, **EXACT)
    torch.testing.assert_close(found.variance, variance, **EXACT)


DRAWN = {
    "einsum, two random": (lambda x, y: torch.einsum("btd,bsd->bts", x, y), (random(2, 3, 4), random(2, 2, 4))),
    "einsum, random weight": (lambda x, w: torch.einsum("btd,hdk->bhtk", x, w), (random(2, 2, 3), random(2, 3, 2))),
    "einsum, lone indices": (lambda x, y: torch.einsum("bi,jk->bk", x, y), (random(2, 3), random(2, 2))),
    "bilinear layer": (functional.bilinear, (randn(2, 3), random(2, 4), random(2, 3, 4), random(2))),
    "sample variance": (lambda x: x.var(-1), (random(3, 6),)),
    "baddbmm": (lambda a, x, y: torch.baddbmm(a, x, y, alpha=2), (random(1, 2, 2), random(1, 2, 3), random(1, 3, 2))),
    "index copy": (lambda x, y: x.index_copy(0, torch.tensor([1]), y), (random(3, 2), random(1, 2))),
    "max of two": (torch.max, (random(3), random(3))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_exact_rules_are_draws(name):
    function, inputs = DRAWN[name]
    agrees(function(*inputs), function, *inputs)


def test_einsum_is_a_loop():
    """Var of sum_k a_ik b_jk, one output after the other, and the same through the rule of linear maps."""
    a, b = random(3, 4), random(2, 4)
    found = torch.einsum("ik,jk->ij", a, b)
    for i in range(3):
        for j in range(2):
            terms = [
                a.centre[i, k] ** 2 * b.variance[j, k] + a.variance[i, k] * (b.centre[j, k] ** 2 + b.variance[j, k])
                for k in range(4)
            ]
            torch.testing.assert_close(found.variance[i, j], sum(terms), **EXACT)
            torch.testing.assert_close(found.centre[i, j], (a.centre[i] * b.centre[j]).sum(), **EXACT)


def test_einsum_knows_what_positions_have_in_common():
    """Tokens that are alike, then a random weight, then their mean: the weight moves all of them together."""
    same, weight = randn(2, 1, 5).expand(2, 7, 5), random(5, 3)
    found = torch.einsum("btd,de->bte", same, weight).mean(1)
    torch.testing.assert_close(found.variance, same[:, 0].square() @ weight.variance, **EXACT)
    with pytest.raises(NoRuleError, match="einsum"):
        torch.einsum("ii->i", random(3, 3))


def test_channels_last_are_positions_too():
    """As in Swin: the mean over both sides of (B, H, W, C) is the mean over the pixels of (B, C, H, W)."""
    image, weight = randn(2, 5, 4, 4) + 1, random(3, 5)
    first = functional.conv2d(image, weight[..., None, None]).mean((2, 3))
    last = functional.linear(image.permute(0, 2, 3, 1), weight).mean((1, 2))
    torch.testing.assert_close(last.centre, first.centre, **EXACT)
    torch.testing.assert_close(last.variance, first.variance, **EXACT)
    uniform = Moments.make(weight.centre, torch.full((3, 5), 0.3, dtype=torch.float64))
    alike = image[:, :, :1, :1].expand_as(image).permute(0, 2, 3, 1)
    found = functional.linear(alike, uniform).mean((1, 2))
    torch.testing.assert_close(found.variance, alike[:, 0, 0].square() @ uniform.variance.T, **EXACT)


def test_running_sums_of_tokens_that_move_together():
    same, weight = randn(2, 1, 5).expand(2, 4, 5), random(3, 5)
    found = functional.linear(same, weight).cumsum(1)
    one = same[:, 0].square() @ weight.variance.T
    steps = torch.arange(1, 5, dtype=torch.float64).square()
    torch.testing.assert_close(found.variance, one[:, None] * steps[:, None], **EXACT)


def test_the_largest_of_two_is_clarks():
    x = random(4, 2)
    whole = torch.maximum(*(x[:, i] for i in range(2)))
    values, places = x.max(-1)
    torch.testing.assert_close(values.centre, whole.centre, **EXACT)
    torch.testing.assert_close(values.variance, whole.variance, **EXACT)
    assert torch.equal(places, x.centre.argmax(-1))
    assert torch.equal(x.argmax(-1), places)


def test_decisions_are_plain_and_those_of_the_means():
    x, y = random(5), random(5)
    for operation in (torch.gt, torch.le, torch.eq, torch.ne, torch.isclose):
        found = operation(x, y)
        assert type(found) is torch.Tensor
        assert torch.equal(found, operation(x.centre, y.centre))
    assert torch.equal(x > 0, x.centre > 0)
    assert torch.equal(x != 0, x.centre != 0)
    assert torch.equal(x > 2 * x, x.centre > 2 * x.centre)  # two functions of one tensor
    assert bool((x.square() >= 0).all())


def test_a_short_vector_is_divided_by_eps():
    x = Moments.make(torch.zeros(2, 3).double(), torch.zeros(2, 3).double())
    found = functional.normalize(x, dim=-1)
    assert torch.equal(found.centre, torch.zeros(2, 3).double())
    assert torch.equal(found.variance, torch.zeros(2, 3).double())


def test_what_is_written_is_written_there_alone():
    x = random(3, 4)
    mean, variance = x.centre.clone(), x.variance.clone()
    for made in (x + 1, -x, 1 - x):
        made.mul_(2)
        torch.testing.assert_close(made.variance, 4 * variance, **EXACT)
    assert torch.equal(x.centre, mean)
    assert torch.equal(x.variance, variance)
    wide = random(4) + torch.zeros(3, 4).double()  # one place of memory for three rows
    wide[1] = 2.0
    wide[0, :2] = x[0, :2]
    assert torch.equal(wide.variance[1], torch.zeros(4).double())
    assert torch.equal(wide.variance[0, :2], variance[0, :2])
    assert torch.equal(wide.centre[0, :2], mean[0, :2])
    assert bool((wide.variance[2] > 0).all())
    with pytest.raises(NoRuleError, match="not random"):
        torch.zeros(3, 4).double()[0] = x[0]


# -- recurrent layers -------------------------------------------------------------------------------------------------


def uncertain(module, variance):
    """Give every weight of a recurrent layer a variance, as a pass does."""
    flat = module._flat_weights
    module._flat_weights = [Moments.make(w.detach(), torch.full_like(w, variance).detach()) for w in flat]
    return module


LAYERS = {
    "lstm": lambda: nn.LSTM(3, 4, batch_first=True),
    "lstm, both ways, two layers": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "lstm, projected, no bias": lambda: nn.LSTM(3, 4, bias=False, proj_size=2),
    "gru, both ways": lambda: nn.GRU(3, 4, num_layers=2, bidirectional=True, batch_first=True),
    "rnn": lambda: nn.RNN(3, 4),
    "rnn, relu": lambda: nn.RNN(3, 4, nonlinearity="relu"),
}


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_recurrent_layers_without_variance_are_torchs(name):
    torch.manual_seed(0)
    module = LAYERS[name]().double().eval()
    x = randn(5, 2, 3)
    expected, state = module(x)
    found, again = uncertain(module, 0.0)(x)
    torch.testing.assert_close(found.centre, expected, **EXACT)
    assert float(found.variance.max()) < 1e-30
    for one, other in zip(*((s if isinstance(s, tuple) else (s,)) for s in (again, state)), strict=True):
        torch.testing.assert_close(one.centre, other, **EXACT)


def by_hand(kind, x, h, c, w_x, w_h, b_x, b_h):
    """Make a step of plain operations, which torch can do for many draws at once."""
    of_x, of_h = functional.linear(x, w_x, b_x), functional.linear(h, w_h, b_h)
    if kind == "gru":
        (r, z, n), (r_h, z_h, n_h) = of_x.chunk(3, -1), of_h.chunk(3, -1)
        z = (z + z_h).sigmoid()
        return (1 - z) * (n + (r + r_h).sigmoid() * n_h).tanh() + z * h
    i, f, g, o = (of_x + of_h).chunk(4, -1)
    return o.sigmoid() * (f.sigmoid() * c + i.sigmoid() * g.tanh()).tanh()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lstm", "gru"])
@torch.no_grad()
def test_one_step_is_draws(kind):
    """Of weights with a variance of .005: means within .03 of a deviation, variances within 3 %."""
    torch.manual_seed(0)
    cell = {"lstm": nn.LSTMCell, "gru": nn.GRUCell}[kind](3, 4).double()
    step = {"lstm": torch.lstm_cell, "gru": torch.gru_cell}[kind]
    x, h, c = randn(2, 3), randn(2, 4), randn(2, 4)
    weights = [Moments.make(w.detach(), torch.full_like(w, 0.005).detach()) for w in cell.parameters()]
    made = step(x, (h, c) if kind == "lstm" else h, *weights)
    found = made[0] if kind == "lstm" else made
    mean, variance, _, _ = drawn(lambda *values: by_hand(kind, x, h, c, *values), *weights)
    assert float(((found.centre - mean) / variance.sqrt()).abs().max()) < 0.03
    assert float((found.variance / variance - 1).abs().max()) < 0.03


# -- parts of transformers --------------------------------------------------------------------------------------------


def rotated(x):
    """Return queries or keys turned by their positions, as Llama does."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] / 10 ** torch.arange(half, dtype=x.dtype)
    cos, sin = (f(angle).repeat(1, 2) for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def test_rotary_positions_are_linear():
    x = random(2, 2, 5, 4)
    value, variance = first_order(rotated, x)
    found = rotated(x)
    torch.testing.assert_close(found.centre, value, **EXACT)
    torch.testing.assert_close(found.variance, variance, **EXACT)


@pytest.mark.parametrize("way", ["enable_gqa", "expand"])
def test_grouped_attention_with_rotated_queries(way):
    """Two heads share a head of values: exact in the value weights, at the means of queries and keys."""
    x, q, k, weight = randn(2, 5, 12), randn(2, 4, 5, 2), randn(2, 2, 5, 2), random(4, 12)

    def attend(weight):
        v = functional.linear(x, weight).view(2, 5, 2, 2).transpose(1, 2)
        if way == "enable_gqa":
            return functional.scaled_dot_product_attention(rotated(q), rotated(k), v, enable_gqa=True)
        wide = v[:, :, None].expand(2, 2, 2, 5, 2).reshape(2, 4, 5, 2)
        return functional.scaled_dot_product_attention(rotated(q), rotated(k).repeat_interleave(2, 1), wide)

    value, variance = first_order(attend, weight)
    found = attend(weight)
    torch.testing.assert_close(found.centre, value, **EXACT)
    if way == "enable_gqa":
        torch.testing.assert_close(found.variance, variance, **EXACT)
    else:  # tokens are copied before they are mixed: what they have in common is one number for each example
        assert 0.5 < float(found.variance.sum() / variance.sum()) < 2


@pytest.mark.slow
def test_swiglu_is_draws():
    """silu(W x) (U x) with independent random weights of a variance of .02: variances within 3 %."""

    def gated(w, u):
        return functional.silu(functional.linear(x, w)) * functional.linear(x, u)

    x, w, u = randn(2, 4), random(3, 4, spread=0.02), random(3, 4, spread=0.02)
    found = gated(w, u)
    mean, variance, _, _ = drawn(gated, w, u)
    assert float(((found.centre - mean) / variance.sqrt()).abs().max()) < 0.02
    assert float((found.variance / variance - 1).abs().max()) < 0.03
