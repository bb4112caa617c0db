"""The table of tasks by methods: what each row of the scoreboard gains over the plain network with a temperature."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.board_tables import made_rows
from experiments.configs.scoreboard import TABLES as UCI
from experiments.records import RESULTS
from experiments.tables import markdown, shown

__all__ = ["TASKS", "tasks"]

# Each task with the experiments whose rows predict the same test examples; the first has the bar.
COLUMNS = {
    "CIFAR-10, ResNet-20": ("scoreboard_cifar_resnet20", "gain_cifar", "gain_methods", "gain_student"),
    "CIFAR-10, ResNet-44": ("scoreboard_cifar_resnet44",),
    "Fashion-MNIST, LeNet": ("scoreboard_fashion", "gain_fashion"),
    "CLINC150": ("scoreboard_clinc",),
    "scenes": ("scoreboard_scenes",),
}
BARS = ("plain + temperature", "plain + scale of the variance")
ROWS = {
    "the network as it is": "plain",
    "a mirrored view": "plain + mirror, log-probabilities",
    "`choose(passes=2)`": "chosen, 2 passes",
    "`choose(passes=4)`": "chosen, 4 passes",
    "dropout before the last layer, widened": "dropout before the last layer, widened",
    "last-layer Laplace": "Laplace, last layer",
    "BayesAdapter, not fitted, widened": "BayesAdapter, not fitted, widened",
    "iBNN, not fitted, widened": "iBNN, not fitted, widened",
    "ABNN, not fitted, widened": "ABNN, not fitted, widened",
    "plain fine-tuning": "plain fine-tuning",
    "BayesAdapter, trained": "BayesAdapter",
    "iBNN, trained": "iBNN",
    "ABNN, trained": "ABNN",
    "heads on one trunk": "heads on one trunk",
    "snapshots": "snapshots",
    "cyclical SGHMC": "cyclical SGHMC",
    "three restarts": "restarts",
    "the network and one restart": "network + 1 restart, 2 passes, probabilities",
    "the network and two restarts, mirrored": "network + 2 restarts, 6 passes, log-probabilities",
    "student of these, mirrored": "student + mirror, log-probabilities",
    "the network and three restarts": "network + 3 restarts, 4 passes, probabilities",
    "the same, mirrored": "network + 3 restarts, 8 passes, probabilities",
    "three networks trained apart": "ResNet-20, 32, 44 trained apart, 3 passes, probabilities",
}


def _gains(experiments: tuple[str, ...], folder: Path) -> dict[str, tuple[float, float]]:
    """Return each row's passes, and its gain in NLL over the bar on the seeds that both have first."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for name in experiments:
        rows = made_rows(name, folder) | rows
    bar = next((rows[name] for name in BARS if name in rows), None)
    found = {}
    for name, made in rows.items() if bar else ():
        both = zip(bar or (), made, strict=False)
        gain = statistics.mean(before["test"]["nll"] - after["test"]["nll"] for before, after in both)
        passes = made[0]["passes"] or made[0]["cost in plain passes"]  # without draws there is none to count
        found[name] = (float(passes), gain)
    return found


def tasks(*, folder: Path = RESULTS) -> str:
    """Return gains in nats, higher is better, of the rows that were measured; of UCI tables the median over tables."""
    columns = {title: _gains(names, folder) for title, names in COLUMNS.items()}
    tables = [_gains((f"scoreboard_uci_{table}",), folder) for table in UCI]
    measured = [found for found in tables if found]
    names = dict.fromkeys(name for found in measured for name in found)
    columns["UCI, median of five"] = {
        name: (given[0][0], statistics.median(gain for _, gain in given))
        for name in names
        if len(given := [found[name] for found in measured if name in found]) == len(UCI)
    }
    columns = {title: found for title, found in columns.items() if found}
    lines = [["gain in NLL", "passes", *columns]]
    for label, row in ROWS.items():
        have = [found[row] for found in columns.values() if row in found]
        if have:
            cells = [_signed(found[row][1]) if row in found else "" for found in columns.values()]
            passes = sorted({round(one) for one, _ in have})
            lines.append([label, " or ".join(map(str, passes)), *cells])
    return markdown(lines)


def _signed(value: float) -> str:
    text = shown(value, 3)
    return text if text.startswith("−") or not float(text) else f"+{text}"


TASKS: dict[str, Callable[[], str]] = {"which-tasks": tasks}
