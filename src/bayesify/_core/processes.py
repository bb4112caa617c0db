"""Several processes that work on one posterior: what they tell each other, and what is said where one is lost."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "alone",
    "as_long_as_all",
    "gather",
    "is_sharded",
    "num_processes",
    "one_process",
    "others_expected",
    "rank",
    "shared_random_state",
    "whole",
]

T = TypeVar("T")
_ALONE: ContextVar[bool] = ContextVar("alone", default=False)
# What gloo, NCCL and the store say of a process that is gone or late.
_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|timed? ?out|socket|remote process exited|heartbeat", re.I
)
_CONTROL: dict[str, Any] = {}  # the group for flags of the present world


@contextmanager
def one_process() -> Iterator[None]:
    """Work in this process alone, which shares nothing with other processes and does not wait for them.

    Under `torchrun`, `predict`, `evaluate`, `calibrate`, `widen` and `choose` divide a loader between the processes,
    and so wait for all of them. Where one process alone calls them, it says so with this.

    Example:
        >>> import torch
        >>> from bayesify import convert, one_process, predict
        >>> with one_process():  # under torchrun: if rank == 0
        ...     prediction = predict(convert(torch.nn.Linear(4, 3), "map"), [torch.randn(5, 4)])
        >>> len(prediction)
        5
    """
    before = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(before)


def alone() -> bool:
    """Return whether this is inside of `one_process`."""
    return _ALONE.get()


def num_processes() -> int:
    """Return how many processes there are; 1 outside of `torch.distributed`, and inside of `one_process`.

    >>> num_processes()
    1
    """
    return dist.get_world_size() if not alone() and dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this process, from 0.

    >>> rank()
    0
    """
    return dist.get_rank() if num_processes() > 1 else 0


def gather(value: Any) -> list[Any]:
    """Return every process's value, in the order of their ranks."""
    if num_processes() == 1:
        return [value]
    found: list[Any] = [None] * num_processes()
    with others_expected():
        dist.all_gather_object(found, value)
    return found


@contextmanager
def others_expected(advice: str = "") -> Iterator[None]:
    """Say in a sentence that another process is gone, where a message to it fails.

    Args:
        advice: What to do now.
    """
    try:
        yield
    except RuntimeError as error:
        if num_processes() == 1 or not _LOST.search(str(error)):
            raise
        raise ConnectionError(
            f"Another process of this run has ended, or did not answer in time, so process {rank()} of "
            f"{num_processes()} ends too. See what the other one said last (memory, a signal, an exception).{advice}"
        ) from error
    except ConnectionError as error:
        if not advice or advice in str(error):
            raise
        raise ConnectionError(f"{error}{advice}") from error


def as_long_as_all(batches: Iterable[T]) -> Iterator[T]:
    """Give batches as long as every process has one; where some end before others, all raise.

    Each step of a training waits for all processes. So without this one whose loader ends early would leave the others
    waiting. It costs a message of four bytes between processors before each batch.
    """
    processes = num_processes()
    if processes == 1:
        yield from batches
        return
    group = _control_group()
    iterator, taken, nothing = iter(batches), 0, object()
    while True:
        batch: Any = next(iterator, nothing)
        flags = torch.zeros(processes, dtype=torch.int32)
        flags[rank()] = batch is not nothing
        with others_expected():
            dist.all_reduce(flags, group=group)
        if not bool(flags.any()):
            return
        if not bool(flags.all()):
            ended = [index for index, flag in enumerate(flags.tolist()) if not flag]
            raise ValueError(
                f"The loader of process {', '.join(map(str, ended))} ended after {taken} batches, and others have "
                "more. Every step waits for all processes: give each of them as many batches, by a DistributedSampler "
                "or with drop_last=True, and a loader as many as its length announces."
            )
        taken += 1
        yield batch


def _control_group() -> Any:
    """Return a group for messages in main memory: the world's own where it can, else one beside it."""
    if "gloo" in str(dist.get_backend_config()):
        return None
    world = str(id(dist.group.WORLD))
    if world not in _CONTROL:
        _CONTROL.clear()
        _CONTROL[world] = dist.new_group(backend="gloo")
    return _CONTROL[world]


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a process holds a part of a tensor only, as `fully_shard` leaves it.

    >>> is_sharded(torch.nn.Parameter(torch.zeros(2)))
    False
    """
    return type(tensor.data) is not Tensor


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor of which a process may hold a part; every process must ask.

    >>> whole(torch.ones(1))
    tensor([1.])
    """
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


@contextmanager
def shared_random_state() -> Iterator[None]:
    """Draw the first process's random numbers in all of them; where there is one, nothing is different."""
    if num_processes() == 1:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(gather(torch.get_rng_state())[0])
        yield
