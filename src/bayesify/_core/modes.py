"""Training and evaluation mode, put back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["evaluation_mode", "modes_kept"]


@contextmanager
def modes_kept(module: nn.Module) -> Iterator[None]:
    """Let each layer return to the mode it is in now."""
    modes = [(inner, inner.training) for inner in module.modules()]
    try:
        yield
    finally:
        for inner, training in modes:
            if inner.training != training:  # setting an attribute of a module is slow
                inner.training = training


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put all layers in evaluation mode for a while; each returns to its own mode."""
    with modes_kept(module):
        if any(inner.training for inner in module.modules()):
            module.eval()
        yield
