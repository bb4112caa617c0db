"""What a dry run tells of a network: where the batch is in each call, who reads which tensor, and what is widest.

Nothing of it depends on a law. Two copies and three copies of one row go through the network as it is; a dimension that
grows with them is the batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bayesify._core.modes import evaluation_mode
from bayesify._core.trees import first_tensor, map_tensors, repeat_rows, slice_rows
from bayesify.laws.passes import BatchDim
from bayesify.laws.patching import patched_forward
from bayesify.laws.tensors import tensor_of

__all__ = ["Call", "Trace", "grown", "signature", "storage", "trace_network"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Call:
    """One call of a module, for two copies of a row.

    Attributes:
        input: Where the batch is in its first tensor argument; None where that is not clear.
        output: Where it is in its output.
        input_shape: That argument's shape; None without one.
        output_shape: The output's shape.
        size: How many numbers it returned for each row.
    """

    input: BatchDim | None
    output: BatchDim | None
    input_shape: torch.Size | None
    output_shape: torch.Size | None
    size: int


@dataclass
class Trace:
    """The result of a dry run.

    Attributes:
        calls: The calls of each module, by its name, in their order; none where the number of calls depends on the
            number of rows.
        order: The modules' names in the order in which their calls ended, with the size of what they returned.
        outside: Names of the tensors that were read outside the modules that own them: a tied projection
            `F.linear(h, self.embedding.weight)` reads one, and so does a fused transformer layer.
        last_linear: The name of the linear layer that was called last; None without any.
        output: What the network returned for two copies of a row, with tensors that have shapes and no numbers.
        last_outputs: Which of these tensors are what the last linear layer returned, by `id`.
        network: The network.
        failure: What went wrong; None if all went well. Nothing is known then.
        proven: Whether a pass on inputs of the user's own has gone well since.
        memo: What others concluded from it, by who they are.
    """

    calls: Mapping[str, tuple[Call, ...]] = field(default_factory=dict)
    order: tuple[tuple[str, int], ...] = ()
    outside: frozenset[str] = frozenset()
    last_linear: str | None = None
    output: Any = None
    last_outputs: frozenset[int] = frozenset()
    network: nn.Module | None = None
    failure: str | None = None
    proven: bool = False
    memo: dict[Any, Any] = field(default_factory=dict)

    def is_read_outside(self, tensor: Tensor) -> bool:
        """Return whether a tensor was read outside the modules that own it."""
        if not self.outside or self.network is None:
            return False
        address = storage(tensor)  # of now: a network that was moved has others than when it was looked at
        return any(storage(tensor_of(self.network, name)) == address for name in self.outside)

    def is_last(self, tensor: Tensor) -> bool:
        """Return whether a tensor of `output` is what the last linear layer returned."""
        return id(tensor) in self.last_outputs

    def call(self, name: str, index: int) -> Call | None:
        """Return what is known of a call of a module, counted from 0."""
        calls = self.calls.get(name, ())
        return calls[index] if index < len(calls) else None

    def widest(self, sites: Iterable[str] = ()) -> tuple[int, int]:
        """Return the most numbers per row that a module returned, and the most from the first call of a site on."""
        sites, found, after, random = set(sites), 1, 1, False
        for name, size in self.order:
            random = random or name in sites
            found = max(found, size)
            after = max(after, size) if random else after
        return found, after

    def conclude(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what somebody concludes from the trace, which is found out once."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    def prove(self, *, stacklevel: int = 6) -> None:
        """Say that a pass on the user's own inputs went well; warn, once, if the dry run did not."""
        if self.proven:
            return
        self.proven = True
        if self.failure is not None:
            warnings.warn(
                f"A dry run of the network on copies of one row failed ({self.failure}), so that it is unknown where "
                "its activations have their batch. Predictions are right where their shapes show it, and slower.",
                stacklevel=stacklevel,
            )


def signature(arguments: Arguments) -> Any:
    """Return what a trace depends on: the structure of the inputs, their types and ranks; never their sizes."""
    args, kwargs = arguments
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):  # as most inputs are
        return (args[0].dtype, args[0].ndim)

    def describe(value: Any) -> Any:
        if isinstance(value, Tensor):
            return (value.dtype, value.ndim)
        if isinstance(value, (list, tuple)):
            return (type(value).__name__, tuple([describe(inner) for inner in value]))
        if isinstance(value, Mapping):
            return ("mapping", tuple([(str(key), describe(inner)) for key, inner in value.items()]))
        return type(value).__name__

    return describe(arguments)


