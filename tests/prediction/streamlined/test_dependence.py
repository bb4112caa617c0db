"""Activations that are functions of the same random numbers: what a network writes out by hand has one joint rule.

Moments are compared in float64 with closed forms, with the rule of the same function in one piece, and with 200,000
draws. Three nodes are exact for polynomials of a low degree; of smooth functions they have totals within 5 %.
"""

import math

import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.nn import functional

from bayesify import BayesAdapter, Gaussian, Streamlined, convert, export, predict
from bayesify.prediction.streamlined import Moments
from bayesify.prediction.streamlined.moments import Settings, using

EXACT = {"rtol": 1e-9, "atol": 1e-12}
G = torch.Generator().manual_seed(0)
DRAWS = 200_000


def random(*shape):
    uniform = torch.rand(*shape, dtype=torch.float64, generator=G)
    return Moments.make(torch.randn(*shape, dtype=torch.float64, generator=G), 0.1 + uniform)


X = random(3, 8)
M, V = X.centre, X.variance
CONSTANT, D = torch.randn(2, 8, dtype=torch.float64, generator=G)

POLYNOMIALS = {
    "x + x": (lambda x: x + x, 2 * M, 4 * V),
    "x - x": (lambda x: x - x, 0 * M, 0 * V),
    "x * x": (lambda x: x * x, M**2 + V, 2 * V**2 + 4 * M**2 * V),
    "x / x": (lambda x: x / x, torch.ones_like(M), 0 * V),
    "2 x - x / 2 + c": (lambda x: 2 * x - x / 2 + CONSTANT, 1.5 * M + CONSTANT, 2.25 * V),
    "c x + x d": (lambda x: CONSTANT * x + x * D, (CONSTANT + D) * M, (CONSTANT + D) ** 2 * V),
    "1 - x, with x": (lambda x: (1 - x) + x, torch.ones_like(M), 0 * V),
    "subtracted with a factor": (lambda x: torch.sub(x, x, alpha=3), -2 * M, 4 * V),
    "a square's difference": (lambda x: x * x - x.square(), 0 * M, 0 * V),
    "x + x^2": (lambda x: torch.addcmul(x, x, x), M + M**2 + V, (1 + 2 * M) ** 2 * V + 2 * V**2),
    "in place": (lambda x: x.clone().add_(x), 2 * M, 4 * V),
    "in place, of a product": (lambda x: (1.0 * x).mul_(x), M**2 + V, 2 * V**2 + 4 * M**2 * V),
    "views": (lambda x: (x.view(3, 2, 4) + x.reshape(3, 2, 4)).flatten(1), 2 * M, 4 * V),
    "transposed twice": (lambda x: x.t().contiguous().t() - x, 0 * M, 0 * V),
    "slices": (
        lambda x: torch.cat([x[:, :3] + x[:, :3], x.split([3, 5], 1)[1] - x[:, 3:]], 1),
        torch.cat([2 * M[:, :3], 0 * M[:, 3:]], 1),
        torch.cat([4 * V[:, :3], 0 * V[:, 3:]], 1),
    ),
}


@pytest.mark.parametrize("name", POLYNOMIALS)
def test_a_tensor_is_not_independent_of_itself(name):
    function, mean, variance = POLYNOMIALS[name]
    found = function(X)
    torch.testing.assert_close(found.centre, mean, **EXACT)
    torch.testing.assert_close(found.variance, variance, **EXACT)


def by_hand_gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


BY_HAND = {
    "silu": (lambda x: x * torch.sigmoid(x), functional.silu),
    "silu, as a quotient": (lambda x: x / (1 + torch.exp(-x)), functional.silu),
    "silu, in place": (lambda x: (x * 1).mul_(torch.sigmoid(x)), functional.silu),
    "silu, sigmoid in other shape": (
        lambda x: (x[:, None] * torch.sigmoid(x).unsqueeze(1)).squeeze(1),
        functional.silu,
    ),
    "gelu": (by_hand_gelu, lambda x: functional.gelu(x, approximate="tanh")),
    "mish": (lambda x: x * torch.tanh(functional.softplus(x)), functional.mish),
    "hard swish": (lambda x: x * functional.relu6(x + 3) / 6, functional.hardswish),
    "tanhshrink": (lambda x: x - torch.tanh(x), functional.tanhshrink),
}


