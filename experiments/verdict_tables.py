"""Tables of what guards promise and of drift, from the rows that there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from experiments.drift import SHIFTS
from experiments.tables import markdown, rows_of, shown
from experiments.verdicts import POSTERIORS, PROMISES

__all__ = ["VERDICTS"]


def _row(file: str, name: str) -> Mapping[str, Any] | None:
    try:
        found: Mapping[str, Any] = rows_of(file, name)[0]
    except (KeyError, FileNotFoundError):
        return None
    return found


def promises() -> str:
    """Return what guards answered, and how often promises were broken, for the posteriors that were run."""
    heads = [
        "", "max_risk", "examples", "refused %", "broken % (at most 5)", "answered %", "risk %", "known called OOD %",
        "Fashion-MNIST let pass %", "notMNIST let pass %", "coverage of sets %", "its lowest class %", "set size",
        "coverage by class, lowest %", "set size by class",
    ]  # fmt: skip
    lines = [heads]
    for risk, size in PROMISES:
        for name in POSTERIORS:
            row = _row("verdicts_cifar", f"{name}, {risk:g} of {size}")
            if row is None:
                continue
            start = [name, f"{100 * risk:g} %", f"{size:,}", _percent(row, "refused"), _percent(row, "broken")]
            percents = (
                "answered", "risk", "known called OOD", "fpr fashion-mnist", "fpr notmnist", "set coverage",
                "set coverage by class, lowest",
            )  # fmt: skip
            own = [_percent(row, one, 2 if one == "risk" else 1) for one in percents]
            sizes = [
                shown(row["set size"], 2) if "set size" in row else "",
                _percent(row, "own coverage by class, lowest"),
                shown(row["own set size"], 2) if "own set size" in row else "",
            ]
            lines.append([*start, *own, *sizes])
    return markdown(lines)


def drift() -> str:
    """Return false alarms and delays of the streams that were run."""
    lines = [["", "false_alarm", "alarms before the change %", "found %", "delay, median", "delay, 90 %"]]
    for rate in (0.01, 0.1):
        for name in SHIFTS:
            row = _row("drift", f"{name}, {rate:g}")
            if row is not None:
                never = "nothing" in name
                delays = ["" if never else _delay(row[key]) for key in ("median", "ninety")]
                found = _percent(row, "found")
                lines.append([name, f"{100 * rate:g} %", _percent(row, "false alarms"), found, *delays])
    return markdown(lines)


def _percent(row: Mapping[str, Any], name: str, digits: int = 1) -> str:
    return shown(100 * row[name], digits) if row.get(name) is not None else ""


def _delay(value: float | None) -> str:
    return "never" if value is None else f"{value:.0f}"


VERDICTS: dict[str, Callable[[], str]] = {"verdicts-cifar": promises, "verdicts-drift": drift}
