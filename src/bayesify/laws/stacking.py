"""Several draws of weights in one pass: layers that run with a tensor of their own for each draw.

Draws are rows of the batch, (S B, ...), from the first such layer on. A linear layer is then a batched product, a
convolution has S times the groups, and normalisation has scales and statistics for each draw; what is between them sees
a larger batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bayesify.laws.passes import BatchDim, Pass
from bayesify.laws.trace import Trace
from bayesify.layers import Family, layer_type, normalised, padded

__all__ = ["Stack", "StackedLayer", "Stacking", "find_stacking", "whole_stack"]

Stack = Tensor | tuple[Tensor, ...]  # (S, ...), or the draws' own tensors one by one
# Entries of a weight from which on reading it takes longer than a call: products with tensors that are not one stack go
# one after another, without a copy.
LARGE = 2**16
# Of a draw, up to which a product takes no longer than its weight takes to be read.
FEW_ROWS = 4
# Of a layer, up to which one product for all draws is up to three times as fast as one for each.
FEW_OUTPUTS = 16


def whole_stack(stack: Stack) -> Tensor:
    """Return a stack as one tensor, (S, ...)."""
    return stack if isinstance(stack, Tensor) else torch.stack(stack)


@dataclass(frozen=True)
class StackedLayer:
    """A layer some of whose tensors differ between draws.

    Attributes:
        name: Its name.
        tensors: The names of these tensors in the network, by their name in the layer.
        kernel: How it runs.
        batches: Where the batch is in the input of each call; once, if it is there in all of them.
    """

    name: str
    tensors: Mapping[str, str]
    kernel: Kernel
    batches: tuple[BatchDim | None, ...] = (None,)

    def batch(self, p: Pass) -> BatchDim | None:
        """Return where the batch is in the input of the next call in a pass.

        Calls are counted only where it matters: a compiled network is compiled anew for every count that it meets.
        """
        if len(self.batches) == 1:
            return self.batches[0]
        p.called(self.name)
        index = p.calls[self.name] - 1
        return self.batches[index] if index < len(self.batches) else None


@dataclass(frozen=True)
class Stacking:
    """How the draws of a law share a pass.

    Attributes:
        layers: The layers with tensors for each draw.
        size: How many numbers a draw has that differ from another's.
        convolves: Whether a convolution is among them, which several rows of a draw make slower.
    """

    layers: Mapping[nn.Module, StackedLayer]
    size: int
    convolves: bool

    def held(self) -> list[Tensor]:
        """Return the network's own tensors in the places of those that differ."""
        pairs = [(module, name) for module, layer in self.layers.items() for name in layer.tensors]
        found: list[Any] = [
            module._parameters[name] if name in module._parameters else module._buffers[name] for module, name in pairs
        ]
        return found

    def forwards(self, p: Pass, stacks: Mapping[str, Stack]) -> dict[nn.Module, Callable[..., Tensor]]:
        """Return the layers' forwards in a pass.

        Args:
            p: A pass of S draws.
            stacks: The draws' tensors by name.
        """
        return {module: _forward(module, layer, p, stacks) for module, layer in self.layers.items()}


def find_stacking(network: nn.Module, names: Iterable[str], trace: Trace | None) -> Stacking | None:
    """Find out whether draws of these tensors can share a pass; None where they cannot.

    They can where the tensors belong to layers of exactly a registered type, are read by nobody else, and act on
    something that has a batch.

    Args:
        network: The network.
        names: The tensors that differ between draws.
        trace: What a dry run tells of it; None goes by the types of layers alone.
    """
    state = {
        **dict(network.named_parameters(remove_duplicate=False)),
        **dict(network.named_buffers(remove_duplicate=False)),
    }
    wanted = {id(state[name]): name for name in names}
    if not wanted or (trace is not None and any(trace.is_read_outside(state[name]) for name in wanted.values())):
        return None
    layers: dict[nn.Module, StackedLayer] = {}
    for name, module in network.named_modules():
        held = {**module._parameters, **module._buffers}
        tensors = {own: wanted[id(tensor)] for own, tensor in held.items() if id(tensor) in wanted}
        if not tensors:
            continue
        family = layer_type(module).family
        if family is None or family not in _KERNELS or not _plain(module, family):
            return None
        calls = () if trace is None else trace.calls.get(name, ())
        if (trace is not None and not calls) or any(call.input == BatchDim(None) for call in calls):
            return None
        places = tuple(call.input for call in calls) or (None,)
        places = places[:1] if len(set(places)) == 1 else places
        layers[module] = StackedLayer(name, tensors, _KERNELS[family], places)
    found = {full for layer in layers.values() for full in layer.tensors.values()}
    if found != set(wanted.values()):  # of a module that reads its children's tensors, say
        return None
    convolves = any(layer.kernel is _convolution for layer in layers.values())
    return Stacking(layers, sum(state[name].numel() for name in found), convolves)


