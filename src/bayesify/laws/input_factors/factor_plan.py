"""Where the batch is in each layer's activation; found out once, by two passes without noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from bayesify.laws.input_factors.latents import Latent, Layer
from bayesify.laws.noise import BatchDim
from bayesify.laws.trace import Seen, argument_of, look_at_layers

__all__ = ["Plan", "make_plan"]


@dataclass(frozen=True)
class Plan:
    """How a stochastic pass is arranged.

    Attributes:
        layers: The layers with factors of their own for each example.
        shared: Latents with one draw for all examples of a pass, which then have one component: of weights that are
            read outside their layers, or that act on something without a batch.
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
    by_name = {layer.name: layer for layer in layers}
    parameters = {latent.parameter: network.get_parameter(latent.parameter) for latent in latents}

    def activation(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor:
        scaled: Tensor = output if by_name[name].side == "output" else argument_of(name, args, kwargs, output)
        return scaled

    seen = look_at_layers(network, by_name, parameters.values(), inputs, activation=activation)
    shared = {
        latent.parameter
        for layer in layers
        for latent in _latents_of(layer)
        if seen.is_read_outside(parameters[latent.parameter]) or not _splits(layer, seen)
    }
    own, common = [], []
    for layer in layers:
        found = _latents_of(layer)
        if shared.isdisjoint(latent.parameter for latent in found):
            own.append(layer)
        else:
            common += found  # a layer is shared as a whole: its bias goes with its weight
    return Plan(tuple(own), tuple(dict.fromkeys(common)), seen.calls)


def _latents_of(layer: Layer) -> list[Latent]:
    found = [*layer.weights, layer.bias, layer.output, layer.output_bias]
    return [latent for latent in found if latent is not None]


def _splits(layer: Layer, seen: Seen) -> bool:
    """Return whether each example can have its own factors in every call of a layer."""
    return all(
        batch is None or batch.dim is not None or (shape[0] == 1 and len(shape) > 1 and layer.dim % len(shape) > 0)
        for batch, shape in zip(seen.calls.get(layer.name, ()), seen.shapes.get(layer.name, ()), strict=False)
    )
