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


Again = Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...] | None]


class Guard:
    """What refuses calls in the backward pass of layers that a pass had changed.

    They have a hook from the first such pass with gradients on. It is no part of passes without, in which hooks would
    keep transformer layers from running as one kernel.

    Args:
        inside: Whether the caller is in a pass of its own, in which the layers are as they should be.
    """

    def __init__(self, inside: Callable[[], bool]) -> None:
        self.inside = inside
        self.layers: set[nn.Module] = set()
        self.seen: set[Any] = set()

    def watch(self, what: Any, layers: Callable[[], Iterable[nn.Module]], again: Again) -> None:
        """Look at layers in the backward pass from now on, if the present pass has one.

        Args:
            what: A name for the layers, which are asked for once.
            layers: The layers.
            again: Gives arguments with which a layer does what it did in the pass; None refuses it.
        """
        if what not in self.seen and torch.is_grad_enabled():
            self.seen.add(what)
            hook = _Hook(self.inside, again)
            for layer in layers():
                if layer not in self.layers:
                    self.layers.add(layer)
                    layer.register_forward_pre_hook(hook, prepend=True)
                    if isinstance(layer, nn.modules.dropout._DropoutNd):
                        layer.register_forward_hook(hook.after, always_call=True)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Take the hooks away for a pass without gradients."""
        if not self.layers or torch.is_grad_enabled():
            yield
            return
        kept = [(hooks, key, hooks[key]) for layer in self.layers for hooks, key in _places(layer)]
        for hooks, key, _ in kept:
            del hooks[key]
        try:
            yield
        finally:
            for hooks, key, hook in kept:
                hooks[key] = hook
                if isinstance(hook, _Hook):
                    hooks.move_to_end(key, last=False)


class _Hook:
    def __init__(self, inside: Callable[[], bool], again: Again) -> None:
        self.inside, self.again = inside, again
        self.muted: list[nn.Module] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        """Return one that does nothing: a copy of the network is not this posterior's."""
        copied = memo[id(self)] = _Hook(_inside, _nothing)
        return copied

    def __reduce__(self) -> tuple[type[_Hook], tuple[Any, ...]]:
        """Pickle as one that does nothing."""
        return (_Hook, (_inside, _nothing))

    def __call__(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not in_backward() or self.inside():
            return None
        found = self.again(layer, args)
        if found is None:
            refuse(f"A random {type(layer).__name__}", "after the pass with its random weights or noise has ended")
        if layer.training and isinstance(layer, nn.modules.dropout._DropoutNd):  # its masks are in the arguments
            layer.training = False
            self.muted.append(layer)
        return found

    def after(self, layer: nn.Module, args: Any, output: Any) -> None:
        """Let dropout drop again."""
        del args, output
        if layer in self.muted:
            self.muted.remove(layer)
            layer.training = True


def _inside() -> bool:
    return True


def _nothing(layer: nn.Module, args: tuple[Any, ...]) -> None:
    del layer, args


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
        for hooks, key in _places(layer):
            del hooks[key]
            layer._forward_hooks_always_called.pop(key, None)
    return network


def _places(layer: nn.Module) -> list[tuple[Any, int]]:
    before = [(layer._forward_pre_hooks, key) for key, hook in layer._forward_pre_hooks.items() if _is_ours(hook)]
    return before + [(layer._forward_hooks, key) for key, hook in layer._forward_hooks.items() if _is_ours(hook)]


def _is_ours(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", hook), _Hook)
