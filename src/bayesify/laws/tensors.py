"""Sets of a network's tensors, stored under the names they have in it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bayesify._core.processes import whole

__all__ = ["Codec", "TensorTree", "batch_norms", "owners", "statistics_names", "tensor_of"]


class TensorTree(nn.Module):
    """A dictionary of tensors as a module: state_dict shows them under the same dotted names.

    Args:
        tensors: Tensors by dotted name; `nn.Parameter`s are registered as such, others as buffers.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        places: dict[str, tuple[nn.Module, str]] = {}
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            node: nn.Module = self
            for part in path:
                if part not in node._modules:
                    node.add_module(part, nn.Module())
                node = node.get_submodule(part)
            if isinstance(tensor, nn.Parameter):
                node.register_parameter(last, tensor)
            else:
                node.register_buffer(last, tensor)
            places[name] = (node, last)
        names = [name for name, _ in (*self.named_parameters(), *self.named_buffers())]
        self._places = {name: places[name] for name in names}  # looked for in each pass otherwise

    def as_dict(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        # Not by `getattr`, which looks for an attribute first: members of an ensemble have thousands of tensors.
        found: dict[str, Any] = {
            name: node._parameters[last] if last in node._parameters else node._buffers[last]
            for name, (node, last) in self._places.items()
        }
        return found


class Codec:
    """Some of a network's parameters as one vector, and back.

    Args:
        network: The network.
        names: Which parameters, in the order of the vector.

    Example:
        >>> network = nn.Linear(2, 1)
        >>> codec = Codec(network, ["weight", "bias"])
        >>> vector = codec.flatten(network)
        >>> vector.shape, torch.equal(codec.split(vector)["bias"], network.bias)
        (torch.Size([3]), True)
    """

    def __init__(self, network: nn.Module, names: Iterable[str]) -> None:
        self.names = list(names)
        parameters = [network.get_parameter(name) for name in self.names]
        self.shapes = [parameter.shape for parameter in parameters]
        self.sizes = [parameter.numel() for parameter in parameters]
        self.dtypes = [parameter.dtype for parameter in parameters]
        self.dtype = functools.reduce(torch.promote_types, self.dtypes)

    def flatten(self, network: nn.Module) -> Tensor:
        """Return the network's present parameters as a vector, in the widest of their types."""
        return self.join({name: network.get_parameter(name) for name in self.names})

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return parameters by name as a vector, in the widest of their types; `split` undoes it."""
        return torch.cat([whole(tensors[name].detach()).reshape(-1).to(self.dtype) for name in self.names])

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the parameters that a vector holds, by name: views of it where the types agree.

        A matrix (S, D) of several vectors gives parameters (S, ...).
        """
        lead = vector.shape[:-1]
        pieces = zip(self.names, torch.split(vector, self.sizes, -1), self.shapes, self.dtypes, strict=True)
        return {name: piece.view(lead + shape).to(self._type(dtype, vector)) for name, piece, shape, dtype in pieces}

    def _type(self, dtype: torch.dtype, vector: Tensor) -> torch.dtype:
        # A posterior moved to another precision moves its vectors with it.
        return vector.dtype if vector.dtype != self.dtype or dtype == self.dtype else dtype


def batch_norms(network: nn.Module) -> dict[str, nn.Module]:
    """Return the batch-normalisation layers that keep running statistics, by name."""
    return {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None
    }


def statistics_names(network: nn.Module) -> list[str]:
    """Return the names of the buffers that batch normalisation updates."""
    prefixes = tuple(f"{name}." if name else "" for name in batch_norms(network))
    names = ("running_mean", "running_var", "num_batches_tracked")
    found = {prefix + name for prefix in prefixes for name in names}
    return [name for name, _ in network.named_buffers() if name in found]


def owners(network: nn.Module, names: Iterable[str]) -> set[nn.Module]:
    """Return the modules that hold these tensors, under whichever name, and so use them when they are called."""
    parameters, buffers = (each(remove_duplicate=False) for each in (network.named_parameters, network.named_buffers))
    state = {**dict(parameters), **dict(buffers)}
    wanted = {id(state[name]) for name in names}
    found = set()
    for module in network.modules():
        if isinstance(module, nn.MultiheadAttention):  # reads its projection's weight without calling it
            held = [*module.parameters(), *module.buffers()]
        else:
            held = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(id(tensor) in wanted for tensor in held):
            found.add(module)
    called = {m.out_proj for m in found if isinstance(m, nn.MultiheadAttention)}
    return found - called


def tensor_of(network: nn.Module, name: str) -> Tensor:
    """Return a parameter, or what is in its place for the time of a pass."""
    owner, _, last = name.rpartition(".")
    found: Tensor = getattr(network.get_submodule(owner), last)
    return found
