"""Another forward for some modules, for a while; and which tensors are read outside their modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bayesify._core.trees import map_tensors

__all__ = ["Watch", "forbid_fused_layers", "patched_forward"]


@contextmanager
def patched_forward(changes: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Give modules another forward for a while; one that was set on the object itself before returns."""
    before = {module: module.__dict__.get("forward") for module in changes}
    try:
        for module, forward in changes.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, own in before.items():
            if own is not None:
                module.__dict__["forward"] = own
            else:
                module.__dict__.pop("forward", None)


def forbid_fused_layers(network: nn.Module, sites: set[nn.Module]) -> None:
    """Make transformer layers call the modules inside them.

    In evaluation mode an encoder layer runs one fused kernel, which skips what replaces its modules without a word. It
    does not when a hook is attached.
    """
    for module in network.modules():
        if sites.isdisjoint(module.modules()):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            module.register_forward_pre_hook(_no_change)
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # the fused kernel alone understands nested tensors


def _no_change(module: nn.Module, args: tuple[Any, ...]) -> None:
    del module, args


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Look at every operation for tensors that it takes outside the modules in which they may be read.

    A tied projection, `F.linear(h, self.embedding.weight)`, takes one, and so does a fused transformer layer.

    Args:
        tensors: The tensors to look for.

    Attributes:
        found: The storages, by address, that were taken outside.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = {storage(tensor) for tensor in tensors if tensor.numel()}
        self.found: set[int] = set()
        self.inside = 0

    def allowed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward in which the tensors may be read."""

        def reading(*args: Any, **kwargs: Any) -> Any:
            self.inside += 1
            try:
                return forward(*args, **kwargs)
            finally:
                self.inside -= 1

        return reading

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and look at what it takes."""
        del types
        if not self.inside:
            map_tensors(self._look, (args, kwargs or {}))
        return operation(*args, **(kwargs or {}))

    def _look(self, tensor: Tensor) -> None:
        if tensor.layout == torch.strided and storage(tensor) in self.storages:
            self.found.add(storage(tensor))


def storage(tensor: Tensor) -> int:
    """Return the address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()
