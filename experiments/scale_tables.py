"""What a number of inputs a day costs in machines, computed from what was measured on one core."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.scale import WAYS
from experiments.tables import markdown, rows_of, shown

__all__ = ["SCALE", "cores"]

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
INPUTS, BUSY, CORES = 1e9, 0.7, 64  # a day; the share of a core's time that is planned with; of a machine
NAMES = {
    "plain": "the plain network alone",
    "guard": "verdicts from a tensor",
    "decide": "`bayesify decide`, Parquet to JSON lines",
    "ray": "Ray Data, two workers, Parquet to Parquet",
}


def cores(seconds: float) -> int:
    """Return how many cores a billion inputs a day need, each of which takes so many seconds of one.

    >>> cores(0.0864 * 0.7)  # 1,000 seconds of every second, of cores that are busy for 70 % of theirs
    1000
    """
    return math.ceil(round(INPUTS * seconds / 86_400 / BUSY, 6))


def networks() -> str:
    """Return what predictions by ResNet-20 cost."""
    figures = rows_of("scale", "seconds for each input", folder=RESULTS)[-1]["figures"]
    plain = figures[WAYS[0]]
    lines = [["", "ms of a core for an input", "plain passes", "cores for 10⁹ a day", f"machines of {CORES} cores"]]
    for name in WAYS:
        needed = cores(figures[name])
        multiple = shown(figures[name] / plain, 1)
        lines.append([name, shown(1000 * figures[name], 2), multiple, f"{needed:,}", f"{math.ceil(needed / CORES):,}"])
    return markdown(lines)


def rows() -> str:
    """Return what reading, deciding and writing rows cost."""
    found: dict[str, Any] = json.loads((RESULTS / "deciding.json").read_text(encoding="utf-8"))
    lines = [["", "seconds of CPU", "µs for a row", "peak MB of a process", "cores for 10⁹ a day"]]
    for name, label in NAMES.items():
        if name in found["parts"]:
            one = found["parts"][name]
            each = one["seconds"] / found["rows"]
            row = [label, shown(one["seconds"], 1), shown(1e6 * each, 1), f"{one['peak_mb']:.0f}", f"{cores(each):,}"]
            lines.append(row)
    return markdown(lines)


SCALE: dict[str, Callable[[], str]] = {"scale-networks": networks, "scale-rows": rows}
