"""What a posterior needs for its passes, and no copy or file of it takes over."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from bayesify._core.random import Noise
from bayesify.laws.kept import KeptDraws
from bayesify.laws.modes import ModeStack
from bayesify.laws.patching import Slots
from bayesify.laws.recomputation import Guard
from bayesify.laws.trace import Trace

__all__ = ["Runtime"]

MOST_TRACES = 8  # of different kinds of inputs, which a client may choose


class Runtime:
    """The modes and the lock of a posterior's passes, and what was found out of its network.

    Attributes:
        modes: What was entered with `with posterior.mean():` and the like, and the lock of passes.
        guard: What refuses layers that run again in the backward pass.
        slots: Where the network holds the tensors that passes replaced last.
        traces: Dry runs, by the signature of their inputs.
        noise: The random numbers of activations.
        kept: Weights of the last draws.
        modes_learned: Whether there may be gradients of passes that were not fresh.
    """

    def __init__(self) -> None:
        self.modes = ModeStack()
        self.guard = Guard(self.runs_here)
        self.slots: Slots = {}
        self.traces: OrderedDict[Any, Trace] = OrderedDict()
        self.noise = Noise()
        self.kept = KeptDraws()
        self.modes_learned = False
        self.runner: int | None = None  # the thread of the present pass

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        """Return a new one: copies of a posterior are in no mode."""
        copied = memo[id(self)] = Runtime()
        return copied

    def __reduce__(self) -> tuple[type[Runtime], tuple[()]]:
        """Pickle as a new one."""
        return (Runtime, ())

    def runs_here(self) -> bool:
        """Return whether the present thread is inside a pass."""
        return self.runner == threading.get_ident()

    def keep(self, signature: Any, trace: Trace) -> None:
        """Keep a trace, and forget the one that was made first where there are too many."""
        self.traces[signature] = trace
        while len(self.traces) > MOST_TRACES:
            self.traces.popitem(last=False)

    def forget(self, trace: Trace) -> None:
        """Forget a trace of inputs that no pass went well with: malformed inputs teach nothing."""
        if not trace.proven:
            self.traces = OrderedDict((key, kept) for key, kept in self.traces.items() if kept is not trace)
