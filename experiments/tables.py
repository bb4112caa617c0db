"""Print results files as tables: `python -m experiments.tables experiments/results/abnn_cifar_main_resnet20.json`.

A line is a method before and after temperature scaling, or with the variance scale of a prediction without draws. A
cell is the mean over seeds or splits, with the standard deviation where there are several. `--columns` chooses among
the measures of the file.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from pathlib import Path
from typing import Any

__all__ = ["cell", "grouped", "table"]

COLUMNS = ("accuracy", "nll", "ece", "aurc")
SUFFIXES = {"": "", ", calibrated": " + temperature", ", scaled": " + scale"}


def grouped(rows: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each name, which ends before its seed or split.

    >>> grouped({"a, seed 0": {"x": 1}, "a, seed 1": {"x": 2}, "b": {}})
    {'a': [{'x': 1}, {'x': 2}], 'b': [{}]}
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for name, row in rows.items():
        found.setdefault(re.sub(r", (seed|split) \d+$", "", name), []).append(row)
    return found


def cell(name: str, values: list[float]) -> str:
    """Return the mean, and the standard deviation of several.

    >>> cell("accuracy", [0.5, 0.75, 0.25]), cell("nll", [0.24623])
    ('50.00 ± 25.00', '.2462')
    """
    scale, digits = {"accuracy": (100, 2), "ece": (100, 2), "miou": (100, 1), "aurc": (1000, 2)}.get(
        name.partition("/")[0], (1, 3 if "/" in name else 4)
    )

    def shown(value: float) -> str:
        return f"{scale * value:.{digits}f}".removeprefix("0") or "0"

    mean = shown(statistics.mean(values))
    return f"{mean} ± {shown(statistics.stdev(values))}" if len(values) > 1 else mean


def table(record: dict[str, Any], columns: list[str], part: str = "test") -> str:
    """Return a table in Markdown; accuracies, ECE and mIoU in per cent, AURC in thousandths."""
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, rows in grouped(record["rows"]).items():
        for key, first in rows[0].items():
            of_part = key.startswith(part) or not key.startswith(("test", "validation"))
            if isinstance(first, dict) and columns[0] in first and of_part:
                cells = [cell(column, [row[key][column] for row in rows]) for column in columns if column in first]
                label = SUFFIXES.get(key.removeprefix(part), f": {key}")
                lines.append(f"| {name}{label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the tables of some files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--columns", nargs="*", default=list(COLUMNS))
    parser.add_argument("--part", default="test", help="test or validation")
    arguments = parser.parse_args()
    for path in arguments.files:
        record = json.loads(path.read_text())
        print(f"\n{path.stem} (`{record['command']}`)\n\n{table(record, arguments.columns, arguments.part)}")


if __name__ == "__main__":
    main()
