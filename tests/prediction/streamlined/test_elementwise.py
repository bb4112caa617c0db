"""Classes of functions of single entries: what holds for every one of them, on grids of means and variances."""

import math

import pytest
import torch
from torch.nn import functional

from bayesify.prediction.streamlined import Moments, NoRuleError
from bayesify.prediction.streamlined.elementwise import is_pointwise
from bayesify.prediction.streamlined.moments import Settings, using

ACTIVATIONS = (
    *("celu", "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid", "mish"),
    *("relu", "relu6", "selu", "silu", "softplus", "softshrink", "softsign", "tanhshrink"),
)
OTHERS = {
    "power .5": lambda z: z**0.5,
    "power -1": lambda z: z**-1,
    "power -1.5": lambda z: z**-1.5,
    "power 3": lambda z: z**3,
    "power of two": lambda z: 2**z,
    "one over": lambda z: 1 / z,
    "prelu": lambda z: functional.prelu(z, torch.tensor(0.2, dtype=z.dtype)),
    "gelu tanh": lambda z: functional.gelu(z, approximate="tanh"),
    "clamp": lambda z: z.clamp(-0.3, 2.0),
    "clamp min": lambda z: z.clamp(min=0.4),
    "clamp max": lambda z: z.clamp(max=0.4),
    "polygamma": lambda z: torch.polygamma(1, z),
    "logit": lambda z: torch.logit(z),
    "product with a reciprocal": lambda z: z * (1 + z).reciprocal(),
    "quotient of itself": lambda z: z / (z - 0.25),
    "square root of its square": lambda z: (z * z).sqrt(),
    "logarithm times itself": lambda z: z * z.log(),
}


def unary_functions():
    """Return every function of one tensor that torch knows to act on single entries, and those above."""
    probe = torch.tensor([0.3, 0.6], dtype=torch.float64)
    found = {name: getattr(functional, name) for name in ACTIVATIONS}
    for place in (torch, torch.special):
        for name in sorted(set(dir(place))):
            function = getattr(place, name)
            if name.startswith("_") or name.endswith("_") or not callable(function) or not is_pointwise(function):
                continue
            try:
                value = function(probe)
            except Exception:
                continue
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == probe.shape:
                found.setdefault(name, function)
    return {**found, **OTHERS}


FUNCTIONS = unary_functions()
RANDOM = {"bernoulli", "rand_like", "randn_like", "dropout", "empty_like", "rrelu"}
NAMES = sorted(set(FUNCTIONS) - RANDOM)
GRID = torch.cartesian_prod(
    torch.tensor(
        [-50.0, -3.0, -1.0, -0.75, -0.5, -0.25, -1e-3, 0.0, 1e-3, 0.25, 0.5, 0.75, 1.0, 1.5, 3.0, 50.0]
    ).double(),
    torch.tensor([0.0, 1e-12, 1e-6, 1e-2, 0.5, 4.0, 100.0]).double(),
)


def has_derivative(name):
    x = torch.tensor([0.3, 0.6], dtype=torch.float64, requires_grad=True)
    try:
        FUNCTIONS[name](x).sum().backward()
    except RuntimeError:
        return False
    return True


def test_the_list_is_long():
    assert {"sqrt", "log", "rsqrt", "reciprocal", "tanh", "erf", "atanh", "lgamma", "exp"} <= set(NAMES)
    assert len(NAMES) > 70


