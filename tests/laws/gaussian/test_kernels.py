"""Kernels against loops over examples with the same noise: outputs and all gradients, in float64."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from bayesify.laws.gaussian import functions, kernels
from bayesify.laws.gaussian.batch_norm import batch_norm_each
from bayesify.laws.gaussian.site import Site, Visits
from bayesify.laws.passes import BatchDim
from tests.laws.gaussian import naive

EXACT = {"rtol": 1e-10, "atol": 1e-10}
ROWS = 5

# Layers with the shape of one example's rows.
PRODUCTS: dict[str, tuple] = {
    "linear": (lambda: nn.Linear(4, 3), (1, 4)),
    "linear to one, no bias": (lambda: nn.Linear(4, 1, bias=False), (1, 4)),
    "linear on tokens": (lambda: nn.Linear(4, 3), (1, 6, 4)),
    "linear on windows of tokens": (lambda: nn.Linear(4, 3), (2, 2, 3, 4)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2), (1, 4, 9)),
    "conv1d circular": (lambda: nn.Conv1d(2, 3, 4, padding="same", padding_mode="circular"), (1, 2, 9)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3, padding=1), (1, 3, 6, 5)),
    "conv2d without bias, two maps each": (lambda: nn.Conv2d(3, 4, (3, 1), bias=False), (2, 3, 6, 5)),
    "conv2d same, even kernel": (lambda: nn.Conv2d(3, 4, 2, padding="same"), (1, 3, 6, 5)),
    "conv2d valid": (lambda: nn.Conv2d(3, 4, 2, padding="valid", stride=(1, 2)), (1, 3, 6, 5)),
    "conv2d reflect": (lambda: nn.Conv2d(3, 4, 3, padding=(2, 1), padding_mode="reflect", stride=2), (1, 3, 6, 5)),
    "conv2d replicate": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="replicate", dilation=2), (1, 3, 6, 5)),
    "conv2d depthwise": (lambda: nn.Conv2d(3, 6, 3, groups=3), (1, 3, 6, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 4, 2, stride=(1, 2, 1), groups=2), (1, 2, 3, 4, 5)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1), (1, 4, 5)),
    "transposed 2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, dilation=2), (1, 4, 3, 4)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(2, 3, 2, bias=False), (1, 2, 3, 2, 2)),
}
KINDS = ["exemplar", "flipout", "flipout, weights each"]


def _layer(make) -> nn.Module:
    torch.manual_seed(3)
    return make().double()


def _gradients(y: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    torch.manual_seed(11)
    return torch.autograd.grad((y * torch.randn_like(y)).sum(), inputs)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("chunk", [2**18, 100])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_equal_a_loop_over_examples(name: str, kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(functions, "CHUNK", chunk)
    monkeypatch.setattr(functions, "FLIPPED_CHUNK", chunk)
    monkeypatch.setattr(kernels, "FEW_POSITIONS", 0 if kind.endswith("each") else 10**9)
    kind = kind.partition(",")[0]
    make, shape = PRODUCTS[name]
    layer = _layer(make)
    psi = naive.log_stds(layer)
    x = torch.randn(ROWS, *shape, dtype=torch.float64, requires_grad=True)
    y = naive.run(layer, x.flatten(0, 1), kind, psi, ROWS, BatchDim(0, shape[0]))
    expected = naive.each_example(layer, x, naive.weights(layer, kind, psi, ROWS)).flatten(0, 1)
    assert_close(y, expected, **EXACT)
    inputs = (x, *layer.parameters(), *psi.values())
    for found, wanted in zip(_gradients(y, *inputs), _gradients(expected, *inputs), strict=True):
        assert_close(found, wanted, **EXACT)


@pytest.mark.parametrize("keep", [0.0, 1e9])
def test_noise_that_is_drawn_again_is_the_same_as_noise_that_was_kept(keep: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(functions, "KEPT_SHARE", keep)
    test_products_equal_a_loop_over_examples("conv2d", "exemplar", 250, monkeypatch)


def test_inputs_of_any_memory_order():
    layer = _layer(lambda: nn.Conv2d(3, 4, 3))
    psi = naive.log_stds(layer)
    x = torch.randn(ROWS, 3, 6, 5, dtype=torch.float64)
    for kind in ("exemplar", "flipout"):
        plain = naive.run(layer, x, kind, psi, ROWS)
        assert_close(naive.run(layer, x.to(memory_format=torch.channels_last), kind, psi, ROWS), plain, **EXACT)


@pytest.mark.parametrize("few", [0, 10**9])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_flipout_keeps_the_memory_order_of_its_input(
    order: torch.memory_format, few: int, monkeypatch: pytest.MonkeyPatch
):
    """So that `view` works behind it where it works behind a plain convolution."""
    monkeypatch.setattr(kernels, "FEW_POSITIONS", few)
    layer = _layer(lambda: nn.Conv2d(3, 4, 3, bias=False))
    x = torch.randn(ROWS, 3, 6, 5, dtype=torch.float64).to(memory_format=order).requires_grad_()
    y = naive.run(layer, x, "flipout", naive.log_stds(layer), ROWS)
    expected = torch.contiguous_format if few == 0 else order  # a group for each example has them side by side
    assert y.is_contiguous(memory_format=expected)
    (gradient,) = _gradients(y, x)
    assert gradient.is_contiguous(memory_format=expected)


def test_a_batch_in_the_second_dimension():
    layer = _layer(lambda: nn.Linear(4, 3))
    psi = naive.log_stds(layer)
    x = torch.randn(ROWS, 1, 6, 4, dtype=torch.float64)
    expected = naive.each_example(layer, x, naive.weights(layer, "exemplar", psi, ROWS))[:, 0]
    found = naive.run(layer, x[:, 0].transpose(0, 1), "exemplar", psi, ROWS, BatchDim(1))
    assert_close(found.transpose(0, 1), expected, **EXACT)


def test_an_activation_without_a_batch_has_one_draw():
    layer = _layer(lambda: nn.Linear(4, 3))
    psi = naive.log_stds(layer)
    x = torch.randn(ROWS, 4, dtype=torch.float64)
    expected = naive.each_example(layer, x[None], naive.weights(layer, "exemplar", psi, 1))[0]
    assert_close(naive.run(layer, x, "exemplar", psi, ROWS, BatchDim(None)), expected, **EXACT)
    conv = _layer(lambda: nn.Conv1d(2, 3, 2))
    psi = naive.log_stds(conv)
    x = torch.randn(2, 7, dtype=torch.float64)
    expected = naive.each_example(conv, x[None], naive.weights(conv, "exemplar", psi, 1))[0]
    assert_close(naive.run(conv, x, "exemplar", psi, ROWS, BatchDim(None)), expected, **EXACT)


# -- normalisation --------------------------------------------------------------------------------------------------

NORMS: dict[str, tuple] = {
    "batch 1d": (lambda: nn.BatchNorm1d(4), (1, 4)),
    "batch 1d, sequences": (lambda: nn.BatchNorm1d(4, momentum=None), (1, 4, 3)),
    "batch 2d": (lambda: nn.BatchNorm2d(3), (1, 3, 4, 2)),
    "batch 2d without statistics": (lambda: nn.BatchNorm2d(3, track_running_stats=False), (1, 3, 4, 2)),
    "batch 3d, two maps each": (lambda: nn.BatchNorm3d(3), (2, 3, 2, 2, 2)),
    "instance 2d": (lambda: nn.InstanceNorm2d(3, affine=True), (1, 3, 4, 2)),
    "instance 1d with statistics": (lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True), (1, 3, 4)),
    "layer": (lambda: nn.LayerNorm(4), (1, 5, 4)),
    "layer of two dimensions": (lambda: nn.LayerNorm((3, 4)), (2, 3, 4)),
    "group": (lambda: nn.GroupNorm(2, 4), (1, 4, 3, 3)),
    "rms": (lambda: nn.RMSNorm(4), (1, 5, 4)),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_norms_have_the_layers_statistics_and_an_affine_map_for_each_example(name: str, training: bool):
    make, shape = NORMS[name]
    layer = _layer(make).train(training)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.arange(p.numel()).view_as(p) / 3 + 0.5)
    plain = _layer(make).train(training)
    psi = naive.log_stds(layer)
    x = torch.randn(ROWS, *shape, dtype=torch.float64, requires_grad=True)
    drawn = naive.weights(layer, "exemplar", psi, ROWS)
    y = naive.run(layer, x.flatten(0, 1), "exemplar", psi, ROWS, BatchDim(0, shape[0]))
    # A layer with the scale 1 and the shift 0 gives what is scaled and shifted.
    normalised = plain(x.flatten(0, 1)).unflatten(0, (ROWS, shape[0]))
    channels = "layer" not in name and "rms" not in name
    view = [-1, *[1] * (len(shape) - 2)] if channels else list(layer.weight.shape)
    wanted = []
    for index in range(ROWS):
        scaled = normalised[index] * drawn["weight"][index].view(view)
        wanted.append(scaled + drawn["bias"][index].view(view) if "bias" in drawn else scaled)
    assert_close(y, torch.stack(wanted).flatten(0, 1), **EXACT)
    inputs = (x, *layer.parameters(), *psi.values())
    for found, expected in zip(_gradients(y, *inputs), _gradients(torch.stack(wanted), *inputs), strict=True):
        assert_close(found, expected.view_as(found), **EXACT)
    for buffer, own in layer.named_buffers():
        assert_close(own, plain.get_buffer(buffer), **EXACT)


# -- embedding ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["exemplar", "flipout"])
def test_a_token_has_one_vector_in_an_example_and_others_elsewhere(kind: str):
    layer = _layer(lambda: nn.Embedding(6, 3, padding_idx=0))
    psi = naive.log_stds(layer)
    psi["weight"].data[0] = -torch.inf
    ids = torch.tensor([[1, 2, 1, 0], [1, 1, 5, 0]])
    y = naive.run(layer, ids, kind, psi, 2, BatchDim(0))
    assert torch.equal(y[0, 0], y[0, 2])
    assert torch.equal(y[1, 0], y[1, 1])
    assert not torch.isclose(y[0, 0], y[0, 1]).any()
    assert torch.equal(y[:, 3], layer.weight[0].expand(2, -1))
    size = (y - layer.weight[ids]).abs()
    same = torch.isclose(size[0, 0], size[1, 0])
    assert bool(same.all()) == (kind == "flipout")
    mean, log_std = torch.autograd.grad(y.sum(), [layer.weight, psi["weight"]])
    counts = torch.bincount(ids.flatten(), minlength=6).double()
    counts[0] = 0
    assert_close(mean, counts[:, None].expand(-1, 3), **EXACT)
    deviations = torch.zeros(6, 3, dtype=torch.float64).index_add_(
        0, ids.flatten(), (y - layer.weight[ids]).flatten(0, 1)
    )
    assert_close(log_std, deviations, **EXACT)  # d(std e)/d psi = std e


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_of_any_memory_order(training: bool):
    torch.manual_seed(4)
    scale, shift = (torch.randn(ROWS, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    x = torch.randn(ROWS, 3, 6, 5, dtype=torch.float64)
    mean, var = torch.randn(3, dtype=torch.float64), torch.rand(3, dtype=torch.float64) + 0.5
    for order in (torch.contiguous_format, torch.channels_last):
        own = x.to(memory_format=order).requires_grad_()
        y = batch_norm_each(own, scale, shift, mean.clone(), var.clone(), training, 0.1, 1e-3)
        plain = nn.functional.batch_norm(own, mean.clone(), var.clone(), None, None, training, 0.1, 1e-3)
        expected = plain * scale[..., None, None] + shift[..., None, None]
        assert y.is_contiguous(memory_format=order)
        assert_close(y, expected, **EXACT)
        inputs = own, scale, shift
        for found, wanted in zip(_gradients(y, *inputs), _gradients(expected, *inputs), strict=True):
            assert_close(found, wanted, **EXACT)


# -- which kernel -----------------------------------------------------------------------------------------------------


def test_what_auto_takes():
    cases = [(1, 500), (127, 500), (128, 500), (499, 500), (500, 500), (63, 2), (64, 2)]
    taken = [kernels.choose("auto", *case, local=False) for case in cases]
    each = "flipout, weights each"
    assert taken == ["flipout", "flipout", each, each, "exemplar", "flipout", "exemplar"]
    assert kernels.choose("auto", 1, 9, local=True) == kernels.choose("local", 1, 9, local=True) == "local"
    assert kernels.choose("local", 1, 9, local=False) == "exemplar"
    assert kernels.choose("exemplar", 1, 9, local=True) == "exemplar"
    assert kernels.choose("flipout", 10**6, 9, local=True) == each


@pytest.mark.parametrize("name", ["conv2d valid", "conv2d same, even kernel", "conv1d circular", "conv3d", "conv1d"])
def test_positions_are_those_of_the_output(name: str, monkeypatch: pytest.MonkeyPatch):
    make, shape = PRODUCTS[name]
    layer = _layer(make)
    seen = []

    def choose(kind: str, positions: int, entries: int, *, local: bool) -> str:
        seen.append((positions, entries))
        return "exemplar"

    monkeypatch.setattr(kernels, "choose", choose)
    y = naive.run(layer, torch.randn(ROWS, *shape[1:], dtype=torch.float64), "auto", naive.log_stds(layer), ROWS)
    assert seen == [(y[0, 0].numel(), layer.weight.numel())]


def test_local_noise_needs_one_call():
    layer = _layer(lambda: nn.Linear(4, 3))
    psi = naive.log_stds(layer)
    site = Site("site", {name: name for name in psi}, (BatchDim(0),))
    present = Visits(ROWS, "local", psi)
    x = torch.randn(ROWS, 4, dtype=torch.float64)
    kernels.linear(layer, x, present.visit(site, x))
    with pytest.raises(RuntimeError, match="is called again"):
        kernels.linear(layer, x, present.visit(site, x))


def test_local_noise_has_no_gradient_where_there_is_none():
    layer = _layer(lambda: nn.Linear(4, 3, bias=False))
    psi = naive.log_stds(layer)
    x = torch.zeros(ROWS, 4, dtype=torch.float64, requires_grad=True)
    y = naive.run(layer, x, "local", psi, ROWS, BatchDim(0))
    assert torch.equal(y, torch.zeros_like(y))
    for gradient in _gradients(y, x, layer.weight, psi["weight"]):
        assert gradient.isfinite().all()
