"""Whether random tensors are read only by the modules that own them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from bayesify._tree import batch_rows, call, map_tensors
from bayesify.posteriors import Key, Posterior

__all__ = ["patched_forward", "reads_outside"]


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


def reads_outside(posterior: Posterior, inputs: Any, key: Key) -> bool:
    """Return whether an operation outside the modules that own the random tensors takes one of them.

    A tied projection, `F.linear(h, self.embedding.weight)`, does, and so does a fused transformer layer. Where the
    randomness enters is then unknown. Costs a pass in which every operation is looked at.
    """
    noise = posterior.noise
    with noise.mode(keys=(key,)), noise.one_pass(batch_rows(inputs)):
        tensors = posterior.tensors()
        if not tensors:
            return False
        watch = _Watch(tensors)
        sites = {module: watch.allowed(module.forward) for module in posterior.sites()}
        with patched_forward(sites), watch:
            call(lambda *args, **kwargs: functional_call(posterior.network, tensors, args, kwargs), inputs)
    return watch.found


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = {tensor.untyped_storage().data_ptr() for tensor in tensors.values() if tensor.numel()}
        self.inside = 0
        self.found = False

    def allowed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward in which random tensors may be read."""

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
        if not self.inside and not self.found:
            map_tensors(self._look, (args, kwargs or {}))
        return operation(*args, **(kwargs or {}))

    def _look(self, tensor: Tensor) -> None:
        if tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() in self.storages:
            self.found = True