WITHOUT_DERIVATIVE = {name for name in NAMES if not has_derivative(name)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("first_order", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_finite_wherever_the_function_is(name, first_order, dtype):
    """No node that leaves a domain makes a moment NaN or infinite, and no variance is negative."""
    mean, variance = GRID.to(dtype).unbind(-1)
    inside = FUNCTIONS[name](mean).isfinite()
    if first_order and name in WITHOUT_DERIVATIVE:
        with using(Settings(first_order=True)), pytest.raises(NoRuleError, match="no derivative"):
            FUNCTIONS[name](Moments.make(mean, variance))
        return
    with using(Settings(first_order=first_order)):
        found = FUNCTIONS[name](Moments.make(mean, variance))
    assert found.centre[inside].isfinite().all(), mean[inside & ~found.centre.isfinite()]
    assert found.variance[inside].isfinite().all(), GRID[inside & ~found.variance.isfinite()]
    assert (found.variance[inside] >= 0).all()
    still = inside & (variance == 0)
    value = FUNCTIONS[name](mean)[still]
    # torch may round one number in two ways, depending on where it lies.
    size = torch.maximum(value.abs(), mean[still].abs())
    assert (found.variance[still] <= (4 * torch.finfo(dtype).eps * size).square()).all()
    torch.testing.assert_close(found.centre[still], value)


POLES = ["reciprocal", "power -1", "power -1.5", "rsqrt", "sqrt", "log", "power .5", "log2", "tan", "digamma"]


@pytest.mark.parametrize("name", POLES)
def test_first_order_beyond_the_domain(name):
    """At mean 1 and variance .5 a node lies outside of the domain, or behind the pole."""
    x = Moments.make(torch.ones(1).double(), torch.full((1,), 0.8).double())
    found = FUNCTIONS[name](x)
    with using(Settings(first_order=True)):
        expected = FUNCTIONS[name](x)
    torch.testing.assert_close(found.centre, expected.centre)
    torch.testing.assert_close(found.variance, expected.variance)


def test_three_nodes_where_they_fit():
    x = Moments.make(torch.full((1,), 4.0).double(), torch.full((1,), 0.5).double())
    nodes = 4 + math.sqrt(1.5) * torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    weights = torch.tensor([1.0, 4.0, 1.0], dtype=torch.float64) / 6
    for name in ("sqrt", "log", "reciprocal"):
        values = FUNCTIONS[name](nodes)
        mean = (weights * values).sum()
        found = FUNCTIONS[name](x)
        torch.testing.assert_close(found.centre[0], mean)
        torch.testing.assert_close(found.variance[0], (weights * (values - mean).square()).sum())


# GELU has another rule in double precision; torch's own values of the others are rough in single precision.
ROUGH = {
    "gelu",
    "airy_ai",
    "bessel_j0",
    "bessel_j1",
    "bessel_y0",
    "bessel_y1",
    "modified_bessel_k0",
    "modified_bessel_k1",
}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ROUGH])
def test_single_precision_keeps_the_variance(name):
    """Means of up to a thousand standard deviations: within 1e-3 of the variance in double precision.

    Beside that, what the rounding of the function's own values can do to a difference of two of them, and 1e-6 of the
    variance that the steepest slope within eight deviations would give. What is below 1e-29 may count as 0.
    """
    grid = torch.cartesian_prod(
        torch.tensor([-1e3, -100.0, -10.0, -3.0, -1.0, -0.5, 0.5, 1.0, 3.0, 10.0, 100.0, 1e3]),
        torch.tensor([0.01, 0.1, 1.0]),
    )
    ratio, std = grid.unbind(-1)
    mean, variance = ratio * std, std.square()
    function = FUNCTIONS[name]
    found, exact = function(Moments.make(mean, variance)), function(Moments.make(mean.double(), variance.double()))
    points = torch.linspace(-8, 8, 33).double()[:, None]
    values = function(mean + std * points)
    known = values.isfinite().all(0) & (values.abs().amax(0) < 1e15)
    eps = torch.finfo(torch.float32).eps
    rounding = 4 * eps * function(mean + std * points[(points.abs() < 2).flatten()]).abs().amax(0)
    steepest = (values.diff(dim=0).abs().amax(0) * 2).square()
    bound = 1e-3 * exact.variance + 2 * rounding * exact.variance.sqrt() + rounding.square() + 1e-6 * steepest + 1e-29
    error = (found.variance.double() - exact.variance).abs()
    assert (error <= bound)[known].all(), (mean[known & (error > bound)], variance[known & (error > bound)])
