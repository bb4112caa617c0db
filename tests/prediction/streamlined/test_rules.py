"""Every rule in float64: to first order against a Jacobian, moment matching against quadrature and Monte Carlo.

Monte Carlo tests compare with 200,000 draws, within six standard errors of a mean or of a variance: a right rule
fails in one of a billion comparisons, and the seeds are fixed.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import jacrev, vmap
from torch.nn import functional

from bayesify.prediction.attention_operations import multi_head_attention
from bayesify.prediction.streamlined import Moments, NoRuleError, moment_rule, rule_kinds
from bayesify.prediction.streamlined.moments import Settings, using
from tests.marks import slow_but

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # of the references' vmap
EXACT = {"rtol": 1e-9, "atol": 1e-12}
G = torch.Generator().manual_seed(0)
DRAWS = 200_000


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=G)


def random(*shape, spread=1.0):
    return Moments.make(randn(*shape), spread * (0.1 + torch.rand(*shape, dtype=torch.float64, generator=G)))


def first_order(function, *inputs):
    """Return f at the means and diag(J V J'), over all random inputs."""
    pairs = [x for x in inputs if isinstance(x, Moments)]

    def plain(*means):
        left = iter(means)
        return function(*(next(left) if isinstance(x, Moments) else x for x in inputs))

    value = plain(*(x.centre for x in pairs))
    jacobians = jacrev(plain, argnums=tuple(range(len(pairs))))(*(x.centre for x in pairs))
    variance = 0
    for jacobian, x in zip(jacobians, pairs, strict=True):
        flat = jacobian.reshape(value.numel(), -1)
        variance = variance + flat.square() @ x.variance.reshape(-1)
    return value, variance.view(value.shape)


def drawn(function, *inputs):
    """Check mean and variance against draws of the inputs."""
    generator = torch.Generator().manual_seed(1)

    def one(x):
        if not isinstance(x, Moments):
            return None
        noise = torch.randn(DRAWS, *x.centre.shape, dtype=torch.float64, generator=generator)
        return x.centre + x.variance.sqrt() * noise

    samples = [one(x) for x in inputs]
    dims = tuple(None if s is None else 0 for s in samples)
    values = [x if s is None else s for x, s in zip(inputs, samples, strict=True)]
    outputs = vmap(function, in_dims=dims)(*values)
    mean, variance = outputs.mean(0), outputs.var(0)
    fourth = ((outputs - mean) ** 4).mean(0)
    return mean, variance, (variance / DRAWS).sqrt(), ((fourth - variance**2) / DRAWS).sqrt()


def agrees(found, function, *inputs):
    mean, variance, error, spread = drawn(function, *inputs)
    assert ((found.centre - mean).abs() <= 6 * error + 1e-12).all()
    assert ((found.variance - variance).abs() <= 6 * spread + 1e-12).all()


# -- first order, by the Jacobian -------------------------------------------------------------------------------------

X = random(3, 4, 6)
IMAGE = random(2, 4, 4, 4)
FIRST = {
    "linear": (lambda x: functional.linear(x, WEIGHT, WEIGHT[:, 0]), X),
    "conv2d": (lambda x: functional.conv2d(x, KERNEL, KERNEL[:, 0, 0, 0], 2, 1, groups=2), IMAGE),
    "conv_transpose2d": (lambda x: functional.conv_transpose2d(x, KERNEL, None, 2, 1), IMAGE),
    "relu": (torch.relu, X),
    "leaky": (lambda x: functional.leaky_relu(x, 0.2), X),
    "prelu": (lambda x: functional.prelu(x, torch.tensor([0.3] * 4).double()), X),
    "gelu": (functional.gelu, X),
    "gelu tanh": (lambda x: functional.gelu(x, approximate="tanh"), X),
    "silu": (functional.silu, X),
    "hardswish": (functional.hardswish, X),
    "elu": (functional.elu, X),
    "elu module, in place": (lambda x: nn.ELU(0.5, inplace=True)(x * 1.0), X),
    "hardtanh module": (nn.Hardtanh(-0.7, 0.9), X),
    "mish": (functional.mish, X),
    "softplus": (functional.softplus, X),
    "sine, generic": (torch.sin, X),
    "method, generic": (lambda x: x.exp(), X),
    "power, generic": (lambda x: x.square() ** 1.5, X),
    "softmax": (lambda x: x.softmax(-1), X),
    "log softmax": (lambda x: functional.log_softmax(x, 1), X),
    "layer norm": (lambda x: functional.layer_norm(x, (6,), WEIGHT[0], WEIGHT[1], 1e-3), X),
    "layer norm of two": (lambda x: functional.layer_norm(x, (4, 6)), X),
    "rms norm": (lambda x: functional.rms_norm(x, (6,), WEIGHT[0], 1e-3), X),
    "group norm": (lambda x: functional.group_norm(x, 2, WEIGHT[0, :4], WEIGHT[1, :4]), IMAGE),
    "instance norm": (lambda x: functional.instance_norm(x), IMAGE),
    "batch norm": (lambda x: functional.batch_norm(x, WEIGHT[0, :4], WEIGHT[1, :4] ** 2, WEIGHT[2, :4]), IMAGE),
    "max pool": (lambda x: functional.max_pool2d(x, 2), IMAGE),
    "adaptive max pool": (lambda x: functional.adaptive_max_pool2d(x, 2), IMAGE),
    "amax": (lambda x: x.amax(1), X),
    "average pool": (lambda x: functional.avg_pool2d(x, 2, padding=1), IMAGE),
    "adaptive pool": (lambda x: functional.adaptive_avg_pool2d(x, (2, 1)), IMAGE),
    "mean": (lambda x: x.mean(1), X),
    "sum": (lambda x: x.sum((0, -1), keepdim=True), X),
    "quotient": (lambda x: 2 / x, X),
    "nearest": (lambda x: functional.interpolate(x, scale_factor=2), IMAGE),
    "pad": (lambda x: functional.pad(x, (1, 2), value=3.0), X),
    "shapes": (lambda x: torch.cat([x.transpose(1, 2)[:, ::2], x[:, :3].flip(1).reshape(3, 3, 6)[..., :4]], 1), X),
    "where": (lambda x: torch.where(X.centre > 0, x, 1.0).masked_fill(X.centre > 1, 0.0), X),
    "in place": (lambda x: functional.relu(x.clone(), inplace=True).mul_(2).add_(1), X),
}
WEIGHT = randn(6, 6)
KERNEL = randn(4, 2, 3, 3)


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("grad", ["no_grad", "inference_mode"])
def test_first_order_is_the_jacobian(name, grad):
    function, x = FIRST[name]
    if name == "in place":
        value, variance = first_order(lambda x: 2 * torch.relu(x) + 1, x)
    else:
        value, variance = first_order(function, x)
    with getattr(torch, grad)(), using(Settings(first_order=True)):
        found = function(x)
    torch.testing.assert_close(found.centre, value, **EXACT)
    torch.testing.assert_close(found.variance, variance, **EXACT)


@pytest.mark.parametrize("operation", [torch.add, torch.sub, torch.div])
def test_two_random_to_first_order(operation):
    one, other = random(3, 4), random(4)
    value, variance = first_order(operation, one, other)
    with using(Settings(first_order=True)):
        found = operation(one, other)
    torch.testing.assert_close(found.centre, value, **EXACT)
    torch.testing.assert_close(found.variance, variance, **EXACT)


def test_two_random_in_a_generic_operation():
    one, other = random(3, 4), random(4)
    value, variance = first_order(torch.atan2, one, other)
    with using(Settings(first_order=True)):
        found = torch.atan2(one, other)
    torch.testing.assert_close(found.centre, value, **EXACT)
    torch.testing.assert_close(found.variance, variance, **EXACT)


# -- matching moments -----------------------------------------------------------------------------------------------


def quadrature(function, mean, variance, nodes=200):
    """Return the moments of a function of a Gaussian with many nodes."""
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    points, weights = torch.from_numpy(points), torch.from_numpy(weights / math.sqrt(2 * math.pi))
    values = function(mean[..., None] + variance.sqrt()[..., None] * points)
    first = (values * weights).sum(-1)
    return first, ((values - first[..., None]) ** 2 * weights).sum(-1)


GRID = torch.cartesian_prod(torch.linspace(-4, 4, 17).double(), torch.logspace(-3, 1, 9).double())


def test_gelu_in_closed_form():
    mean, variance = GRID.unbind(-1)
    first, second = quadrature(functional.gelu, mean, variance)
    found = functional.gelu(Moments.make(mean, variance))
    torch.testing.assert_close(found.centre, first, rtol=0, atol=1e-9)
    torch.testing.assert_close(found.variance, second, rtol=1e-4, atol=1e-5)  # six nodes for Owen's T


@pytest.mark.slow
@pytest.mark.parametrize("slope", [0.0, 0.2])
def test_relu_family_in_closed_form(slope):
    """The kink makes quadrature slow to converge: integrals over the two halves are taken apart."""
    mean, variance = GRID.unbind(-1)
    points = torch.linspace(0, 20, 40_001, dtype=torch.float64)
    std = variance.sqrt()
    first, second = torch.zeros_like(mean), torch.zeros_like(mean)
    for sign in (1, -1):
        # Between the kink at -m / s and infinity, on a grid of the standard normal.
        start = -mean / std
        z = start[:, None] + sign * points
        y = mean[:, None] + std[:, None] * z
        y = y if sign == 1 else slope * y
        density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
        first += torch.trapezoid(y * density, points)
        second += torch.trapezoid(y**2 * density, points)
    found = functional.leaky_relu(Moments.make(mean, variance), slope)
    inside = (mean / std).abs() < 8  # the grid reaches twenty standard deviations from the kink
    torch.testing.assert_close(found.centre[inside], first[inside], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found.variance[inside], (second - first**2)[inside], rtol=1e-5, atol=1e-6)


def test_three_nodes_are_exact_for_cubes():
    """E and Var of a cube need polynomials of the sixth degree at most; of a square, of the fourth."""
    x = random(5)
    found = torch.square(x)
    mean, variance = x.centre, x.variance
    torch.testing.assert_close(found.centre, mean**2 + variance, **EXACT)
    torch.testing.assert_close(found.variance, 2 * variance**2 + 4 * mean**2 * variance, **EXACT)
    cube = x**3
    torch.testing.assert_close(cube.centre, mean**3 + 3 * mean * variance, **EXACT)


DRAWN = {
    "linear": (functional.linear, (random(2, 5), random(3, 5), random(3))),
    "linear, x fixed": (functional.linear, (randn(2, 5), random(3, 5), random(3))),
    "linear, bias alone": (functional.linear, (randn(2, 5), randn(3, 5), random(3))),
    "linear, x alone": (functional.linear, (random(2, 5), randn(3, 5), None)),
    "conv": (lambda x, w, b: functional.conv1d(x, w, b, padding=1), (random(2, 2, 4), random(3, 2, 3), random(3))),
    "conv, bias alone": (functional.conv1d, (randn(2, 2, 4), randn(3, 2, 3), random(3))),
    "product": (torch.mul, (random(3, 4), random(4))),
    "product with a number": (lambda x: 3 * x - 1, (random(3, 4),)),
    "matrices": (torch.matmul, (random(2, 3, 4), random(2, 4, 2))),
    "matrices, one random": (torch.matmul, (randn(2, 3, 4), random(2, 4, 2))),
    "addmm": (lambda b, x, w: torch.addmm(b, x, w), (random(3), random(2, 5), random(5, 3))),
    "embedding": (lambda w: functional.embedding(torch.tensor([1, 3]), w), (random(4, 3),)),
    "batch norm": (
        lambda x, a, b: functional.batch_norm(x, torch.ones(3).double(), torch.full((3,), 2.0).double(), a, b),
        (random(2, 3), random(3), random(3)),
    ),
    "relu": (torch.relu, (random(6),)),
}


@pytest.mark.parametrize("name", slow_but(["relu"], DRAWN))
def test_moments_are_those_of_draws(name):
    function, inputs = DRAWN[name]
    agrees(function(*inputs), function, *inputs)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_normalisation_of_wide_activations(norm):
    """With 64 features the moments are matched within 3 %, and a tenth of it is Monte Carlo's own error."""
    x = random(1, 64, spread=0.5)
    function = {"layer": lambda x: functional.layer_norm(x, (64,)), "rms": lambda x: functional.rms_norm(x, (64,))}[
        norm
    ]
    found = function(x)
    mean, variance, _, _ = drawn(function, x)
    assert (found.variance - variance).abs().sum() < 0.03 * variance.sum()
    assert (found.centre - mean).abs().sum() < 0.03 * mean.abs().sum()


# -- positions ------------------------------------------------------------------------------------------------------


def test_what_positions_have_in_common():
    """A layer with random weights, then a mean over tokens: exact where tokens have one variance."""
    weight = random(3, 5)
    same = randn(2, 1, 5).expand(2, 7, 5)
    found = functional.linear(same, weight).mean(1)
    torch.testing.assert_close(found.variance, same[:, 0].square() @ weight.variance.T, **EXACT)
    uniform = Moments.make(randn(3, 5), torch.full((3, 5), 0.3, dtype=torch.float64))
    x = functional.normalize(randn(2, 7, 5) + 0.5, dim=-1)
    found = functional.linear(x, uniform).mean(1)
    torch.testing.assert_close(found.variance, x.mean(1).square() @ uniform.variance.T, **EXACT)


@pytest.mark.parametrize("layout", ["batch first", "time first", "packed"])
def test_attention_mixes_tokens_before_the_value_weights(layout):
    """Queries and keys at their means: the output is linear in the value weights, and its variance exact."""
    weight, bias = random(4, 6), random(4)
    x, q, k = randn(3, 5, 6), randn(3, 2, 5, 2), randn(3, 2, 5, 2)

    def attend(weight, bias):
        if layout == "time first":
            v = functional.linear(x.transpose(0, 1), weight, bias)
            v = torch.unflatten(v, -1, (2, 2)).permute(1, 2, 0, 3)
        elif layout == "packed":
            packed = torch.cat([weight, weight])  # stands for keys beside values
            v = functional.linear(x, packed, torch.cat([bias, bias])).reshape(3, 5, 2, 2, 2).permute(2, 0, 3, 1, 4)
            v = v.unbind(0)[1]
        else:
            v = functional.linear(x, weight, bias).view(3, 5, 2, 2).transpose(1, 2)
        return functional.scaled_dot_product_attention(q, k, v)

    value, variance = first_order(attend, weight, bias)
    found = attend(weight, bias)
    torch.testing.assert_close(found.centre, value, **EXACT)
    torch.testing.assert_close(found.variance, variance, **EXACT)


def test_attention_with_random_inputs_and_masks():
    x, weight = random(2, 4, 6), randn(4, 6)
    q, k = randn(2, 2, 4, 2), randn(2, 2, 4, 2)
    mask = torch.tensor([True, True, True, False]).expand(2, 1, 4, 4)

    def attend(x):
        v = functional.linear(x, weight).view(2, 4, 2, 2).transpose(1, 2)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    value, variance = first_order(attend, x)
    found = attend(x)
    torch.testing.assert_close(found.centre, value, **EXACT)
    torch.testing.assert_close(found.variance, variance, **EXACT)


def test_attention_causal_without_an_origin():
    v, q, k = random(2, 2, 4, 3), randn(2, 2, 4, 3), randn(2, 2, 4, 3)

    def attend(v):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    value, variance = first_order(attend, v)
    found = attend(v)
    torch.testing.assert_close(found.centre, value, **EXACT)
    torch.testing.assert_close(found.variance, variance, **EXACT)


@pytest.mark.parametrize("options", [{}, {"padding": True}, {"mask": True}, {"need_weights": True}, {"single": True}])
def test_multi_head_attention_is_torchs(options):
    """The decomposition into operations with rules, on plain tensors."""
    shape = (4, 6) if "single" in options else (4, 2, 6)
    x = randn(*shape)
    arguments = (x, x, x, 6, 2, randn(18, 6), randn(18), None, None, False, 0.0, randn(6, 6), randn(6))
    masks = {
        "training": False,
        "key_padding_mask": torch.tensor([[False] * 4, [False, False, True, True]]) if "padding" in options else None,
        "attn_mask": torch.ones(4, 4, dtype=torch.bool).triu(1) if "mask" in options else None,
        "need_weights": "need_weights" in options,
    }
    expected, weights = functional.multi_head_attention_forward(*arguments, **masks)
    found, again = multi_head_attention(*arguments, **masks)
    torch.testing.assert_close(found, expected, **EXACT)
    if "need_weights" in options:
        torch.testing.assert_close(again, weights, **EXACT)


# -- the registry ---------------------------------------------------------------------------------------------------


def test_no_rule_is_an_error():
    with pytest.raises(NoRuleError, match="cumprod"):
        torch.cumprod(random(3), 0)
    with pytest.raises(NoRuleError, match="sort"):
        torch.msort(random(3))


def test_a_rule_is_added_with_the_decorator():
    @moment_rule(torch.msort, kind="first order")
    def rule(x):
        return torch.sort(x, 0).values

    try:
        x = random(3)
        found = torch.msort(x)
        value, variance = first_order(torch.msort, x)
        torch.testing.assert_close(found.variance, variance, **EXACT)
        torch.testing.assert_close(found.centre, value, **EXACT)
        assert rule_kinds()[torch.msort] == (rule, "first order")
    finally:
        from bayesify.prediction.streamlined import moments

        del moments._RULES[torch.msort], moments._KINDS[torch.msort]


def test_every_rule_says_how_right_it_is():
    assert {kind for _, kind in rule_kinds().values()} == {"exact", "matched", "first order", "at the means"}