@pytest.mark.parametrize("first_order", [False, True])
@pytest.mark.parametrize("name", BY_HAND)
def test_written_by_hand_is_as_in_one_piece(name, first_order):
    by_hand, whole = BY_HAND[name]
    with using(Settings(first_order=first_order)):
        found, expected = by_hand(X), whole(X)
    torch.testing.assert_close(found.centre, expected.centre, **EXACT)
    torch.testing.assert_close(found.variance, expected.variance, **EXACT)


@pytest.mark.parametrize("name", [*BY_HAND, "x * x", "x + x^2"])
@pytest.mark.slow
def test_close_to_draws(name):
    """Means within .05 of a standard deviation of x and totals within 5 %, of which draws take 1 % for themselves."""
    function = (BY_HAND.get(name) or POLYNOMIALS[name])[0]
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(DRAWS, 1, 8, dtype=torch.float64, generator=generator)
    draws = vmap(function)(M[:1] + V[:1].sqrt() * noise)
    found = function(Moments.make(M[:1], V[:1]))
    assert ((found.centre - draws.mean(0)).abs() <= 0.05 * V[:1].sqrt()).all()
    assert (found.variance.sum() / draws.var(0).sum() - 1).abs() <= 0.05


def test_other_entries_stay_independent():
    """The halves of a gated unit, other rows, and what a linear map made of x."""
    one, other = X.chunk(2, -1)
    found = one + other
    torch.testing.assert_close(found.variance, V[:, :4] + V[:, 4:], **EXACT)
    torch.testing.assert_close((X + X.flip(0)).variance, V + V.flip(0), **EXACT)
    square = random(4, 4)
    torch.testing.assert_close((square + square.t()).variance, square.variance + square.variance.t(), **EXACT)
    weight = torch.randn(8, 8, dtype=torch.float64, generator=G)
    mapped = functional.linear(X, weight)
    torch.testing.assert_close((X + mapped).variance, V + V @ weight.square().T, **EXACT)


def test_what_was_written_into_is_another_tensor():
    x = random(4)
    mean, variance = x.centre.clone(), x.variance.clone()
    before = 3 * x
    x.mul_(2)
    found = x + before  # 5 x, if that were still known
    torch.testing.assert_close(found.centre, 5 * mean, **EXACT)
    torch.testing.assert_close(found.variance, (4 + 9) * variance, **EXACT)
    torch.testing.assert_close((x + x).variance, 16 * variance, **EXACT)
    part = x[:2]
    after = 2 * x
    part.add_(1)
    torch.testing.assert_close((after - 2 * x).centre, torch.tensor([-2.0, -2.0, 0, 0]).double(), **EXACT)


def test_a_long_chain_ends():
    """y -> y + tanh y, thirty times over: what is composed stays short, and the moments finite."""
    y = X
    for _ in range(30):
        y = y + torch.tanh(y)
    assert y.variance.isfinite().all()
    assert (y.variance > 0).all()


class Swish(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)


@pytest.mark.slow
def test_in_a_network_and_in_its_program(tmp_path):
    """A network with a hand-written SiLU predicts as with torch's, also as a program and in ONNX Runtime."""
    x = torch.randn(5, 4)

    def made(activation):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, 16), activation, nn.Linear(16, 1))
        posterior = convert(network, BayesAdapter(), likelihood=Gaussian(0.5))
        with torch.no_grad():
            for _, log_std in posterior.law.log_std.named_parameters():
                log_std.fill_(-1.0)
        return posterior

    posterior = made(Swish())
    found, expected = (predict(p, x, how=Streamlined(engine="moments")) for p in (posterior, made(nn.SiLU())))
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.epistemic, expected.epistemic)
    outputs = export(posterior, x, how=Streamlined(engine="moments")).module()(x)
    torch.testing.assert_close(outputs["epistemic"], expected.epistemic)
