"""What things cost, in units that do not depend on the machine: times over the time of what everybody knows."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import torch

import bayesify
from experiments.config import Setting

__all__ = ["epoch_seconds", "now", "seconds"]

STEPS = 5  # of the plain training that is timed, after one that warms up


def now() -> float:
    """Return this process's own time where it has one thread, which other processes do not disturb."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def seconds(function: Callable[[], Any]) -> float:
    """Return how long a function takes."""
    began = now()
    function()
    return max(now() - began, 1e-9)


def epoch_seconds(setting: Setting) -> float:
    """Return how long an epoch of the plain network takes: forward and backward passes, and steps of Adam.

    A few steps of a copy of the network are timed, the first left out, and scaled to the number of training examples:
    `num_data` where the loader has only some of them.
    """
    plain = bayesify.convert(setting.network, "map", likelihood=copy.deepcopy(setting.likelihood)).train()
    optimizer = torch.optim.Adam([weight for weight in plain.parameters() if weight.requires_grad], lr=0.0)
    total: int = setting.fitting.get("num_data", len(setting.train.dataset))  # type: ignore[arg-type]

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        plain.loss(batch, num_data=total).total.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    examples, spent = 0, 0.0
    with torch.random.fork_rng(devices=[]):  # a shuffled loader and dropout draw
        for number, batch in enumerate(islice(setting.train, STEPS + 1)):
            took = seconds(partial(step, batch))
            if number or len(setting.train) == 1:
                spent += took
                examples += len(plain.split_batch(batch)[1])
    return spent / examples * total
