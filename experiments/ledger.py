"""Results of long experiments, kept row by row: a run that was stopped goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["RESULTS", "Ledger"]

RESULTS = Path(__file__).parent / "results"


class Ledger:
    """A JSON file of rows, each with a key.

    Args:
        name: Of the file in `experiments/results`.
        command: What prints the rows.
        kept: Whether to read and write the file; trials do not.
    """

    def __init__(self, name: str, command: str, *, kept: bool) -> None:
        """Read the rows that are there."""
        self.path = RESULTS / f"{name}.json"
        self.command = command
        self.kept = kept
        self.rows: list[dict[str, Any]] = []
        if kept and self.path.exists():
            self.rows = json.loads(self.path.read_text())["rows"]

    def row(self, make: Callable[[], dict[str, Any]], **key: Any) -> dict[str, Any]:
        """Return the row with this key: the one in the file, or a new one, which is written at once."""
        for row in self.rows:
            if all(row.get(name) == value for name, value in key.items()):
                return row
        self.rows.append({**key, **make()})
        print(json.dumps(self.rows[-1]), flush=True)
        if self.kept:
            RESULTS.mkdir(exist_ok=True)
            self.path.write_text(json.dumps({"command": self.command, "rows": self.rows}, indent=1))
        return self.rows[-1]
