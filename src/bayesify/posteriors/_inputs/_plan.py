"""Where the batch is in each layer's activation; found out once, by two passes without noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayesify._modes import evaluation_mode
from bayesify._tree import repeat_rows, slice_rows
from bayesify.posteriors._batch_dims import grown
from bayesify.posteriors._forward import Watch, patched_forward, storage
from bayesify.posteriors._inputs._latents import Latent, Layer
from bayesify.posteriors._noise import BatchDim

__all__ = ["Plan", "make_plan"]


@dataclass(frozen=True)
class Plan:
    """How a stochastic pass is arranged.

    Attributes:
        layers: The layers with factors of their own for each example.
        shared: Latents with one draw for all examples of a pass: of weights that are read outside their layers, or
            that act on something without a batch.
        calls: For each layer and each of its calls, where the batch is.
    """

    layers: tuple[Layer, ...]
    shared: tuple[Latent, ...]
    calls: Mapping[str, tuple[BatchDim | None, ...]]


def make_plan(network: nn.Module, layers: Sequence[Layer], latents: Sequence[Latent], inputs: Any) -> Plan:
    """Look at two passes, on one example twice and three times, of the network as it is.

    Args:
        network: The network.
        layers: Its layers with factors.
        latents: All factors.
        inputs: Arguments and keyword arguments of a batch.
    """
    modules = {layer.name: network.get_submodule(layer.name) for layer in layers}
    parameters = {latent.parameter: network.get_parameter(latent.parameter) for latent in latents}
    watch = Watch(parameters.values())
    seen: list[dict[str, list[torch.Size]]] = []
    try:
        one = slice_rows(inputs, 0, 1)
        with torch.no_grad(), torch.random.fork_rng(devices=[]), evaluation_mode(network):
            for rows in (2, 3):
                shapes: dict[str, list[torch.Size]] = {name: [] for name in modules}
                watched = {
                    modules[layer.name]: watch.allowed(_recorded(modules[layer.name].forward, layer, shapes))
                    for layer in layers
                }
                args, kwargs = repeat_rows(one, rows)
                with patched_forward(watched), watch:
                    network(*args, **kwargs)
                seen.append(shapes)
    except Exception:  # the pass that follows says what is wrong; without one, the shape has to do
        seen = []
    calls = {name: _calls(seen[0][name], seen[1][name]) for name in modules} if seen else {}
    outside = {name for name, parameter in parameters.items() if storage(parameter) in watch.found}
    shared = {
        latent.parameter
        for layer in layers
        for latent in _latents_of(layer)
        if latent.parameter in outside or not _splits(layer, seen[0][layer.name] if seen else [], calls)
    }
    return Plan(
        tuple(layer for layer in layers if shared.isdisjoint(latent.parameter for latent in _latents_of(layer))),
        # A layer is shared as a whole: its bias goes with its weight.
        tuple(
            dict.fromkeys(
                latent
                for layer in layers
                if not shared.isdisjoint(found.parameter for found in _latents_of(layer))
                for latent in _latents_of(layer)
            )
        ),
        calls,
    )


def _latents_of(layer: Layer) -> list[Latent]:
    found = [*layer.weights, layer.bias, layer.output, layer.output_bias]
    return [latent for latent in found if latent is not None]


def _splits(layer: Layer, shapes: list[torch.Size], calls: Mapping[str, tuple[BatchDim | None, ...]]) -> bool:
    """Return whether each example can have its own factors in every call of a layer."""
    known = calls.get(layer.name, ())
    return all(
        batch is None or batch.dim is not None or (shape[0] == 1 and len(shape) > 1 and layer.dim % len(shape) > 0)
        for batch, shape in zip(known, shapes, strict=False)
    )


def _recorded(forward: Callable[..., Any], layer: Layer, shapes: dict[str, list[torch.Size]]) -> Callable[..., Any]:
    def recording(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        x: Tensor = output if layer.side == "output" else args[0] if args else next(iter(kwargs.values()))
        shapes[layer.name].append(x.shape)
        return output

    return recording


def _calls(two: list[torch.Size], three: list[torch.Size]) -> tuple[BatchDim | None, ...]:
    if len(two) != len(three):
        return ()
    return tuple(grown(a, b) for a, b in zip(two, three, strict=True))
