"""Each example's weight, drawn as the kernels draw it, and applied one example at a time by torch's own layers."""

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bayesify.laws.gaussian import functions
from bayesify.laws.gaussian.kernels import kernel_of
from bayesify.laws.gaussian.site import Site, Visits
from bayesify.laws.passes import BatchDim

SEED = 5


def log_stds(layer: nn.Module) -> dict[str, Tensor]:
    """Return standard deviations large enough to matter, for every parameter."""
    torch.manual_seed(7)
    return {name: torch.rand_like(p).mul(2).sub(2).requires_grad_() for name, p in layer.named_parameters()}


def run(layer: nn.Module, x: Tensor, kind: str, psi: dict[str, Tensor], rows: int, *calls: BatchDim | None) -> Tensor:
    """Run a layer's kernel with a known seed."""
    site = Site("site", {name: name for name in psi}, calls)
    present = Visits(rows, kind, psi, seeds={"site": SEED})
    return kernel_of(layer)(layer, x, present.visit(site, x))


def weights(layer: nn.Module, kind: str, psi: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    """Return every parameter of every example, (B, *parameter); differentiable."""
    drawn = {}
    for name, mean in layer.named_parameters():
        if name == "weight" and not isinstance(layer, nn.LayerNorm) and mean.ndim > 1:
            noise = _exemplar(mean, rows) if kind == "exemplar" else _flipout(layer, mean, rows)
        else:
            stream = torch.Generator().manual_seed(SEED + {"weight": 1, "bias": 2}[name])
            noise = torch.randn(rows, *mean.shape, dtype=mean.dtype, generator=stream)
        drawn[name] = mean + psi[name].exp() * noise
    return drawn


def _exemplar(mean: Tensor, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    size = rows if rows * mean.numel() <= 1.5 * functions.CHUNK else max(1, functions.CHUNK // mean.numel())
    return torch.cat(
        [
            torch.empty(min(size, rows - start), *mean.shape, dtype=mean.dtype).normal_(generator=generator)
            for start in range(0, rows, size)
        ]
    )


def _flipout(layer: nn.Module, mean: Tensor, rows: int) -> Tensor:
    """Multiply the one noise by the sign of its input and that of its output, entry by entry."""
    generator = torch.Generator().manual_seed(SEED)
    noise = torch.empty(mean.shape, dtype=mean.dtype).normal_(generator=generator)
    transposed, groups = getattr(layer, "transposed", False), getattr(layer, "groups", 1)
    inputs = mean.shape[0] if transposed else mean.shape[1] * groups
    outputs = mean.shape[1] * groups if transposed else mean.shape[0]
    s, r = (
        torch.empty(rows, size, dtype=mean.dtype).bernoulli_(0.5, generator=generator) * 2 - 1
        for size in (inputs, outputs)
    )
    flipped = noise.expand(rows, *mean.shape).clone()
    for first in range(mean.shape[0]):
        for second in range(mean.shape[1]):
            group = first // (mean.shape[0] // groups)
            other = group * mean.shape[1] + second
            i, o = (first, other) if transposed else (other, first)
            flipped[:, first, second] *= (s[:, i] * r[:, o]).view(rows, *[1] * (mean.ndim - 2))
    return flipped


def each_example(layer: nn.Module, x: Tensor, drawn: dict[str, Tensor]) -> Tensor:
    """Apply torch's own layer to one example after another; x is (B, r, ...), r rows of the layer's input for each."""
    plain = copy.deepcopy(layer)
    rows = [
        functional_call(plain, {name: values[index] for name, values in drawn.items()}, (x[index],))
        for index in range(len(x))
    ]
    return torch.stack(rows)