def trace_network(network: nn.Module, arguments: Arguments) -> Trace:
    """Run the network as it is, in evaluation mode, on one row twice and three times, and look."""
    try:
        one = slice_rows(arguments, 0, 1)
        with torch.no_grad(), torch.random.fork_rng(devices=[]), evaluation_mode(network):
            two, three = (_Look(network).run(repeat_rows(one, rows), rows) for rows in (2, 3))
    except Exception as error:  # on rows that nobody gave
        return Trace(failure=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    calls = {
        name: tuple(_call(a, b) for a, b in zip(found, three.calls[name], strict=True))
        for name, found in two.calls.items()
        if len(found) == len(three.calls[name])
    }
    outside = two.outside | three.outside
    return Trace(
        calls=calls,
        order=tuple(two.order),
        outside=frozenset(name for name, address in _addresses(network) if address in outside),
        last_linear=two.last_linear,
        output=two.output,
        last_outputs=frozenset(two.last_outputs),
        network=network,
    )


def grown(two: torch.Size | None, three: torch.Size | None) -> BatchDim | None:
    """Return the dimension that holds the batch, and how often; None where that is not clear."""
    if two is None or three is None:
        return None
    dims = [dim for dim, (a, b) in enumerate(zip(two, three, strict=False)) if a != b]
    if len(two) != len(three) or len(dims) > 1:
        return None
    if not dims:
        return BatchDim(None)
    times, rest = divmod(two[dims[0]], 2)
    return BatchDim(dims[0], times) if rest == 0 and three[dims[0]] == 3 * times else None


def storage(tensor: Tensor) -> int:
    """Return the address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def _addresses(network: nn.Module) -> Iterator[tuple[str, int]]:
    """Give the network's tensors by name, under each of their names, with the addresses of their storages."""
    for name, tensor in (
        *network.named_parameters(remove_duplicate=False),
        *network.named_buffers(remove_duplicate=False),
    ):
        with suppress(RuntimeError, NotImplementedError):
            if tensor.numel():
                yield name, storage(tensor)


_Shapes = tuple[torch.Size | None, torch.Size | None, int]


def _call(two: _Shapes, three: _Shapes) -> Call:
    return Call(grown(two[0], three[0]), grown(two[1], three[1]), two[0], two[1], two[2])


class _Look(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One look at a pass: calls of modules by patched forwards, reads of tensors by the operations."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.network = network
        self.calls: dict[str, list[_Shapes]] = {}
        self.order: list[tuple[str, int]] = []
        self.outside: set[int] = set()
        self.last_linear: str | None = None
        self.output: Any = None
        self.last_outputs: set[int] = set()
        self._last: Any = None
        self._running: list[nn.Module] = []
        self._owners: dict[int, set[nn.Module]] = {}
        for module in network.modules():
            whole = isinstance(module, nn.MultiheadAttention)  # reads its projection's weight without calling it
            for tensor in (*module.parameters(recurse=whole), *module.buffers(recurse=whole)):
                with suppress(RuntimeError, NotImplementedError):
                    if tensor.numel():
                        self._owners.setdefault(storage(tensor), set()).add(module)

    def run(self, arguments: Arguments, rows: int) -> _Look:
        """Run a pass."""
        args, kwargs = arguments
        forwards = {}
        for name, module in self.network.named_modules():
            self.calls[name] = []
            forwards[module] = self._watched(name, module, module.forward, rows)
        with patched_forward(forwards), self:
            output = self.network(*args, **kwargs)
        self.output = map_tensors(self._shown, output)
        return self

    def _shown(self, tensor: Tensor) -> Tensor:
        shown = torch.empty_like(tensor, device="meta")
        if isinstance(self._last, Tensor) and _same(self._last, tensor):
            self.last_outputs.add(id(shown))
        return shown

    def _watched(self, name: str, module: nn.Module, forward: Callable[..., Any], rows: int) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            x = first_tensor((args, kwargs))
            shape = None if x is None else x.shape
            self._running.append(module)
            try:
                output = forward(*args, **kwargs)
            finally:
                self._running.pop()
            size = 0

            def look(tensor: Tensor) -> Tensor:
                nonlocal size
                size = max(size, tensor.numel() // rows)
                return tensor

            map_tensors(look, output)
            made = first_tensor(output)
            self.calls[name].append((shape, None if made is None else made.shape, size))
            self.order.append((name, size))
            if isinstance(module, nn.Linear):
                self.last_linear, self._last = name, output
            return output

        return watched

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and look at what it reads."""
        del types
        map_tensors(self._read, (args, kwargs or {}))
        return operation(*args, **(kwargs or {}))

    def _read(self, tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            address = storage(tensor)
            owners = self._owners.get(address)
            if owners is not None and address not in self.outside and owners.isdisjoint(self._running):
                self.outside.add(address)
        return tensor


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are alike, NaN or not."""
    if one is other or one.shape != other.shape:
        return one is other
    return bool(((one == other) | ((one != one) & (other != other))).all())