def _plain(module: Any, family: Family) -> bool:
    """Return whether a layer has nothing that a draw by itself has and several together have not."""
    if family == "embedding":
        return not (module.max_norm or module.sparse or module.scale_grad_by_freq)
    return family != "batch norm" or module.running_mean is not None


class _Visit:
    """One call of a layer in a pass of S draws."""

    def __init__(self, layer: StackedLayer, p: Pass, stacks: Mapping[str, Stack], x: Tensor) -> None:
        self.draws, self._pass = len(p.keys), p
        self._stacks = {own: stacks[full] for own, full in layer.tensors.items()}
        self.dim, self.copies = p.find_batch(x, layer.name, self.draws, layer.batch(p))

    def get(self, name: str) -> Stack | None:
        """Return a tensor of the layer for each draw; None where all draws have the layer's own."""
        return self._stacks.get(name)

    def each(self, layer: nn.Module, name: str) -> Tensor | None:
        """Return a tensor of the layer as (S, ...), or as (1, ...) where all draws have one; None where it has none."""
        found = self._stacks.get(name)
        if found is not None:
            return whole_stack(found)
        own = getattr(layer, name)
        return None if own is None else own[None]

    def split(self, x: Tensor) -> Tensor:
        """Turn an activation into (S, n, ...), n entries for each draw; or (1, n, ...) while all draws have one."""
        first = x if self.dim == 0 else x.movedim(self.dim, 0)
        return first.reshape(self.copies, first.shape[0] // self.copies, *first.shape[1:])

    def join(self, y: Tensor) -> Tensor:
        """Turn (S, n, ...) back, with the draws as rows."""
        self._pass.folded = True
        y = y.flatten(0, 1)
        return y if self.dim == 0 else y.movedim(0, self.dim)


Kernel = Callable[..., Tensor]


def _forward(module: nn.Module, layer: StackedLayer, p: Pass, stacks: Mapping[str, Stack]) -> Callable[..., Tensor]:
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        x = args[0] if args else kwargs.pop("input")
        return layer.kernel(module, x, _Visit(layer, p, stacks, x), *args[1:], **kwargs)

    return forward


def _linear(layer: nn.Linear, x: Tensor, visit: _Visit) -> Tensor:
    whole, weight, bias = visit.split(x), visit.get("weight"), visit.each(layer, "bias")
    flat = whole if whole.ndim == 3 else whole.reshape(len(whole), -1, x.shape[-1])
    if weight is None:
        y = functional.linear(flat, layer.weight)
        y = y if bias is None else y + bias[:, None].to(y.dtype)
    elif layer.weight.numel() >= LARGE and _is_read_alone(weight, flat):
        parts = flat.expand(visit.draws, -1, -1)
        if flat.shape[1] == 1:
            y = torch.stack([one @ part for part, one in zip(parts[:, 0], weight, strict=True)])[:, None]
        else:
            y = torch.stack([functional.linear(part, one) for part, one in zip(parts, weight, strict=True)])
        y = y if bias is None else y + bias[:, None].to(y.dtype)
    else:
        y = _products(flat, whole_stack(weight), bias)
    return visit.join(y if whole.ndim == 3 else y.reshape(visit.draws, *whole.shape[1:-1], y.shape[-1]))


def _is_read_alone(weight: Stack, x: Tensor) -> bool:
    """Return whether each draw's product with a large weight is taken by itself, as a plain network takes it.

    It then takes what its weight takes to be read, which a product of all draws does on some processors alone: at one
    row up to twice as long, in the one order or in the other. While all draws have one row, they are one product.
    """
    return not isinstance(weight, Tensor) or (x.shape[1] <= FEW_ROWS and x.shape[:2] != (1, 1))


def _products(x: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
    """Return x_s W_s' + b_s of each draw, (S, n, D): as one product of all weights where that is fastest.

    Args:
        x: (S, n, E), or (1, n, E) while all draws have one.
        weights: (S, D, E).
        bias: (S, D), or (1, D); None without.
    """
    draws, outputs, rows = len(weights), weights.shape[1], x.shape[1]
    if len(x) == 1 and (rows == 1 or outputs <= min(FEW_OUTPUTS, rows)):
        shift = None if bias is None else bias.expand(draws, -1).reshape(-1)
        return functional.linear(x[0], weights.flatten(0, 1), shift).view(rows, draws, outputs).transpose(0, 1)
    x = x.expand(draws, -1, -1)
    return x @ weights.mT if bias is None else torch.baddbmm(bias[:, None], x, weights.mT)


def _convolution(layer: Any, x: Tensor, visit: _Visit, output_size: list[int] | None = None) -> Tensor:
    if visit.dim != 0 or x.ndim != layer.weight.ndim:
        raise ValueError(f"Layer {type(layer).__name__} has no batch first.")  # draws run alone then
    draws, dims, weight = visit.draws, layer.weight.ndim - 2, visit.get("weight")
    output_padding = layer.output_padding
    if layer.transposed and output_size is not None:
        output_padding = layer._output_padding(
            x, output_size, layer.stride, layer.padding, layer.kernel_size, dims, layer.dilation
        )
    x, padding = padded(layer, x)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        return torch.convolution(
            x, weight, bias, layer.stride, padding, layer.dilation, layer.transposed, output_padding, groups
        )

    bias = visit.each(layer, "bias")
    if weight is None:
        y = visit.split(run(x, layer.weight, None, layer.groups))
        assert bias is not None
        return visit.join(y + bias.view(len(bias), 1, -1, *[1] * dims).to(y.dtype))
    shift = None if bias is None else bias.expand(draws, -1).reshape(-1)
    weights = whole_stack(weight).flatten(0, 1)
    if visit.copies == 1 and layer.groups == 1 and not layer.transposed:  # all draws see one input
        y = run(x, weights, shift, 1)
    else:
        channels = visit.split(x).expand(draws, -1, *[-1] * (dims + 1)).transpose(0, 1)
        y = run(channels.reshape(channels.shape[0], -1, *x.shape[2:]), weights, shift, draws * layer.groups)
    return visit.join(y.view(len(y), draws, -1, *y.shape[2:]).transpose(0, 1))


def _batch_norm(layer: Any, x: Tensor, visit: _Visit) -> Tensor:
    layer._check_input_dim(x)
    if layer.training:
        raise ValueError("Batch normalisation that learns sees one draw at a time.")  # draws run alone then
    mean, var, weight, bias = (visit.each(layer, n) for n in ("running_mean", "running_var", "weight", "bias"))
    whole = visit.split(x)
    if whole.shape[1] == 1:  # one row: draws are channels
        channels = whole.expand(visit.draws, *[-1] * x.ndim).reshape(1, -1, *x.shape[2:])
        means, variances, scales, shifts = (
            None if t is None else t.expand(visit.draws, -1).reshape(-1) for t in (mean, var, weight, bias)
        )
        y = functional.batch_norm(channels, means, variances, scales, shifts, False, 0.0, layer.eps)
        return visit.join(y.view(visit.draws, 1, *x.shape[1:]))
    assert mean is not None
    assert var is not None
    scale = (var + layer.eps).rsqrt()
    scale = scale if weight is None else scale * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    ones = [1] * (x.ndim - 2)
    return visit.join((whole * scale.view(len(scale), 1, -1, *ones)).add_(shift.view(len(shift), 1, -1, *ones)))


def _own_norm(layer: Any, x: Tensor, visit: _Visit) -> Tensor:
    shape = list(getattr(layer, "normalized_shape", [-1, *[1] * (x.ndim - 2)]))
    whole = visit.split(normalised(layer, x))
    lead = [1] * (whole.ndim - 1 - len(shape))
    for name, combine in (("weight", torch.mul), ("bias", torch.add)):
        tensor = visit.each(layer, name) if hasattr(layer, name) else None
        if tensor is not None:
            whole = combine(whole, tensor.view(len(tensor), *lead, *shape).to(whole.dtype))
    return visit.join(whole)


def _embedding(layer: nn.Embedding, ids: Tensor, visit: _Visit) -> Tensor:
    stack = visit.get("weight")
    assert stack is not None
    whole, tables = visit.split(ids), whole_stack(stack)
    first = torch.arange(visit.draws, device=ids.device) * layer.num_embeddings
    found = whole + first.view(-1, *[1] * (whole.ndim - 1))
    return visit.join(functional.embedding(found, tables.flatten(0, 1)))


_KERNELS: dict[Family | None, Kernel] = {
    "linear": _linear,
    "convolution": _convolution,
    "transposed convolution": _convolution,
    "embedding": _embedding,
    "batch norm": _batch_norm,
    "group norm": _own_norm,
    "layer norm": _own_norm,
    "rms norm": _own_norm,
}
