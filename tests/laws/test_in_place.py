"""Activations that change a layer's output in place: the loss and its gradients are those of ones that do not."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bayesify import ABNN, IBNN, BayesAdapter, OODRegularizer, convert, predict
from bayesify.laws.gaussian import functions, kernels
from bayesify.layers import layer_types
from tests.marks import slow_product

EXACT = {"rtol": 1e-12, "atol": 1e-12}
ROWS = 6

# Every type with a kernel, with and without a bias, and how one example's input looks.
LAYERS: dict[str, tuple] = {
    "linear": (lambda: nn.Linear(4, 3), (4,)),
    "linear without bias": (lambda: nn.Linear(4, 3, bias=False), (4,)),
    "linear on tokens": (lambda: nn.Linear(4, 3), (5, 4)),
    "linear on tokens without bias": (lambda: nn.Linear(4, 3, bias=False), (5, 4)),
    "conv1d": (lambda: nn.Conv1d(4, 3, 2), (4, 5)),
    "conv2d without bias": (lambda: nn.Conv2d(4, 4, 3, bias=False, groups=2, padding=1), (4, 5, 4)),
    "conv3d without bias": (lambda: nn.Conv3d(4, 2, 2, bias=False), (4, 2, 3, 2)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(4, 3, 2, bias=False), (4, 3)),
    "transposed 2d": (lambda: nn.ConvTranspose2d(4, 3, 2, bias=False), (4, 3, 2)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(4, 3, 2), (4, 2, 2, 2)),
    "batch 1d": (lambda: nn.BatchNorm1d(4), (4,)),
    "batch 1d on sequences": (lambda: nn.BatchNorm1d(4, track_running_stats=False), (4, 3)),
    "batch 2d": (lambda: nn.BatchNorm2d(4), (4, 3, 2)),
    "batch 3d": (lambda: nn.BatchNorm3d(4), (4, 3, 2, 2)),
    "instance 1d": (lambda: nn.InstanceNorm1d(4, affine=True), (4, 3)),
    "instance 2d": (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (4, 3, 2)),
    "instance 3d": (lambda: nn.InstanceNorm3d(4, affine=True), (4, 3, 2, 2)),
    "layer": (lambda: nn.LayerNorm(4), (3, 4)),
    "layer without bias": (lambda: nn.LayerNorm(4, bias=False), (3, 4)),
    "group": (lambda: nn.GroupNorm(2, 4), (4, 3)),
    "rms": (lambda: nn.RMSNorm(4), (3, 4)),
    "embedding": (lambda: nn.Embedding(7, 4), (3,)),
    "attention": (lambda: nn.MultiheadAttention(4, 2, batch_first=True), (3, 4)),
}
MASK = torch.tensor([0.0, 2.0]).double()


def _mask(h: Tensor) -> Tensor:
    return MASK[torch.arange(h.numel()) % 2].view_as(h)


# What changes its input, and the same without: activations, a sum of a residual block, dropout.
CHANGES = {
    "relu": (torch.relu_, torch.relu),
    "hardswish": (lambda h: functional.hardswish(h, inplace=True), functional.hardswish),
    "silu": (lambda h: functional.silu(h, inplace=True), functional.silu),
    "sum": (lambda h: h.add_(0.3 * _mask(h)), lambda h: h + 0.3 * _mask(h)),
    "dropout": (lambda h: h.mul_(_mask(h)), lambda h: h * _mask(h)),
}


class Changed(nn.Module):
    """A layer between two, whose output is changed, in place or not."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.change, self.in_place = "relu", False

    def forward(self, x: Tensor) -> Tensor:
        h = x if x.dtype == torch.long else torch.tanh(x)
        h = self.layer(h, h, h)[0] if isinstance(self.layer, nn.MultiheadAttention) else self.layer(h)
        h = CHANGES[self.change][0 if self.in_place else 1](h)
        return h.flatten(1)[:, :3]


def _network(name: str) -> tuple[Changed, Tensor]:
    make, shape = LAYERS[name]
    torch.manual_seed(3)
    network = Changed(make()).double()
    for parameter in network.parameters():
        nn.init.normal_(parameter)
    x = torch.randint(7, (ROWS, *shape)) if name == "embedding" else torch.randn(ROWS, *shape, dtype=torch.float64)
    return network, x


