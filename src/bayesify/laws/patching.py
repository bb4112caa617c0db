"""Put other tensors and forwards into a network for the time of one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Slots", "compilable", "find_slots", "forbid_fused_layers", "patched_forward", "swapped"]

Slots = dict[str, list[tuple[dict[str, Any], str]]]


@contextmanager
def patched_forward(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Give modules another forward; one that was set on the object itself before returns."""
    before = {module: module.__dict__.get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, own in before.items():
            if own is not None:
                module.__dict__["forward"] = own
            else:
                module.__dict__.pop("forward", None)


def compilable(
    network: nn.Module, forwards: Mapping[nn.Module, Callable[..., Any]]
) -> Mapping[nn.Module, Callable[..., Any]]:
    """Return forwards that a network which is compiled in place (`network.compile()`) can have.

    torch compiles the forward of a class of the user's own, as one graph, whatever its modules do. That of a class of
    torch's own, as `nn.Sequential`, it leaves alone, and would compile each of these forwards by itself, up to its
    limit of eight. They are left alone too then.
    """
    compiled = getattr(network, "_compiled_call_impl", None) is not None
    if not compiled or not type(network).forward.__module__.startswith("torch."):
        return forwards
    return {module: torch.compiler.disable(forward) for module, forward in forwards.items()}  # type: ignore[no-untyped-call]


def find_slots(network: nn.Module, names: Iterable[str]) -> Slots:
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


def forbid_fused_layers(network: nn.Module, sites: set[nn.Module]) -> None:
    """Make transformer layers call the modules inside them.

    In evaluation mode an encoder layer runs one fused kernel, which skips what replaces its modules without a word. It
    does not when a hook is attached.
    """
    for module in network.modules():
        if sites.isdisjoint(module.modules()):
            continue
        if isinstance(module, nn.TransformerEncoderLayer) and _no_change not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_no_change)
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # the fused kernel alone understands nested tensors


def _no_change(module: nn.Module, args: tuple[Any, ...]) -> None:
    del module, args
