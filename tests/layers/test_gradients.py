"""The gradients of each example, and both sums of their squares, against autograd on one example at a time."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from bayesify.layers import (
    AffineGradients,
    Convolution,
    ConvolutionGradients,
    EmbeddingGradients,
    LinearGradients,
    _gradients,
    example_gradients,
    layer_type,
    layer_types,
)

EXACT = {"rtol": 1e-10, "atol": 1e-12}
ROWS, TIMES = 4, 2


def numbers(*shape: int) -> Tensor:
    return torch.randn(ROWS, TIMES, *shape, dtype=torch.float64)


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 5, (ROWS, TIMES, *shape))


LAYERS = {
    "linear": (lambda: nn.Linear(3, 5), numbers(3)),
    "linear at positions": (lambda: nn.Linear(3, 5), numbers(6, 3)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding="same", padding_mode="circular", groups=2), numbers(4, 7)),
    "conv2d": (lambda: nn.Conv2d(4, 6, (2, 3), stride=2, padding=1, dilation=(1, 2), groups=2), numbers(4, 6, 7)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, padding="valid"), numbers(2, 3, 3, 4)),
    "transposed conv1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=3, output_padding=2, groups=2), numbers(4, 5)),
    "transposed conv2d": (lambda: nn.ConvTranspose2d(2, 3, 3, padding=1, dilation=2), numbers(2, 4, 5)),
    "transposed conv3d": (lambda: nn.ConvTranspose3d(2, 2, 2), numbers(2, 2, 3, 2)),
    "embedding": (lambda: nn.Embedding(5, 3), tokens(6)),
    "embedding with padding": (lambda: nn.Embedding(5, 3, padding_idx=1), tokens(2, 3)),
    "batch norm": (lambda: nn.BatchNorm1d(3), numbers(3)),
    "batch norm of signals": (lambda: nn.BatchNorm1d(3), numbers(3, 4)),
    "batch norm of images": (lambda: nn.BatchNorm2d(3), numbers(3, 4, 2)),
    "batch norm of volumes": (lambda: nn.BatchNorm3d(2), numbers(2, 2, 3, 2)),
    "instance norm": (lambda: nn.InstanceNorm1d(3, affine=True), numbers(3, 5)),
    "instance norm of images": (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), numbers(3, 4, 2)),
    "instance norm of volumes": (lambda: nn.InstanceNorm3d(2, affine=True), numbers(2, 2, 3, 2)),
    "group norm": (lambda: nn.GroupNorm(2, 4), numbers(4, 3, 2)),
    "layer norm": (lambda: nn.LayerNorm((3, 4)), numbers(2, 3, 4)),
    "rms norm": (lambda: nn.RMSNorm(4), numbers(5, 4)),
}


def made(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a layer in evaluation mode, its input as (B, r, ...), and a gradient of its output."""
    make, x = LAYERS[name]
    torch.manual_seed(3)
    layer = make().double().eval()
    for key, buffer in layer.named_buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 2)
        assert key
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer, x, torch.randn_like(layer(x.flatten(0, 1))).unflatten(0, (ROWS, TIMES))