def _gradients(posterior: nn.Module, x: Tensor, *, in_place: bool, **options) -> list[Tensor]:
    """Return the loss and all gradients of a pass with known noise."""
    network = posterior.network
    network.in_place = in_place
    state = {name: buffer.clone() for name, buffer in network.named_buffers()}
    torch.manual_seed(11)
    x = x.clone().requires_grad_(x.is_floating_point())
    loss = posterior.loss((x, torch.arange(ROWS) % 3), num_data=ROWS, **options).total
    inputs = [p for p in (x, *posterior.parameters()) if p.requires_grad]
    found = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
    for name, buffer in state.items():
        network.get_buffer(name).copy_(buffer)
    return [loss.detach(), *found]


def _assert_same(posterior: nn.Module, x: Tensor, **options) -> None:
    for training in (True, False):
        posterior.train(training)
        for change in CHANGES:
            posterior.network.change = change
            wanted = _gradients(posterior, x, in_place=False, **options)
            for one, other in zip(_gradients(posterior, x, in_place=True, **options), wanted, strict=True):
                torch.testing.assert_close(one, other, **EXACT)


def test_every_kernel_is_in_the_table():
    known = {k for k, found in layer_types().items() if found.family is not None and k.__module__.startswith("torch.")}
    assert known <= {type(make()) for make, _ in LAYERS.values()}


NOISES = ("exemplar", "local", "flipout", "flipout, weights each", "auto", "shared")


@pytest.mark.parametrize(("name", "noise"), slow_product(LAYERS, NOISES))
@pytest.mark.slow
def test_gaussian_weights(name: str, noise: str, monkeypatch: pytest.MonkeyPatch):
    if noise == "flipout, weights each":
        monkeypatch.setattr(kernels, "FEW_POSITIONS", 0)
    network, x = _network(name)
    method = BayesAdapter(estimator=noise.partition(",")[0], start_std=(0.1, 0.3))
    _assert_same(convert(network, method), x)


@pytest.mark.parametrize("noise", ["exemplar", "flipout"])
def test_gaussian_weights_in_several_chunks(noise: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(functions, "CHUNK", 50)
    monkeypatch.setattr(functions, "FLIPPED_CHUNK", 50)
    network, x = _network("conv2d without bias")
    _assert_same(convert(network, BayesAdapter(estimator=noise, start_std=(0.1, 0.3))), x)


NORMS = [name for name in LAYERS if name.startswith(("batch", "instance", "layer", "group", "rms"))]
PRODUCTS = [name for name in LAYERS if name not in NORMS]
METHODS: dict[str, tuple] = {
    "abnn": (ABNN(alpha=0.3, members=2), NORMS),
    "abnn, element": (ABNN(alpha=0.3, members=2, noise="element", statistics="updated", train="all"), NORMS),
    "abnn, channel": (ABNN(alpha=0.3, members=2, noise="channel"), NORMS),
    "ibnn": (IBNN(components=2, start_std=(0.2, 0.1), bias=True), PRODUCTS),
    "ibnn, frozen": (IBNN(components=2, start_std=(0.2, 0.1), weights="frozen"), PRODUCTS),
}


PAIRS = [(method, name) for method in METHODS for name in METHODS[method][1]]


@pytest.mark.parametrize(
    ("method", "name"),
    [pytest.param(*pair, marks=[pytest.mark.slow] if index % 4 else []) for index, pair in enumerate(PAIRS)],
)
@pytest.mark.slow
def test_noise_in_layers(method: str, name: str):
    network, x = _network(name)
    _assert_same(convert(network, METHODS[method][0]), x)


@pytest.mark.parametrize("name", ["batch 2d", "instance 2d", "batch 1d on sequences"])
def test_ood_rows_apart(name: str):
    network, x = _network(name)
    posterior = convert(network, BayesAdapter(start_std=(0.1, 0.3)))
    _assert_same(posterior, x, ood=3 * x[:4], regularizer=OODRegularizer())


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "batch 1d on sequences"])  # mixes examples
def test_predictions_without_draws(name: str):
    network, x = _network(name)
    posterior = convert(network, BayesAdapter(start_std=(0.1, 0.3))).eval()
    found = []
    for in_place in (False, True):
        posterior.network.in_place = in_place
        found.append(predict(posterior, x, how="linearised"))
    for field in ("probs", "epistemic"):
        torch.testing.assert_close(getattr(found[1], field), getattr(found[0], field), **EXACT)
