"""Gradients as transposed convolutions, products and scatters are torch's own, in float64."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from bayesify.layers import Convolution
from bayesify.prediction.backward_operations import BACKWARD, PlainPooling
from tests.prediction.linearised.networks import randn

ATEN = torch.ops.aten
WINDOWS = [
    ([3, 2], [2, 2], [1, 0], True, False, None),
    ([2, 2], [], [0, 0], True, True, None),
    ([3, 3], [2, 1], [1, 1], False, False, None),
]
CASES = {
    **{f"windows {i}": (ATEN.avg_pool2d_backward.default, case) for i, case in enumerate(WINDOWS)},
    "cubes": (ATEN.avg_pool3d_backward.default, ([2, 2, 2], [2, 2, 2], [1, 1, 1], False, False, None)),
    "adaptive": (ATEN._adaptive_avg_pool2d_backward.default, ([3, 2],)),
    "adaptive cubes": (ATEN._adaptive_avg_pool3d_backward.default, ([3, 2, 2],)),
}
FORWARD = {
    ATEN.avg_pool2d_backward.default: ATEN.avg_pool2d.default,
    ATEN.avg_pool3d_backward.default: ATEN.avg_pool3d.default,
    ATEN._adaptive_avg_pool2d_backward.default: ATEN._adaptive_avg_pool2d.default,
    ATEN._adaptive_avg_pool3d_backward.default: ATEN._adaptive_avg_pool3d.default,
}


@pytest.mark.parametrize("name", CASES)
def test_average_pooling(name):
    operation, options = CASES[name]
    sides = (5, 4, 4) if "3d" in str(operation) else (7, 5)
    x = randn(2, 3, *sides)
    flow = randn(*FORWARD[operation](x, *options).shape)
    rest = () if "adaptive" in name else options
    torch.testing.assert_close(BACKWARD[operation](flow, x, *rest), operation(flow, x, *rest))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("options", [{"size": (7, 3)}, {"scale_factor": (2.0, 1.5)}])
def test_interpolation(exact, options):
    x = randn(2, 3, 4, 5).requires_grad_()
    y = functional.interpolate(x, mode="nearest-exact" if exact else "nearest", **options)
    flow = randn(*y.shape)
    (expected,) = torch.autograd.grad(y, x, flow)
    name = ATEN._upsample_nearest_exact2d_backward if exact else ATEN.upsample_nearest2d_backward
    scales = options.get("scale_factor", (None, None))
    torch.testing.assert_close(BACKWARD[name.default](flow, y.shape[2:], list(x.shape), *scales), expected)


def test_maxima():
    x = randn(2, 3, 7, 5)
    values, places = functional.adaptive_max_pool2d(x, (3, 2), return_indices=True)
    flow, operation = randn(*values.shape), ATEN.adaptive_max_pool2d_backward.default
    torch.testing.assert_close(BACKWARD[operation](flow, x, places), operation(flow, x, places))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dims", "groups"), [(1, 1), (2, 2), (3, 1)])
def test_convolutions(transposed, dims, groups):
    """Of the input, and of each example's weight; for three dimensions with an uneven stride."""
    stride, padding, extra = (2,) * (dims - 1) + (1,), (1,) * dims, (1,) * (dims - 1) + (0,)
    sizes = (stride, padding, (1,) * dims, transposed, extra if transposed else (0,) * dims)
    operation = Convolution(*sizes, groups)
    x, weight = randn(3, 1, 4, *(5,) * dims), randn(4, 6 // groups if transposed else 4 // groups, *(3,) * dims)
    flow = randn(*operation.shared(x, weight).shape)
    of_x, of_weights = operation.each_backward(flow, x, weight.expand(3, *weight.shape), need_x=True)
    swapped = (x, flow) if transposed else (flow, x)
    torch.testing.assert_close(operation.each_by_patches(*swapped, weight.shape), of_weights)
    options = ([0], *map(list, sizes[:3]), transposed, list(sizes[4]), groups)
    backward = BACKWARD[ATEN.convolution_backward.default]
    found = backward(flow[:, 0], x[:, 0], weight, *options, [True, False, False])
    torch.testing.assert_close(found[0], of_x[:, 0])
    assert backward(flow[:, 0], x[:, 0], weight, *options, [True, True, False]) is NotImplemented


def test_pooling_of_channels_last_has_gradients_of_every_runtime():
    """torch gives the result of such a pooling other strides, and the gradient of that is in no other runtime."""

    def gradient(x):
        with torch.enable_grad():
            last = x.contiguous(memory_format=torch.channels_last).requires_grad_()
            return torch.autograd.grad(nn.AdaptiveAvgPool2d(1)(last).square().sum(), last)[0]

    x = torch.randn(5, 3, 4, 4, dtype=torch.float64)
    with PlainPooling():
        graph = make_fx(gradient, BACKWARD, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x)
    assert not [node for node in graph.graph.nodes if "as_strided" in str(node.target)]
    pooled = x.mean((2, 3), keepdim=True)
    torch.testing.assert_close(graph(x), (2 * pooled / 16).expand_as(x))
