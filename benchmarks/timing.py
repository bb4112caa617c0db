"""What every benchmark here does: times as multiples of the plain network's, in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments.records import Records

__all__ = ["keep", "medians", "plain_step", "seconds", "settle_allocator"]

RESULTS = Path(__file__).parent / "results"
BEGAN = time.perf_counter()  # of the run


def plain_step(network: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Return a step of plain training."""
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.9, nesterov=True, weight_decay=5e-4)
    network.train()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        cross_entropy(network(x), y).backward()
        optimizer.step()

    return step


def settle_allocator() -> None:
    """Let the allocator keep what passes free, so that it is passes that are timed.

    The C library's gives memory of some megabytes back after each use, and gets it again page by page, until a process
    has freed a larger piece, as loading a data set does.
    """
    torch.zeros(2**23 - 2**14)


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


def keep(benchmark: str, tables: Mapping[str, Any], **settings: Any) -> None:
    """Print tables of ratios, and append each to `benchmarks/results/<benchmark>.json`.

    A row has the shape of the experiments' (`experiments/records.py`): settings, commit, versions, processor, command.
    Rows of earlier runs stay, to be compared with.

    Args:
        benchmark: The name of the file.
        tables: Figures by title.
        settings: What they depend on.
    """
    records = Records(RESULTS / f"{benchmark}.json", {"benchmark": benchmark, **settings})
    for title, table in tables.items():
        print(f"\n{title}")
        figures = table.items() if isinstance(table, dict) else enumerate(table)
        for name, value in figures:
            print(f"  {name!s:50}{value:8.3f}" if isinstance(value, float) else f"  {name!s:50}{value}")
        records.append(title, {"figures": table}, seconds=time.perf_counter() - BEGAN)
