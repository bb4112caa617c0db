"""A loader that several processes read together: each works on its share of the batches, all get every result."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from bayesify._core.processes import gather, num_processes, rank
from bayesify._core.trees import first_tensor, inputs_of

__all__ = ["Noted", "in_order"]

T = TypeVar("T")
_NONE: Any = object()  # no batch
_END = "end"
_LOOKED_AT = 1000  # numbers of a batch
_DEVIATES = (
    "Seed alike what shuffles them (torch's generators are taken from the first process), and give the loader of all "
    "data: it is divided here. Where each process is to work alone on data of its own, say so: with "
    "bayesify.one_process()."
)


class Noted:
    """A loader of which something is noted for every batch, in the order of the results of `in_order`.

    Args:
        loader: Batches.
        note: What to note of a batch.

    Attributes:
        notes: What was noted so far.
    """

    def __init__(self, loader: Iterable[Any], note: Callable[[Any], Any]) -> None:
        self.loader = loader
        self.note = note
        self.notes: list[Any] = []

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            self.notes.append(self.note(batch))
            yield batch


def in_order(
    loader: Iterable[Any], work: Callable[[Any], T], *, norm: Callable[[], float] | None = None
) -> Iterator[T]:
    """Give `work(batch)` for every batch of a loader, in its order, in every process.

    Of P processes each works on every P-th batch. A loader of a data set with positions is read so too; of others, as
    lists and data sets without positions, every process reads all batches and leaves out those of the others. What a
    `DistributedSampler` or Accelerate divided is taken as it was before. The results go to all processes in every
    round of P batches, so that one that raises ends all.

    Args:
        loader: The same in every process; `Noted` is known.
        work: What to do with a batch. Where there are several processes its results, lists and tuples of what has a
            method `cpu`, come back in main memory.
        norm: A number that must be the same in all processes: the norm of the weights.

    >>> list(in_order([1, 2, 3], lambda batch: 2 * batch))
    [2, 4, 6]
    """
    if num_processes() == 1:
        yield from map(work, loader)
        return
    noted = loader if isinstance(loader, Noted) else None
    own = noted.loader if noted is not None else loader
    first = gather((0.0 if norm is None else norm(), _random_states(own)))
    _require_alike([number for number, _ in first])
    rounds = _rounds(own, first[0][1])
    while True:
        sign, found, error = "", None, None
        try:
            sign, batch = next(rounds)
            if batch is not _NONE:
                found = (None if noted is None else noted.note(batch), _in_main_memory(work(batch)))
        except Exception as caught:
            error = caught
        results = gather((sign, found, None if error is None else (type(error).__name__, str(error))))
        if error is not None:
            raise error
        _raise_for_others([told for _, _, told in results])
        if len({sign for sign, _, _ in results}) > 1:
            raise ValueError(f"The processes read different batches, or a different number of them. {_DEVIATES}")
        if sign == _END:
            return
        for _, one, _ in results:
            if one is not None:
                if noted is not None:
                    noted.notes.append(one[0])
                yield one[1]


def _in_main_memory(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_in_main_memory(item) for item in value)
    return value.cpu() if hasattr(value, "cpu") else value


def _require_alike(norms: list[float]) -> None:
    if not all(math.isclose(norm, norms[0], rel_tol=1e-6) for norm in norms):
        raise ValueError(
            "The processes hold posteriors with different weights, so they cannot predict together. Load the same one "
            "in each, or make them the same by fit; or let each predict alone: with bayesify.one_process()."
        )


def _raise_for_others(errors: list[tuple[str, str] | None]) -> None:
    for index, error in enumerate(errors):
        if error is not None:
            kind = {"ValueError": ValueError, "TypeError": TypeError}.get(error[0], RuntimeError)
            raise kind(f"Process {index} failed: {error[0]}: {error[1]}")


def _rounds(loader: Iterable[Any], states: list[torch.Tensor]) -> Iterator[tuple[str, Any]]:
    """Give for each round of batches a sign of them all, and this process's own, or none."""
    plain = _undivided(loader)
    stream = _Stream(states[0])
    for generator, state in zip(_generators(loader), states[1:], strict=True):
        generator.set_state(state)
    if not _has_positions(plain):
        for some in _groups(plain, stream):
            yield _sign([_content(batch) for batch in some]), some[rank()] if rank() < len(some) else _NONE
    else:
        if plain.generator is None:
            stream.run(lambda: torch.empty((), dtype=torch.int64).random_())  # as torch's loader does for its workers
        batched = plain.batch_sampler is not None
        share = _Share(plain.batch_sampler if batched else plain.sampler, stream)
        batches = iter(_rebuilt(plain, share, batched=batched))
        count = 0
        while True:
            batch = next(batches, _NONE)
            if count == len(share.signs):
                break
            yield share.signs[count], batch
            count += 1
    yield _END, _NONE


