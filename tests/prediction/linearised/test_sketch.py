"""A few mixtures of input channels in place of all: right on average over signs, for every layer that has them."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from bayesify import Linearised, Streamlined, predict
from bayesify.laws import GaussianLaw, Posterior
from bayesify.layers import Convolution, ConvolutionGradients, LinearGradients
from bayesify.prediction.linearised import LinearisedPass
from bayesify.prediction.linearised.sketch import Sketch
from tests.prediction.linearised.networks import exact_covariance, gaussian, randn

EXACT = {"rtol": 1e-10, "atol": 1e-12}


def convolution(dims=2, *, stride=1, padding=0, dilation=1, transposed=False, groups=1):
    each = ((value,) * dims for value in (stride, padding, dilation))
    return Convolution(*each, transposed, (0,) * dims, groups)


def output(operation, x, weight):
    return operation.shared(x, weight)


# What a layer is, the shape of its weight, and of its input as (B, T, D) or (B, r, C, ...).
CASES = {
    "linear": (None, (3, 6), (2, 5, 6)),
    "convolution": (convolution(padding=1), (2, 5, 3, 3), (2, 1, 5, 4, 4)),
    "strided and dilated": (convolution(stride=2, padding=2, dilation=2), (2, 4, 3, 3), (2, 1, 4, 7, 7)),
    "groups": (convolution(groups=2), (4, 4, 2, 2), (2, 1, 8, 4, 4)),
    "several maps": (convolution(1, padding=1), (2, 5, 3), (2, 3, 5, 6)),
    "transposed": (convolution(stride=2, transposed=True, groups=2), (8, 3, 2, 2), (2, 1, 8, 3, 3)),
    "three dimensions": (convolution(3), (2, 4, 2, 2, 2), (2, 1, 4, 3, 3, 3)),
}


def case(name):
    """Return the gradients of a call, its operation, and the shape of its weight."""
    operation, shape, inputs = CASES[name]
    x, weight = randn(*inputs), randn(*shape)
    if operation is None:
        return LinearGradients(x, randn(*inputs[:2], shape[0])), operation, shape
    grad = torch.randn_like(output(operation, x, weight))
    return ConvolutionGradients(x, grad, operation, weight), operation, shape


def product(operation, shape):
    """Return variances r_i c_j: rows are outputs and the entries of kernels, columns input channels of a group."""
    groups, kernel = (1, ()) if operation is None else (operation.groups, shape[2:])
    if operation is not None and operation.transposed:
        columns, rows = torch.rand(shape[0], *(1 for _ in shape[1:])), torch.rand(groups, *shape[1:])
        rows = rows.repeat_interleave(shape[0] // groups, 0)
    else:
        rows, columns = torch.rand(shape[0], 1, *kernel), torch.rand(groups, shape[1], *(1 for _ in kernel))
        columns = columns.repeat_interleave(shape[0] // groups, 0)
    return (0.1 + rows.double()) * (0.1 + columns.double())


def average(found, sketch):
    """Return the sketched squares, averaged over all vectors of signs."""
    groups, _, channels = sketch.signs.shape
    patterns = itertools.product((-1.0, 1.0), repeat=groups * channels)
    each = [
        replace(sketch, signs=torch.tensor(signs).double().view(groups, 1, channels)).squares(found, {})
        for signs in patterns
    ]
    return torch.stack(each).mean(0)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("name", CASES)
def test_all_signs_together_are_exact(name):
    found, operation, shape = case(name)
    variance = product(operation, shape)
    sketch = Sketch.make(variance, operation, 1, "here")
    torch.testing.assert_close(average(found, sketch), found.weighted_squares(variance), **EXACT)


def test_one_pattern_is_not():
    """The test above can fail."""
    found, operation, shape = case("convolution")
    variance = product(operation, shape)
    one = Sketch.make(variance, operation, 1, "here").squares(found, {})
    assert ((one / found.weighted_squares(variance) - 1).abs() > 0.01).all()


@pytest.mark.parametrize("name", ["linear", "groups", "transposed"])
def test_free_variances_have_the_sums_of_rows_and_columns(name):
    found, operation, shape = case(name)
    free = torch.rand(shape).double() + 0.1
    if operation is None:
        table = free.sum(1, keepdim=True) * free.sum(0) / free.sum()
    else:
        each = free.chunk(operation.groups)
        inner = 0 if operation.transposed else 1
        others = [dim for dim in range(free.ndim) if dim != inner]
        table = torch.cat([v.sum(inner, keepdim=True) * v.sum(others, keepdim=True) / v.sum() for v in each])
    sketch = Sketch.make(free, operation, 1, "here")
    torch.testing.assert_close(average(found, sketch), found.weighted_squares(table), **EXACT)


def test_several_vectors_of_signs_are_averaged():
    found, operation, shape = case("convolution")
    variance = product(operation, shape)
    many, single = (Sketch.make(variance, operation, number, "here") for number in (3, 1))
    each = [replace(single, signs=many.signs[:, [index]]).squares(found, {}) for index in range(3)]
    torch.testing.assert_close(many.squares(found, {}), torch.stack(each).mean(0), **EXACT)


def test_inputs_along_one_direction_need_no_signs():
    found, operation, shape = case("convolution")
    x = randn(2, 1, 1, 4, 4) * randn(5)[:, None, None]
    found = replace(found, x=x)
    variance = product(operation, shape)
    sketch = Sketch.make(variance, operation, 1, "here")
    torch.testing.assert_close(sketch.squares(found, {}), found.weighted_squares(variance), **EXACT)


def test_inputs_of_zero():
    found, operation, shape = case("linear")
    sketch = Sketch.make(product(operation, shape), operation, 1, "here")
    assert sketch.squares(replace(found, x=torch.zeros_like(found.x)), {}).eq(0).all()


def test_signs_belong_to_a_name():
    variance = torch.ones(4, 64)
    one, again, other = (Sketch.make(variance, None, 2, site).signs for site in ("a", "a", "b"))
    assert one.equal(again)
    assert not one.equal(other)
    assert one.abs().eq(1).all()


# -- in networks ------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Convolutions with and without groups, batch normalisation, attention and its projections, and tokens."""

    def __init__(self, classes=3):
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 16, 3, stride=2, padding=1, groups=2)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, classes)

    def forward(self, x):
        h = torch.relu(self.norm(self.first(x)))
        tokens = torch.relu(self.second(h)).flatten(2).mT
        h = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        return self.head(h.mean(1))


