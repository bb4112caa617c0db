"""What two passes without noise show of layers: where the batch is, and which tensors are read outside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayesify._core.modes import evaluation_mode
from bayesify._core.trees import repeat_rows, slice_rows
from bayesify.laws.batch_dims import grown
from bayesify.laws.noise import BatchDim
from bayesify.laws.patching import Watch, patched_forward, storage

__all__ = ["Seen", "argument_of", "look_at_layers"]

Activation = Callable[[str, tuple[Any, ...], dict[str, Any], Any], Tensor]


@dataclass(frozen=True)
class Seen:
    """What was seen of layers; nothing of their calls where a pass failed.

    Attributes:
        shapes: The shape of each call's activation on two examples, by layer.
        calls: Where the batch is in it, by layer; None where that is not clear, and empty where the number of calls
            depends on the number of examples.
        outside: The storages of tensors that were read outside the layers, by address.
    """

    shapes: Mapping[str, list[torch.Size]]
    calls: Mapping[str, tuple[BatchDim | None, ...]]
    outside: set[int]

    def is_read_outside(self, tensor: Tensor) -> bool:
        """Return whether something other than the layers read a tensor."""
        return storage(tensor) in self.outside


def argument_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor:
    """Return the first argument of a layer's call."""
    del name, output
    found: Tensor = args[0] if args else next(iter(kwargs.values()))
    return found


def look_at_layers(
    network: nn.Module,
    names: Iterable[str],
    tensors: Iterable[Tensor],
    inputs: Any,
    *,
    activation: Activation = argument_of,
) -> Seen:
    """Run the network as it is on one example twice and three times, and look.

    Args:
        network: The network.
        names: The layers.
        tensors: Theirs, which others may read too.
        inputs: Arguments and keyword arguments of a batch.
        activation: The tensor to look at in a call, of (name, args, kwargs, output).
    """
    modules = {name: network.get_submodule(name) for name in names}
    watch = Watch(tensors)
    seen: list[dict[str, list[torch.Size]]] = []
    try:
        one = slice_rows(inputs, 0, 1)
        with torch.no_grad(), torch.random.fork_rng(devices=[]), evaluation_mode(network):
            for rows in (2, 3):
                shapes: dict[str, list[torch.Size]] = {name: [] for name in modules}
                watched = {
                    module: watch.allowed(_recorded(name, module.forward, shapes[name], activation))
                    for name, module in modules.items()
                }
                args, kwargs = repeat_rows(one, rows)
                with patched_forward(watched), watch:
                    network(*args, **kwargs)
                seen.append(shapes)
    except Exception:  # the pass that follows says what is wrong; without one, the shape has to do
        return Seen({}, {}, watch.found)
    return Seen(seen[0], {name: _calls(seen[0][name], seen[1][name]) for name in modules}, watch.found)


def _recorded(
    name: str, forward: Callable[..., Any], shapes: list[torch.Size], activation: Activation
) -> Callable[..., Any]:
    def recording(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        shapes.append(activation(name, args, kwargs, output).shape)
        return output

    return recording


def _calls(two: list[torch.Size], three: list[torch.Size]) -> tuple[BatchDim | None, ...]:
    if len(two) != len(three):
        return ()
    return tuple(grown(a, b) for a, b in zip(two, three, strict=True))