class _Share:
    """Every P-th of a sampler's batches."""

    def __init__(self, sampler: Iterable[Any], stream: _Stream) -> None:
        self.sampler, self.stream = sampler, stream
        self.signs: list[str] = []

    def __iter__(self) -> Iterator[Any]:
        for some in _groups(self.sampler, self.stream):
            self.signs.append(_sign(some))
            if rank() < len(some):
                yield some[rank()]


class _Stream:
    """A state of torch's global generator that is the first process's, beside the one that this process has."""

    def __init__(self, state: torch.Tensor) -> None:
        self.state = state

    def run(self, function: Callable[[], T]) -> T:
        before = torch.get_rng_state()
        torch.set_rng_state(self.state)
        try:
            return function()
        finally:
            self.state = torch.get_rng_state()
            torch.set_rng_state(before)


def _groups(items: Iterable[Any], stream: _Stream) -> Iterator[list[Any]]:
    """Give lists of P items; what makes them draws the same numbers in every process."""
    iterator = stream.run(lambda: iter(items))
    while some := stream.run(lambda: list(islice(iterator, num_processes()))):
        yield some


def _undivided(loader: Any) -> Any:
    """Return the loader of all data of which a DistributedSampler or Accelerate gave this process a part."""
    if hasattr(loader, "base_dataloader"):  # Accelerate's
        batched = loader.batch_sampler is not None
        sampler, data = loader.batch_sampler if batched else loader.sampler, loader.dataset
        while hasattr(sampler, "batch_sampler"):
            sampler = sampler.batch_sampler
        if isinstance(data, IterableDataset):
            inner = data.dataset if hasattr(data, "num_processes") and hasattr(data, "dataset") else data
            return DataLoader(inner, batch_size=loader.batch_size, collate_fn=loader.collate_fn)
        return _rebuilt(loader, sampler, batched=batched)
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or type(sampler).__iter__ is not DistributedSampler.__iter__:
        return loader
    if type(loader.batch_sampler) is BatchSampler:
        order = BatchSampler(_order(sampler), loader.batch_size, loader.batch_sampler.drop_last)
        return _rebuilt(loader, order, batched=True)
    return loader


def _order(sampler: DistributedSampler[Any]) -> Any:
    """Return the order of which a DistributedSampler takes every P-th, without what it repeats or drops."""
    size = len(sampler.dataset)  # type: ignore[arg-type]
    if not sampler.shuffle:
        return SequentialSampler(range(size))
    return torch.randperm(size, generator=torch.Generator().manual_seed(sampler.seed + sampler.epoch)).tolist()


def _has_positions(loader: Any) -> bool:
    """Return whether a loader takes examples by position, and is no class of its own that may do otherwise."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    return type(loader).__iter__ is DataLoader.__iter__


def _rebuilt(loader: Any, sampler: Any, *, batched: bool) -> DataLoader[Any]:
    """Return a loader that differs in its order alone."""
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    options = {name: getattr(loader, name) for name in (*names, "generator")}
    if loader.num_workers:
        options["prefetch_factor"] = loader.prefetch_factor
    order = {"batch_sampler": sampler} if batched else {"sampler": sampler, "batch_size": None}
    return DataLoader(loader.dataset, **order, **options)


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the generators that a loader owns."""
    owners = (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    inner = getattr(owners[2], "sampler", None)
    found = (getattr(owner, "generator", None) for owner in (*owners, inner))
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def _random_states(loader: Any) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(generator.get_state() for generator in _generators(loader))]


def _content(batch: Any) -> Any:
    """Return what tells a batch from others: the shape of its first tensor, and some of its numbers."""
    tensor = first_tensor(inputs_of(batch))
    if tensor is None:
        return None
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, len(flat) // _LOOKED_AT)].cpu().contiguous()
    return tuple(tensor.shape), some.view(torch.uint8).numpy().tobytes() if some.numel() else b""


def _sign(values: list[Any]) -> str:
    return hashlib.blake2b(repr(values).encode(), digest_size=16).hexdigest()
