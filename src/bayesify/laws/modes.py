"""Which mode a pass is in: what was entered and not left, by whoever runs the pass."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

__all__ = ["ModeStack"]


class _Entry:
    __slots__ = ("mode", "open", "stack")

    def __init__(self, stack: object, mode: dict[str, Any]) -> None:
        self.stack = stack
        self.mode = mode
        self.open = True


# A thread and an asyncio task have a context of their own, which starts with what their maker was in. It is kept by
# snapshots for as long as these live, so entries must not hold a posterior.
_ENTERED: ContextVar[tuple[_Entry, ...]] = ContextVar("bayesify_modes", default=())


class ModeStack:
    """The modes of one posterior, and the lock of its passes.

    A mode belongs to the thread, or the asyncio task, that entered it, and to the tasks that this one starts inside.
    Leaving takes away what was entered, and nothing else, so that contexts which overlap, or which end in another
    thread, leave nothing behind. A generator has no context of its own: while it is suspended inside a mode, its caller
    is in that mode too.

    The lock is held by one pass at a time, never by a mode.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._mark = object()
        _LIVE.add(self)

    @contextmanager
    def enter(self, **mode: Any) -> Iterator[None]:
        """Set parts of the mode for a while."""
        entry = _Entry(self._mark, mode)
        _ENTERED.set((*_opened(), entry))
        try:
            yield
        finally:
            entry.open = False
            _ENTERED.set(_opened())

    def present(self, name: str, default: Any) -> Any:
        """Return a part of the present mode: what was entered last and not left."""
        for entry in reversed(_ENTERED.get()):
            if entry.stack is self._mark and entry.open and name in entry.mode:
                return entry.mode[name]
        return default


def _opened() -> tuple[_Entry, ...]:
    return tuple(entry for entry in _ENTERED.get() if entry.open)


# A process that is forked while another thread is inside a pass would find the lock held, and the pass's tensors in the
# network's place, for ever. So a fork waits for passes to end.
_LIVE: weakref.WeakSet[ModeStack] = weakref.WeakSet()
_WAIT = 60.0  # seconds; a pass may itself wait for the thread that forks
_forking = threading.local()


def _before_fork() -> None:
    live: list[Any] = list(_LIVE)
    # One that is inside a pass must not wait for another, which may be waiting for it likewise.
    wait = 0.0 if any(stack.lock._is_owned() for stack in live) else _WAIT
    _forking.live, _forking.held = live, [stack for stack in live if stack.lock.acquire(timeout=wait)]


def _after_fork_in_parent() -> None:
    for stack in _forking.held:
        stack.lock.release()
    _forking.live, _forking.held = [], []


def _after_fork_in_child() -> None:
    for stack in _forking.live:
        if stack not in _forking.held:
            stack.lock = threading.RLock()  # of a thread that is not here
    _after_fork_in_parent()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
