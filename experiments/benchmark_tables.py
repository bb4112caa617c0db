"""The tables of the page of benchmarks: every figure of `benchmarks/results`, with its command and commit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from experiments.records import ROOT, UNKNOWN
from experiments.tables import markdown, shown

__all__ = ["BENCHMARKS", "benchmark", "information"]

FOLDER = ROOT / "benchmarks" / "results"
NAMES = (
    "predict", "views", "streamlined", "abnn", "adapter", "ibnn", "laplace", "sgld", "memory", "pool", "isolation",
)  # fmt: skip


def benchmark(name: str, *, folder: Path = FOLDER) -> str:
    """Return the tables of a results file, each below its name, command and commit.

    Of rows of one name and configuration the last is shown. Rows with a few numbers each are put into one table.
    """
    found = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    if not isinstance(found.get("rows"), list):
        return "\n\n".join(_group(title, part) for title, part in found.items() if _is_group(part))
    last = {(row["name"], str(row["config"])): row for row in found["rows"]}
    tables: dict[str, list[list[str]]] = {}
    for row in last.values():
        figures = row["measures"].get("figures")
        if figures is None:
            numbers = {key: value for key, value in row["measures"].items() if _is_number(value)}
            lines = tables.setdefault(f"*{_source(row, name)}*", [["", *numbers]])
            lines.append([row["name"], *map(_shown, numbers.values())])
        else:
            tables[f"**{_capital(row['name'])}** (*{_source(row, name)}*)"] = _lines(figures)
    return "\n\n".join(f"{title}\n\n{markdown(lines)}" for title, lines in tables.items())


def information(*, folder: Path = FOLDER) -> str:
    """Return the table of mutual information without draws over that of draws: a line for each network, width and way.

    Of rows of one network and width the last is shown, below the commands that made them.
    """
    rows = json.loads((folder / "information.json").read_text(encoding="utf-8"))["rows"]
    last = {(row["config"]["network"], row["config"]["width"]): row for row in rows}
    titles = ["network", "width", "inputs", "predictor", "information", "surer half", "other half", "variance", "rank"]
    lines = [titles]
    for (network, width), row in sorted(last.items()):
        inputs = row["name"].split(" inputs")[0].rsplit(" ", 1)[-1]
        for way, found in row["measures"]["figures"].items():
            if way in row["config"]["how"]:
                rank = f"{_shown(found['rank'])} ({_shown(found['low'])} to {_shown(found['high'])})"
                lines.append([network, f"{width:g}", inputs, way, *(_shown(found[key]) for key in titles[4:-1]), rank])
    sources = "; ".join(dict.fromkeys(_source(row, "information") for row in last.values()))
    return f"*{sources}*\n\n{markdown(lines)}"


def _lines(figures: Any) -> list[list[str]]:
    """Return the lines of a table of numbers by name, of tables by name, or of a list of tables."""
    if isinstance(figures, list):
        first, *titles = figures[0]
        return [["", *titles], *([str(one[first]), *(_shown(one[title]) for title in titles)] for one in figures)]
    if not any(isinstance(value, Mapping) for value in figures.values()):
        return [["", "figure"], *([label, _shown(value)] for label, value in figures.items())]
    titles = list(dict.fromkeys(key for value in figures.values() if isinstance(value, Mapping) for key in value))
    lines = [["", *titles]]
    for label, value in figures.items():
        cells = value if isinstance(value, Mapping) else {titles[0]: value}
        lines.append([label, *(_shown(cells.get(title)) for title in titles)])
    return lines


def _group(title: str, part: Mapping[str, Any]) -> str:
    source = f"`{part['command']}`, commit {part['commit'][:8]}"
    return f"**{_capital(title)}** (*{source}*)\n\n{markdown(_lines(part['rows']))}"


def _is_group(part: Any) -> bool:
    return isinstance(part, Mapping) and {"command", "commit", "rows"} <= set(part)


def _source(row: Mapping[str, Any], name: str) -> str:
    made = row["provenance"]
    command = f"`{row['command'] or f'python -m benchmarks.{name}'}`"
    if made == UNKNOWN or made.get("commit") is None:
        return f"{command}, commit not recorded"
    return f"{command}, commit {made['commit'][:8]}{' with changes' if made['dirty'] else ''}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _shown(value: Any) -> str:
    """Return three or more digits of a number.

    >>> [_shown(value) for value in (0.03961, 1.025, 36.009, 651821056, None, "yes")]
    ['.040', '1.02', '36.0', '651,821,056', '', 'yes']
    """
    if value is None:
        return ""
    if not _is_number(value):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return shown(value, 3 if abs(value) < 1 else 2 if abs(value) < 10 else 1)


BENCHMARKS: dict[str, Callable[[], str]] = {
    **{f"benchmark-{name}": partial(benchmark, name) for name in NAMES},
    "benchmark-information": information,
}
