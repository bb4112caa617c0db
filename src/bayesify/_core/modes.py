"""Training and evaluation mode, put back afterwards; and the modules of a network, found quickly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

__all__ = ["all_modules", "all_tensors", "evaluation_mode", "first_parameter", "modes_kept"]


def all_modules(network: nn.Module) -> list[nn.Module]:
    """Return what `network.modules()` goes through, in a third of the time: each module once, in the same order.

    >>> inner = nn.ReLU()
    >>> [type(module).__name__ for module in all_modules(nn.Sequential(inner, nn.Flatten(), inner))]
    ['Sequential', 'ReLU', 'Flatten']
    """
    found: dict[nn.Module, None] = {}
    left: list[nn.Module | None] = [network]
    while left:
        module = left.pop()
        if module is not None and module not in found:
            found[module] = None
            left.extend(reversed(module._modules.values()))
    return list(found)


def all_tensors(network: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of all modules, module by module; one that several have is there for each.

    >>> [tensor.shape for tensor in all_tensors(nn.Sequential(nn.Linear(2, 1), nn.ReLU()))]
    [torch.Size([1, 2]), torch.Size([1])]
    """
    held = [of for module in all_modules(network) for of in (module._parameters, module._buffers) if of]
    return [tensor for of in held for tensor in of.values() if tensor is not None]


def first_parameter(network: nn.Module, *, floating: bool = False) -> nn.Parameter | None:
    """Return the first of `network.parameters()`; or the first of floating-point numbers. None where there is none."""
    left: list[nn.Module | None] = [network]
    while left:
        module = left.pop()
        if module is None:
            continue
        for parameter in module._parameters.values():
            if parameter is not None and (not floating or parameter.is_floating_point()):
                return parameter
        left.extend(reversed(module._modules.values()))
    return None


@contextmanager
def modes_kept(module: nn.Module) -> Iterator[bool]:
    """Let each layer return to the mode it is in now; tell whether one of them is in training mode."""
    modes = [(inner, inner.training) for inner in all_modules(module)]
    try:
        yield any(training for _, training in modes)
    finally:
        for inner, training in modes:
            if inner.training != training:  # setting an attribute of a module is slow
                inner.training = training


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put all layers in evaluation mode for a while; each returns to its own mode."""
    modules = all_modules(module)
    training = [inner for inner in modules if inner.training]
    if training:
        module.eval()
    try:
        yield
    finally:
        changed = [inner for inner in modules if inner.training]
        if changed != training:  # setting an attribute of a module is slow
            for inner in changed:
                inner.training = False
            for inner in training:
                inner.training = True
