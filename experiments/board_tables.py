"""The tables of the scoreboard's page, of the rows that have been made; a task without rows says how they are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments.configs import gain
from experiments.configs.scoreboard import EXPERIMENTS, TABLES
from experiments.records import PICTURES, RESULTS
from experiments.tables import Cell, markdown, rows_of, shown

__all__ = ["BOARDS", "board", "made_rows", "uci"]

Columns = Mapping[str, Cell | Sequence[Cell]]

QUALITY: Columns = {
    "fit": Cell(("fit in plain epochs",), digits=2, spread=False),
    "made ready": Cell(("made ready in predictions of the validation set",), digits=0, spread=False),
    "passes": Cell(("passes",), digits=0, spread=False),
    "cost": Cell(("cost in plain passes",), digits=1, spread=False),
    "error %": Cell(("test", "error"), 100, 2),
    "NLL": Cell(("test", "nll")),
    "Brier": Cell(("test", "brier")),
    "ECE %": Cell(("test", "ece"), 100, 2),
    "AURC 1e-3": Cell(("test", "aurc"), 1000, 2),
    "answered at 1 % risk, %": Cell(("test", "coverage at 1 % risk"), 100, 1),
}
SHIFT: Columns = {
    **{
        f"{kind} {title}": [
            Cell((kind, f"{measure}-{score}"), digits=3, spread=False) for score in ("total", "epistemic")
        ]
        for kind in ("near", "far")
        for title, measure in (("AUROC", "auroc"), ("FPR95", "fpr95"))
    },
    "shift: error %": Cell(("shift", "error"), 100, 1),
    "NLL": Cell(("shift", "nll"), digits=3),
    "ECE %": Cell(("shift", "ece"), 100, 1),
}
# The page that helps to choose shows what rows cost and gain in short; those of a tuple are of another experiment.
TASK = "scoreboard_cifar_resnet20"
ONE, TWO = "network + 1 restart", "network + 2 restarts"
CHOSEN_ROWS: dict[str, str | tuple[str, str]] = {
    "the network as it is": "plain",
    "+ a temperature": "plain + temperature",
    "+ a mirrored view": "plain + mirror, log-probabilities",
    "`choose(passes=4)`: four views": "chosen, 4 passes",
    "dropout before the last layer, widened": "dropout before the last layer, widened",
    "last-layer Laplace": "Laplace, last layer",
    "BayesAdapter, not fitted, widened": "BayesAdapter, not fitted, widened",
    "the same, mirrored": "BayesAdapter, not fitted, widened + mirror",
    "the network and a restart of 12 epochs, mirrored": ("gain_cifar", f"{ONE}, 4 passes, log-probabilities"),
    "the same, four views": ("gain_cifar", f"{ONE}, 8 passes, log-probabilities"),
    "the network and two restarts, mirrored": ("gain_cifar", f"{TWO}, 6 passes, log-probabilities"),
    "the same two, four views": ("gain_cifar", f"{TWO}, 12 passes, log-probabilities"),
    "BayesAdapter, ten epochs": ("gain_methods", "BayesAdapter"),
    "the network, a restart and BayesAdapter, four views": (
        "gain_cifar",
        "network + restart 3 + BayesAdapter, 12 passes, log-probabilities",
    ),
}
README_ROWS = (
    "the network as it is",
    "+ a temperature",
    "+ a mirrored view",
    "`choose(passes=4)`: four views",
    "the network, a restart and BayesAdapter, four views",
)
REGRESSION = {"RMSE": ("rmse", 1, 2), "CRPS": ("crps", 1, 3), "covered %": ("coverage", 100, 0)}


def made_rows(name: str, folder: Path = RESULTS) -> dict[str, list[dict[str, Any]]]:
    """Return the measures of the rows that are there, for all seeds, in the order of their configurations."""
    found = {}
    for config in (EXPERIMENTS | gain.EXPERIMENTS)[name]:
        try:
            rows = rows_of(name, config.name, folder=folder)
        except (KeyError, FileNotFoundError):
            continue
        if not any("failed" in row for row in rows):
            # Rows that are older than this figure have it where nothing was fitted.
            costs = [{} if row.get("fit seconds", 1.0) else {"fit in plain epochs": 0.0} for row in rows]
            found[config.name] = [cost | row for cost, row in zip(costs, rows, strict=True)]
    return found


def board(name: str, columns: Columns, *, folder: Path = RESULTS, first: bool = False) -> str:
    """Return the table of a task: columns that some row has.

    Args:
        name: The experiment.
        columns: Cells by title.
        folder: Of the results.
        first: Whether the difference of the NLL from the bar's is a column too, and the picture follows.
    """
    rows = made_rows(name, folder)
    if not rows:
        return _missing(name)
    titles = list(columns)
    lines = [[label, *(_cell(columns[title], found) for title in titles)] for label, found in rows.items()]
    if first:
        titles.append("NLL − the bar's")
        for line in lines:
            line.append(_apart(name, line[0], folder))
    kept = [0, *(i for i in range(1, len(titles) + 1) if any(line[i] for line in lines))]
    made = markdown([[line[i] for i in kept] for line in [["", *titles], *lines]])
    if first and ((PICTURES if folder == RESULTS else folder) / f"{name}.svg").exists():
        made += f"\n\n![Quality against the passes of a prediction](pictures/{name}.svg)"
    return made


def _cell(cell: Cell | Sequence[Cell], rows: Sequence[Mapping[str, Any]]) -> str:
    texts = [one.of(rows) for one in ([cell] if isinstance(cell, Cell) else cell)]
    return " / ".join(text for text in texts if text)


def _apart(name: str, row: str, folder: Path, digits: int = 4) -> str:
    """Return the difference of the NLL with its interval, of one seed, or mean and standard deviation of several."""
    try:
        found = [one["nll"] for one in rows_of(f"{name}_pairs", row, folder=folder)]
    except (KeyError, FileNotFoundError):
        return ""
    if len(found) > 1:
        return Cell(("difference",), digits=digits).of(found)
    mean = shown(found[0]["difference"], digits)
    return f"{mean} ({' to '.join(shown(end, digits) for end in found[0]['interval'])})"


def _missing(*names: str) -> str:
    return f"Not measured yet: `python -m experiments.run {' '.join(names)}`."


def summary(rows: Mapping[str, str | tuple[str, str]], *, folder: Path = RESULTS) -> str:
    """Return a table of some rows, by what they are called here: costs, quality, OOD and shift in short."""
    places = {label: (TASK, row) if isinstance(row, str) else row for label, row in rows.items()}
    made = {name: made_rows(name, folder) for name, _ in places.values()}
    kept = ("passes", "error %", "NLL", "ECE %", "answered at 1 % risk, %")
    columns = {title: QUALITY[title] for title in kept}
    columns["far OOD AUROC"] = Cell(("far", "auroc-total"), digits=3, spread=False)
    columns["NLL under shift"] = SHIFT["NLL"]
    lines = [
        [label, *(_cell(columns[title], made[name][row]) for title in columns)]
        for label, (name, row) in places.items()
        if row in made[name]
    ]
    return markdown([["", *columns], *lines])


def uci(kind: str, *, folder: Path = RESULTS) -> str:
    """Return the NLL of every table with rows, its difference from the bar's, or the other figures, by strokes."""
    names = {table: f"scoreboard_uci_{table}" for table in TABLES}
    rows = {table: found for table, name in names.items() if (found := made_rows(name, folder))}
    if not rows:
        return _missing(*names.values())
    cells = [Cell(("test", "nll"), digits=2)]
    if kind == "others":
        cells = [Cell(("test", key), scale, digits, spread=False) for key, scale, digits in REGRESSION.values()]
    labels = dict.fromkeys(label for found in rows.values() for label in found)
    passes = Cell(("passes",), digits=0, spread=False)
    corner = {"nll": "", "apart": "NLL − the bar's", "others": " / ".join(REGRESSION)}[kind]
    lines = [[corner, "passes", *rows]]
    for label in labels:
        first = next(found[label] for found in rows.values() if label in found)
        if kind == "apart":
            apart = [_apart(names[table], label, folder, digits=2) for table in rows]
            lines += [[label, passes.of(first), *apart]] if any(apart) else []
        else:
            lines.append([label, passes.of(first), *(_cell(cells, found.get(label, [{}])) for found in rows.values())])
    return markdown(lines) if len(lines) > 1 else _missing(*names.values())


BOARDS: dict[str, Callable[[], str]] = {
    **{
        f"{name.replace('_', '-')}{end}": partial(board, name, columns, first=not end)
        for name in EXPERIMENTS | gain.EXPERIMENTS
        if not name.startswith("scoreboard_uci")
        for end, columns in (("", QUALITY), ("-shift", SHIFT))
    },
    "readme-cifar": partial(summary, {label: CHOSEN_ROWS[label] for label in README_ROWS}),
    "which-cifar": partial(summary, CHOSEN_ROWS),
    "scoreboard-uci": partial(uci, "nll"),
    "scoreboard-uci-apart": partial(uci, "apart"),
    "scoreboard-uci-others": partial(uci, "others"),
}
