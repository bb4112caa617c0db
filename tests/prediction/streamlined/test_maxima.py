"""The largest of several random numbers, by Clark's formulas, and functions with straight pieces, in closed form."""

import math

import pytest
import torch
from torch.func import vmap
from torch.nn import functional

from bayesify.prediction.streamlined import Moments
from bayesify.prediction.streamlined.maxima import larger, largest

G = torch.Generator().manual_seed(0)
DRAWS = 200_000


def random(*shape):
    uniform = torch.rand(*shape, dtype=torch.float64, generator=G)
    return Moments.make(torch.randn(*shape, dtype=torch.float64, generator=G), 0.1 + uniform)


def drawn(x, function):
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(DRAWS, *x.shape, dtype=torch.float64, generator=generator)
    return vmap(function, chunk_size=20_000)(x.centre + x.variance.sqrt() * noise)


PAIRS = {
    "max_pool1d": (lambda x: functional.max_pool1d(x, 2), (1, 2, 6)),
    "max_pool1d, padded": (lambda x: functional.max_pool1d(x, 2, 1, 1), (1, 1, 6)),
    "max_pool2d": (lambda x: functional.max_pool2d(x, (1, 2)), (1, 2, 2, 4)),
    "dilated": (lambda x: functional.max_pool1d(x, 2, 1, 0, 2), (1, 2, 6)),
    "amax": (lambda x: x.amax(1), (4, 2)),
    "amin": (lambda x: x.amin(-1, keepdim=True), (4, 2)),
    "maximum": (lambda x: torch.maximum(x[0], x[1]), (2, 6)),
    "minimum": (lambda x: torch.minimum(x[0], x[1, :1]), (2, 6)),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.slow
def test_the_larger_of_two_is_exact(name):
    """Within six standard errors of the draws."""
    function, shape = PAIRS[name]
    x = random(*shape)
    draws = drawn(x, function)
    mean, variance = draws.mean(0), draws.var(0)
    fourth = ((draws - mean) ** 4).mean(0)
    found = function(x)
    assert ((found.centre - mean).abs() <= 6 * (variance / DRAWS).sqrt()).all()
    assert ((found.variance - variance).abs() <= 6 * ((fourth - variance**2) / DRAWS).sqrt()).all()


WINDOWS = {
    "2 x 2": (lambda x: functional.max_pool2d(x, 2), (1, 2, 4, 4), 0.05, 0.2),
    "3 x 3, as in ResNets": (lambda x: functional.max_pool2d(x, 3, 2, 1), (1, 1, 6, 6), 0.05, 0.25),
    "ceil mode": (lambda x: functional.max_pool2d(x, 2, 2, ceil_mode=True), (1, 2, 3, 3), 0.05, 0.2),
    "2 x 2 x 2": (lambda x: functional.max_pool3d(x, 2), (1, 2, 2, 2, 4), 0.05, 0.25),
    "adaptive": (lambda x: functional.adaptive_max_pool2d(x, (2, 1)), (1, 2, 4, 2), 0.05, 0.25),
    "amax of eight": (lambda x: x.amax(1), (2, 8), 0.05, 0.25),
    "amax over two": (lambda x: x.amax((1, 2)), (3, 2, 4), 0.05, 0.25),
    "amax of 49": (lambda x: x.amax(1), (1, 49), 0.1, 0.35),
}


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.slow
def test_the_largest_of_many_is_close(name):
    """The larger of two is not Gaussian: means within .05 standard deviations, variances within a quarter.

    To first order, means would be off by up to .7 and variances by half.
    """
    function, shape, of_mean, of_variance = WINDOWS[name]
    x = random(*shape)
    draws = drawn(x, function)
    found = function(x)
    assert found.shape == draws.shape[1:]
    assert ((found.centre - draws.mean(0)).abs() <= of_mean * draws.std(0)).all()
    assert ((found.variance / draws.var(0)).log().abs() <= -math.log(1 - of_variance)).all()


def test_positions_with_a_common_part():
    """Entries that move together entirely: the largest moves as they do."""
    x = Moments.make(torch.randn(2, 1, 4, 4, generator=G).double(), torch.full((2, 1, 4, 4), 0.3).double())
    x.shared = torch.ones(2).double()
    found = functional.max_pool2d(x, 2)
    torch.testing.assert_close(found.centre, functional.max_pool2d(x.centre, 2))
    torch.testing.assert_close(found.variance, torch.full_like(found.centre, 0.3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_apart_or_without_variance(dtype):
    one = torch.tensor([1e3, 5.0, 0.0, 1.0], dtype=dtype), torch.tensor([1e-2, 0.0, 0.0, 2.0], dtype=dtype)
    other = torch.tensor([-1e30, -5.0, 0.0, 1e30], dtype=dtype), torch.tensor([0.0, 0.0, 0.0, 0.5], dtype=dtype)
    expected = torch.tensor([1e3, 5.0, 0.0, 1e30], dtype=dtype), torch.tensor([1e-2, 0.0, 0.0, 0.5], dtype=dtype)
    for found in (larger(one, other), larger(other, one)):
        torch.testing.assert_close(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=1e-12)
    mean, variance = largest(torch.zeros(300, 1, dtype=dtype), torch.ones(300, 1, dtype=dtype))
    assert 2.5 < float(mean) < 3.2
    assert float(variance) > 0.05


STRAIGHT = {
    "leaky": lambda x: functional.leaky_relu(x, 0.2),
    "steeper below": lambda x: functional.leaky_relu(x, 1.5),
    "prelu": lambda x: functional.prelu(x, torch.tensor([-0.3]).double()),
    "abs": torch.abs,
    "clamp": lambda x: x.clamp(-0.5, 0.7),
    "clamp from below": lambda x: x.clamp(min=0.3),
    "clamp from above": lambda x: torch.clamp_max(x, 0.3),
    "hardtanh": functional.hardtanh,
    "relu6": functional.relu6,
    "hardsigmoid": functional.hardsigmoid,
    "softshrink": functional.softshrink,
    "minimum with a number": lambda x: torch.minimum(torch.tensor(0.25).double(), x),
}


@pytest.mark.parametrize("name", [*STRAIGHT, "maximum with a number"])
@pytest.mark.slow
def test_straight_pieces_are_exact(name):
    """Against a fine grid of the standard normal."""
    means = torch.tensor([-40.0, -4, -3, -1.2, -0.5, 0, 0.3, 0.6, 2.5, 5, 7, 40]).double()
    mean, variance = torch.cartesian_prod(means, torch.logspace(-3, 1.5, 4).double()).unbind(-1)
    z = torch.linspace(-10, 10, 60_001, dtype=torch.float64)
    weights = torch.exp(-z.square() / 2)
    weights = weights / weights.sum()
    if name == "maximum with a number":
        values = torch.maximum(mean[:, None] + variance.sqrt()[:, None] * z, torch.tensor(0.4).double())
        found = torch.maximum(Moments.make(mean, variance), torch.full_like(mean, 0.4))
    else:
        values = STRAIGHT[name](mean[:, None] + variance.sqrt()[:, None] * z)
        found = STRAIGHT[name](Moments.make(mean, variance))
    first = values @ weights
    second = (values - first[:, None]).square() @ weights
    torch.testing.assert_close(found.centre, first, rtol=1e-7, atol=1e-6)
    assert ((found.variance - second).abs() <= 1e-7 * variance).all()  # of the grid
