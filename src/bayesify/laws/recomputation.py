"""Layers that run again in the backward pass, when the pass that they belong to is over.

Activation checkpointing keeps few activations and computes the others again. What it calls then meets the network's own
tensors instead of the pass's, and the gradients would be those of another network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["Guard", "RecomputationError", "gradients_required", "in_backward", "refuse", "without_guards"]


class RecomputationError(ValueError):
    """A random layer was run again in the backward pass."""


class Guard:
    """What refuses calls in the backward pass of layers that a pass had changed.

    They have a hook from the first such pass with gradients on. It is no part of passes without, in which hooks would
    keep transformer layers from running as one kernel.

    Args:
        inside: Whether the caller is in a pass of its own, in which the layers are as they should be.
    """

    def __init__(self, inside: Callable[[], bool]) -> None:
        self.hook = _Hook(inside)
        self.layers: set[nn.Module] = set()
        self.seen: set[Any] = set()

    def watch(self, what: Any, layers: Callable[[], Iterable[nn.Module]]) -> None:
        """Refuse layers in the backward pass from now on, if the present pass has one; `what` is asked for once."""
        if what not in self.seen and torch.is_grad_enabled():
            self.seen.add(what)
            for layer in layers():
                if layer not in self.layers:
                    self.layers.add(layer)
                    layer.register_forward_pre_hook(self.hook, prepend=True)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Take the hooks away for a pass without gradients."""
        if not self.layers or torch.is_grad_enabled():
            yield
            return
        kept: list[tuple[Any, int]] = [(layer._forward_pre_hooks, key) for layer in self.layers for key in _keys(layer)]
        for hooks, key in kept:
            del hooks[key]
        try:
            yield
        finally:
            for hooks, key in kept:
                hooks[key] = self.hook
                hooks.move_to_end(key, last=False)


class _Hook:
    def __init__(self, inside: Callable[[], bool]) -> None:
        self.inside = inside

    def __call__(self, layer: nn.Module, args: Any) -> None:
        if in_backward() and not self.inside():
            refuse(f"A random {type(layer).__name__}", "after the pass with its random weights has ended")


def in_backward() -> bool:
    """Return whether this is called by a backward pass; not in what is compiled, which has its own recomputation."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def refuse(layer: str, why: str) -> None:
    """Say that a layer must not be run in the backward pass."""
    raise RecomputationError(
        f"{layer} is run again in the backward pass (activation checkpointing), {why}, so that the gradients would be "
        "those of another network. Switch that off before converting: model.gradient_checkpointing_disable() for "
        "transformers, model.set_grad_checkpointing(False) for timm, memory_efficient=False for torchvision's "
        "DenseNet, or no torch.utils.checkpoint in your forward. MAP can be trained with it, and MCDropout where "
        "single entries are dropped."
    )


@contextmanager
def gradients_required(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Refuse layers that run without gradients, for a pass whose gradients say how random it is."""

    def check(layer: nn.Module, args: Any) -> None:
        del args
        if not torch.is_grad_enabled():
            raise RecomputationError(
                f"A random {type(layer).__name__} runs where gradients are off (torch.no_grad, or activation "
                "checkpointing with use_reentrant=True), so that its part of the variance would be missing. Switch "
                "that off in the network, or use how='sampling'."
            )

    handles = [layer.register_forward_pre_hook(check) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def without_guards(network: nn.Module) -> nn.Module:
    """Take all such hooks away, from a copy of a network whose posterior is another or none."""
    for layer in network.modules():
        for key in _keys(layer):
            del layer._forward_pre_hooks[key]
    return network


def _keys(layer: nn.Module) -> list[int]:
    return [key for key, hook in layer._forward_pre_hooks.items() if isinstance(hook, _Hook)]