IMAGES = randn(6, 3, 8, 8)


def equal_stds(network):
    network = network.double().eval()
    log_stds = {n: torch.full_like(p, 0.02).log() for n, p in network.named_parameters()}
    return Posterior(network, GaussianLaw(network, log_stds=log_stds))


def spread(posterior, how, **options):
    return predict(posterior, IMAGES, how=how, **options).logits_variance.sum(-1)


@pytest.mark.parametrize("engine", ["principal", "margin"])
@pytest.mark.parametrize("stds", [equal_stds, gaussian])
def test_near_the_exact_sum(engine, stds):
    posterior = stds(Wide())
    exact = spread(posterior, Streamlined(engine=engine, sketch=0))
    errors = [(spread(posterior, Streamlined(engine=engine, sketch=n)) / exact - 1).abs() for n in (1, 3)]
    assert 0 < errors[0].median() < 0.15
    assert errors[1].median() < 0.1


def test_linearised():
    posterior = equal_stds(Wide())
    exact, rough = (spread(posterior, Linearised(sketch=n)) for n in (0, 3))
    assert 0 < (rough / exact - 1).abs().median() < 0.1


@pytest.mark.parametrize("how", [Streamlined(), Streamlined(directions=2), Linearised(sketch=3)])
def test_no_batch_matters(how):
    posterior = gaussian(Wide())
    together, again, apart = (spread(posterior, how, chunk_size=size) for size in (6, 6, 1))
    assert together.equal(again)
    torch.testing.assert_close(apart, together, **EXACT)


def test_layer_scales_have_sketches_of_their_own():
    posterior = gaussian(Wide())
    scales = {"first": 2.0, "second": 2.0, "norm": 2.0, "attention": 2.0, "attention.out_proj": 2.0, "head": 2.0}
    how = Streamlined(engine="margin")
    torch.testing.assert_close(spread(posterior, how, variance_scale=scales), 2 * spread(posterior, how), **EXACT)


# -- several directions -----------------------------------------------------------------------------------------------


def centred(covariance):
    projection = torch.eye(covariance.shape[-1], dtype=covariance.dtype) - 1 / covariance.shape[-1]
    return (projection @ covariance @ projection).diagonal(dim1=-2, dim2=-1)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of the reference's vmap
@pytest.mark.parametrize(("classes", "directions"), [(2, 1), (3, 2), (4, 3), (3, 7)])
def test_as_many_directions_as_logits_have_are_exact(classes, directions):
    posterior = gaussian(Wide(classes))
    _, covariance = exact_covariance(posterior, IMAGES)
    found = spread(posterior, Streamlined(directions=directions, sketch=0))
    torch.testing.assert_close(found, centred(covariance).sum(-1), rtol=1e-9, atol=1e-12)


def test_one_direction_is_the_same_for_all(monkeypatch):
    """What orders examples is not which direction each of them was asked about."""
    asked = []
    variance = LinearisedPass.variance
    monkeypatch.setattr(
        LinearisedPass, "variance", lambda self, c, **options: asked.append(c) or variance(self, c, **options)
    )
    spread(gaussian(Wide(5)), Streamlined())
    (direction,) = asked
    torch.testing.assert_close(direction, direction[:1].expand_as(direction))
    torch.testing.assert_close(direction.sum(-1), torch.zeros(6).double())


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_directions_bring_the_sum_nearer():
    posterior = equal_stds(Wide(6))
    _, covariance = exact_covariance(posterior, IMAGES)
    exact = centred(covariance).sum(-1)
    errors = [
        (spread(posterior, Streamlined(directions=number, sketch=0)) / exact - 1).abs().mean() for number in (1, 3, 5)
    ]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-9


def test_the_predictor_is_named():
    found = predict(gaussian(Wide()), IMAGES, how=Streamlined(directions=2)).predictor
    assert found.startswith("streamlined: 2 backward passes for where the logits move most")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Streamlined(directions=0), "directions must be a whole number of at least 1, but it is 0"),
        (lambda: Streamlined(directions=True), "directions must be a whole number"),
        (lambda: Streamlined(sketch=-1), "sketch must be a whole number of at least 0, but it is -1"),
        (lambda: Linearised(sketch=0.5), "sketch must be a whole number"),
        (lambda: Streamlined(engine="margin", directions=2), "directions=2 are of engine='principal'"),
        (lambda: Streamlined(covariance="full", directions=2), "directions=2 are of engine='principal'"),
    ],
)
def test_what_there_is_not(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_directions_need_a_last_layer():
    network = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Flatten(2), nn.AdaptiveAvgPool1d(1), nn.Flatten(1))
    with pytest.raises(ValueError, match=r"last nn\.Linear, and so are several directions"):
        predict(gaussian(network), IMAGES, how=Streamlined(directions=2))
