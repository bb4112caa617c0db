"""What every benchmark here does: times as multiples of the plain network's, in one run."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

__all__ = ["keep", "medians", "plain_step", "seconds"]


def plain_step(network: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Return a step of plain training."""
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.9, nesterov=True, weight_decay=5e-4)
    network.train()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        cross_entropy(network(x), y).backward()
        optimizer.step()

    return step


def seconds(function: Callable[[], object]) -> float:
    """Return the time of one call."""
    # With one thread the processor's time is the work, whatever else the machine does.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    function()
    return clock() - began


def medians(functions: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Return the median time of each function over that of the first, run in turn."""
    for function in functions.values():
        function()
    rounds = [{name: seconds(function) for name, function in functions.items()} for _ in range(repeats)]
    plain = next(iter(functions))
    return {name: round(statistics.median(r[name] / r[plain] for r in rounds), 3) for name in functions}


def keep(record: dict[str, Any], path: Path) -> None:
    """Print the tables of a record, and write it."""
    for title, table in record.items():
        if isinstance(table, dict):
            print(f"\n{title}, as multiples")
            for name, value in table.items():
                print(f"  {name:50}{value:8.3f}")
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1))
