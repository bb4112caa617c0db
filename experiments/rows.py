"""Results that survive an interruption and may be written by several processes: one JSON file of named rows."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Rows"]


class Rows:
    """Rows of a results file, each made once.

    Args:
        path: The file; None keeps nothing, for a trial.
        command: What makes it.
    """

    def __init__(self, path: Path | None, command: str) -> None:
        self.path = path
        self.command = command

    def row(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return a row from the file, or make it, keep it and print it."""
        found = self.read().get(name)
        if found is None:
            found = make()
            self._keep(name, found)
            print(name, json.dumps(found), flush=True)
        return found

    def read(self) -> dict[str, dict[str, Any]]:
        """Return all rows so far."""
        if self.path is None or not self.path.exists():
            return {}
        rows: dict[str, dict[str, Any]] = json.loads(self.path.read_text())["rows"]
        return rows

    def _keep(self, name: str, row: dict[str, Any]) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            record = {"command": self.command, "rows": {**self.read(), name: row}}
            part = self.path.with_suffix(".part")
            part.write_text(json.dumps(record, indent=1))
            os.replace(part, self.path)
