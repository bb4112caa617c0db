"""The tables of adapters: the rows that have been made, and what they take of memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from experiments.configs.lora import EXPERIMENTS
from experiments.records import RESULTS, ROOT
from experiments.tables import Cell, markdown, rows_of

__all__ = ["ADAPTERS", "lora", "memory"]

LABELS = {
    "plain": "plain LoRA",
    "mc-dropout": "MC dropout of all layers",
    "laplace, head": "Laplace of the head, Kronecker, prior by evidence",
    "laplace, head, widened": "the same, `widen`",
    "laplace": "Laplace-LoRA, Kronecker, prior by evidence",
    "laplace, widened": "the same, `widen`",
    "bayes-adapter": "BayesAdapter",
    "bayes-adapter, B": "BayesAdapter, B alone",
    "widened": "Gaussian noise, `widen`, not trained",
    "swag": "SWAG",
    "sgld": "SGLD",
    "ibnn": "iBNN",
}
ACTIONS = {
    "build": "the model, loaded",
    "plain step": "a step of plain LoRA",
    "convert": "`convert`",
    "step": "a step of `BayesAdapter`",
    "predict": "`predict`, four draws",
    "save and load": "`save` and `load`",
}


def lora(name: str, *, folder: Path = RESULTS) -> str:
    """Return the table of a task, a line for each row that is there; the plain LoRA also with its temperature."""
    ood = {"lora_clinc": "out of scope", "lora_sst2": "CLINC150", "lora_gpt2": "words in another order"}[name]
    cells = {
        "accuracy %": Cell(("part", "accuracy"), 100, 1),
        "NLL": Cell(("part", "nll"), digits=3),
        "ECE %": Cell(("part", "ece"), 100, 1),
        "AURC 1e-3": Cell(("part", "aurc"), 1000, 1),
        "AUROC OOD": Cell(("part", f"auroc-total/{ood}"), digits=3),
        "NLL + temperature": Cell(("test, calibrated", "nll"), digits=3),
    }
    lines = [["", "seeds", *cells]]
    for config in EXPERIMENTS[name]:
        try:
            rows = [row for row in rows_of(name, config.name, folder=folder) if "failed" not in row]
        except (KeyError, FileNotFoundError):
            continue
        for part in ("test", "test, calibrated") if config.name == "plain" else ("test",):
            label = LABELS[config.name] + " + temperature" * (part != "test")
            lines.append([label, str(len(rows)), *(cell.of(rows, part) for cell in cells.values())])
    return markdown(lines) if len(lines) > 1 else f"Not measured yet: `python -m experiments.run {name}`."


def memory(folder: Path = ROOT / "benchmarks" / "results") -> str:
    """Return the peaks of memory in multiples of the model's bytes, with the base shared and copied."""
    cell = Cell(("models",), digits=2, spread=False)

    def shown(name: str) -> str:
        try:
            found: list[Any] = rows_of("memory", name, folder=folder)[-1:]
        except (KeyError, FileNotFoundError):
            return ""
        return cell.of(found)

    lines = [["", "base shared", "base copied (`share=False`)"]]
    lines += [[label, shown(name), shown(f"{name}, copied")] for name, label in ACTIONS.items()]
    return markdown(lines) if any(line[1] for line in lines[1:]) else "Not measured yet: `python -m benchmarks.memory`."


ADAPTERS: dict[str, Callable[[], str]] = {
    **{name.replace("_", "-"): partial(lora, name) for name in ("lora_clinc", "lora_sst2", "lora_gpt2")},
    "peft-memory": memory,
}
