"""Copies of networks that share the memory of tensors which nobody writes to."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["Shared", "alias", "constants", "copied"]

SAMPLE = 8  # numbers of each tensor that are looked at again


def constants(network: nn.Module, frozen: Collection[str] | None = None) -> list[str]:
    """Return the names of the tensors that no training and no pass writes to.

    These are parameters that do not learn, and buffers that are matrices of whole numbers, as quantised layers keep
    their weights in. Other buffers may be statistics, which passes write to.

    Args:
        network: The network.
        frozen: The names of the parameters that do not learn; None asks the parameters.

    >>> network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).requires_grad_(False)
    >>> constants(network)
    ['0.weight', '0.bias', '1.weight', '1.bias']
    """
    held = set(frozen) if frozen is not None else {n for n, p in network.named_parameters() if not p.requires_grad}
    names = [name for name, parameter in network.named_parameters() if name in held and not is_lazy(parameter)]
    for name, buffer in network.named_buffers():
        if not is_lazy(buffer) and buffer.ndim > 1 and not buffer.is_floating_point() and not buffer.is_complex():
            names.append(name)
    return names


def copied(network: nn.Module, names: Iterable[str]) -> nn.Module:
    """Return a deep copy of a network in which the tensors of these names are other objects with the same memory.

    Moving the copy to another device or type leaves the network's own tensors where they are.

    >>> network = nn.Linear(2, 2)
    >>> other = copied(network, ["weight"])
    >>> other.weight.data_ptr() == network.weight.data_ptr(), other.bias.data_ptr() == network.bias.data_ptr()
    (True, False)
    """
    memo: dict[int, Any] = {}
    for name in names:
        alias(_tensor(network, name), memo)
    return copy.deepcopy(network, memo)


def alias(tensor: Tensor, memo: dict[int, Any]) -> None:
    """Let a deep copy with this memo have another tensor object with the same memory."""
    memo.setdefault(id(memo), []).append(tensor)  # which keeps its id from being given to another object
    kind = type(tensor)
    if kind is nn.Parameter or (isinstance(tensor, nn.Parameter) and is_traceable_wrapper_subclass(tensor)):
        memo[id(tensor)] = nn.Parameter(tensor.detach(), requires_grad=False)
    elif kind is Tensor or is_traceable_wrapper_subclass(tensor):
        memo[id(tensor)] = tensor.detach()
    else:  # a parameter with a state of its own, as bitsandbytes has
        made = memo[id(tensor)] = Tensor._make_subclass(kind, tensor.data, False)
        made.__dict__.update(copy.deepcopy(tensor.__dict__, memo))


class Shared:
    """Which tensors of a network share memory with another network's, and a few of the numbers in each.

    Args:
        network: The copy.
        names: Of the tensors.
    """

    def __init__(self, network: nn.Module, names: Iterable[str] = ()) -> None:
        tensors = {name: _tensor(network, name) for name in names}
        self.seen = {name: (_place(tensor), _look(tensor)) for name, tensor in tensors.items()}

    @property
    def names(self) -> list[str]:
        """The names of the tensors."""
        return list(self.seen)

    def own(self, network: nn.Module, names: Iterable[str] | None = None) -> None:
        """Give tensors memory of their own: these, or all that learn by now."""
        for name in list(self.seen) if names is None else list(names):
            tensor = _tensor(network, name)
            wanted = names is not None or tensor.requires_grad
            if wanted and _place(tensor) == self.seen.pop(name)[0]:
                tensor.data = tensor.data.clone()

    def changed(self, network: nn.Module) -> list[str]:
        """Return the names of tensors that somebody has written to, as far as a few numbers of each show."""
        found = []
        for name, (place, numbers) in self.seen.items():
            tensor = _tensor(network, name)
            if numbers is None or _place(tensor) != place:
                continue  # it has been moved since, and is its own
            now = _look(tensor)
            if now is not None and not bool(((now == numbers) | (now != now)).all()):  # NaN stays NaN
                found.append(name)
        return found


def _place(tensor: Tensor) -> int:
    """Return where a tensor is; 0 where only its type knows, as of quantised and of sharded ones."""
    return tensor.data_ptr() if type(tensor) in (nn.Parameter, Tensor) else 0


def _look(tensor: Tensor) -> Tensor | None:
    """Return some numbers of a tensor, at equal distances."""
    if not _place(tensor) or not tensor.numel():
        return None
    plain = tensor.detach()
    if plain.dtype.itemsize == 1:
        plain = plain.view(torch.uint8)  # numbers of eight bits cannot all be compared
    if not plain.ndim:
        return plain.clone()
    places = torch.linspace(0, plain.numel() - 1, min(SAMPLE, plain.numel()), dtype=torch.float64).long()
    return plain[torch.unravel_index(places.to(plain.device), plain.shape)]


def _tensor(network: nn.Module, name: str) -> Tensor:
    owner, _, last = name.rpartition(".")
    found: Tensor = getattr(network.get_submodule(owner), last)
    return found
