"""Other tensors in the place of a network's own, for the time of a pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = ["Slots", "find_slots", "swapped"]

Slots = dict[str, list[tuple[dict[str, Any], str]]]


def find_slots(network: nn.Module, names: Mapping[str, Tensor]) -> Slots:
    """Return where each named tensor is held: in one module, or, if it is tied, in several."""
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in network.modules():
        for held in (module._parameters, module._buffers):
            for key, tensor in held.items():
                places.setdefault(id(tensor), []).append((held, key))
    parameters = network.named_parameters(remove_duplicate=False)  # a tied tensor may be asked for by any of its names
    own = {**dict(parameters), **dict(network.named_buffers(remove_duplicate=False))}
    return {name: places[id(own[name])] for name in names}


@contextmanager
def swapped(slots: Slots, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Put tensors in the places of the network's own, which return in any case.

    What `torch.func.functional_call` does, with the search for the places done once: for small batches that search is
    a good part of a pass.
    """
    before = [(held, key, held[key]) for name in tensors for held, key in slots[name]]
    try:
        for name, tensor in tensors.items():
            for held, key in slots[name]:
                held[key] = tensor
        yield
    finally:
        for held, key, tensor in before:
            held[key] = tensor