def naive(layer: nn.Module, *calls: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return each example's gradient of sum <g, layer(x)> over calls, (B, *shape), by name."""
    parameters = dict(layer.named_parameters())
    rows = []
    for row in range(ROWS):
        value = sum((layer(x[row]) * grad[row]).sum() for x, grad in calls)
        rows.append(torch.autograd.grad(value, list(parameters.values())))
    return {name: torch.stack(found) for name, found in zip(parameters, zip(*rows, strict=True), strict=True)}


def test_every_type_is_here():
    known = {k for k, found in layer_types().items() if found.family is not None and k.__module__.startswith("torch.")}
    assert known == {type(make()) for make, _ in LAYERS.values()}


@pytest.mark.parametrize("chunk", [1, 2**20])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_and_their_squares(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_gradients, "CHUNK", chunk)
    layer, x, grad = made(name)
    expected = naive(layer, (x, grad))
    found = example_gradients(layer, x, grad)
    assert found.numbers == layer.weight.numel()
    assert_close(found.weight(), expected["weight"], **EXACT)
    variance = torch.rand_like(layer.weight)
    assert_close(found.weighted_squares(variance), (expected["weight"] ** 2 * variance).flatten(1).sum(1), **EXACT)
    assert_close(found.summed_squares(), (expected["weight"] ** 2).sum(0), **EXACT)
    if "bias" in expected:
        assert_close(found.bias, expected["bias"], **EXACT)
        assert_close(found.summed_bias_squares(), (expected["bias"] ** 2).sum(0), **EXACT)


@pytest.mark.parametrize("chunk", [1, 2**20])
@pytest.mark.parametrize("name", LAYERS)
def test_calls_add_up_before_they_are_squared(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_gradients, "CHUNK", chunk)
    layer, x, grad = made(name)
    calls = [(x, grad), (x.roll(1, 0), grad.flip(0)), (x, 2 * grad)]
    expected = naive(layer, *calls)
    first, *others = (example_gradients(layer, *call) for call in calls)
    assert_close(first.summed_squares(*others), (expected["weight"] ** 2).sum(0), **EXACT)
    if "bias" in expected:
        assert_close(first.summed_bias_squares(*others), (expected["bias"] ** 2).sum(0), **EXACT)


@pytest.mark.parametrize("positions", [1, 2])
def test_variances_that_are_a_product_give_the_same(positions: int):
    x, grad = (torch.randn(ROWS, positions, size, dtype=torch.float64) for size in (30, 20))
    row, column = torch.rand(20, dtype=torch.float64), torch.rand(30, dtype=torch.float64)
    variance = row[:, None] * column
    kept: dict[str, Tensor] = {}
    for flow in (grad, grad.flip(0)):  # the second finds what the first has kept
        found = LinearGradients(x, flow, (row, column), kept).weighted_squares(variance)
        assert_close(found, LinearGradients(x, flow).weight().square().flatten(1) @ variance.flatten(), **EXACT)
    assert kept


def test_statistics_of_channels_may_be_left_to_the_end():
    layer, x, grad = made("batch norm of images")
    factor = (layer.running_var + layer.eps).rsqrt()
    found = AffineGradients(x, grad, 0, layer.running_mean, factor)
    assert_close(found.weight(), naive(layer, (x, grad))["weight"], **EXACT)


def test_a_table_has_no_bias():
    with pytest.raises(NotImplementedError, match="no bias"):
        _ = EmbeddingGradients(tokens(3)[:, 0], numbers(3, 2)[:, 0], 5).bias


def test_what_is_no_norm_is_not_normalised():
    assert layer_type(nn.Linear).norm is None
    with pytest.raises(TypeError, match="Linear is no known normalisation layer"):
        _gradients.normalised(nn.Linear(2, 2), torch.ones(1, 2))


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "groups"),
    [
        ((3,), (2,), (1,), (1,), 1),
        ((3, 2), (1, 2), (1, 0), (2, 1), 2),
        ((1, 1), (1, 1), (0, 0), (1, 1), 1),
        ((2, 1, 3), (1, 1, 2), (0, 1, 1), (1, 1, 1), 1),
    ],
)
def test_few_channels_are_copied(kernel, stride, padding, dilation, groups, monkeypatch):
    """The gradient of each example's kernel by copies of what it meets is that of a convolution with groups."""
    operation = Convolution(stride, padding, dilation, False, (0,) * len(kernel), groups)
    torch.manual_seed(0)
    x, weight = (
        torch.randn(3, 1, 4, *(7,) * len(kernel)).double(),
        torch.randn(6, 4 // groups, *kernel).double(),
    )
    grad = torch.randn_like(operation.shared(x, weight))
    expected = operation.each_backward(grad, x, weight.expand(3, *weight.shape), need_x=False)[1]
    torch.testing.assert_close(operation.each_by_copies(grad, x, weight.shape), expected)
    torch.testing.assert_close(operation.each_gradient(grad, x, weight), expected)
    grads = torch.randn(5, *grad.shape).double()
    found, variance = ConvolutionGradients(x, grad, operation, weight), torch.rand_like(weight)
    squares = [operation.each_by_copies(one, x, weight.shape).square().flatten(1) @ variance.flatten() for one in grads]
    for size in (1, 2**20):  # examples one by one, and together
        monkeypatch.setattr(_gradients, "CHUNK", size)
        torch.testing.assert_close(found.all_weighted_squares(grads, variance), torch.stack(squares))
