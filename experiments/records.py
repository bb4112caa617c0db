"""Results that say where they come from: one JSON file of rows, each made once for its configuration and seed.

A row is {name, config, hash, seed, provenance, command, seconds, measures}. It is found again by (hash of its
configuration, seed), so a row of other settings is never taken for it. Rows are written one by one under a lock, the
file replaced as a whole: a run that is killed loses the row that it was making, and several runs can share a file.

Provenance is {commit, dirty, versions, processor, threads, finished}; "unknown" marks rows that are older than this
record. They are kept until a row of their name and seed is made.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bayesify

__all__ = ["PICTURES", "RESULTS", "Records", "config_hash", "plain", "provenance"]

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
PICTURES = ROOT / "docs" / "pictures"  # pages show them, so they are with the pages
UNKNOWN = "unknown"
FOLDERS = {"--folder", "--work", "--results"}


class Records:
    """The rows of a results file.

    Args:
        path: The file; None keeps nothing, for a trial.
        settings: What all rows of a script depend on, part of their configurations.
        command: What makes the rows; None takes this process's.
    """

    def __init__(
        self, path: Path | None, settings: Mapping[str, Any] | None = None, command: str | None = None
    ) -> None:
        self.path = path
        self.settings = dict(settings or {})
        self.command = _command() if command is None else command

    def row(
        self, name: str, make: Callable[[], dict[str, Any]], *, config: Any = None, seed: int = 0
    ) -> dict[str, Any]:
        """Return the measures of a row from the file, or make them, keep them and print them.

        Args:
            name: What tables call it.
            make: Returns the measures, as JSON has them.
            config: All that decides them but the seed: a dataclass, or values by name, beside the settings of the file.
            seed: The seed.
        """
        described = self._described(name, config)
        found = self.find(config_hash(described), seed)
        if found is None:
            began = time.perf_counter()
            measures = make()
            found = self._made(described, seed, measures, time.perf_counter() - began)
            self._keep(found)
            print(f"{name}, seed {seed}", json.dumps(measures), flush=True)
        kept: dict[str, Any] = found["measures"]
        return kept

    def append(self, name: str, measures: dict[str, Any], *, config: Any = None, seed: int = 0, seconds: float) -> None:
        """Keep a row beside those of the same configuration, as of a benchmark, which is run again to compare."""
        self._keep(self._made(self._described(name, config), seed, measures, seconds), again=True)

    def _described(self, name: str, config: Any) -> dict[str, Any]:
        described: dict[str, Any] = plain({**self.settings, **_as_dict(config), "name": name})
        return described

    def _made(self, described: dict[str, Any], seed: int, measures: dict[str, Any], seconds: float) -> dict[str, Any]:
        return {
            "name": described["name"],
            "config": described,
            "hash": config_hash(described),
            "seed": seed,
            "provenance": provenance(),
            "command": self.command,
            "seconds": round(seconds, 1),
            "measures": measures,
        }

    def find(self, hashed: str, seed: int) -> dict[str, Any] | None:
        """Return the row of a configuration and a seed, or None."""
        return next((row for row in self.read() if (row["hash"], row["seed"]) == (hashed, seed)), None)

    def read(self) -> list[dict[str, Any]]:
        """Return all rows."""
        if self.path is None or not self.path.exists():
            return []
        rows: list[dict[str, Any]] = json.loads(self.path.read_text(encoding="utf-8"))["rows"]
        return rows

    def _keep(self, row: dict[str, Any], *, again: bool = False) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self.path.parent):
            if again or self.find(row["hash"], row["seed"]) is None:  # else another run made it meanwhile
                write_rows(self.path, [old for old in self.read() if not _superseded(old, row)] + [row])


def _superseded(old: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Return whether a row without provenance is made again by another."""
    return old["provenance"] == UNKNOWN and old["name"] == row["name"] and old["seed"] in (None, row["seed"])


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a file, a line for each row, in one step: it is the old one or the new one whenever the process ends."""
    text = '{"rows": [\n' + ",\n".join(json.dumps(row) for row in rows) + "\n]}\n"
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which the system releases when a process ends."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def config_hash(config: Any) -> str:
    """Return the hash of a configuration, whatever the order of its names.

    >>> config_hash({"a": 1, "b": (2, 3)}) == config_hash({"b": [2, 3], "a": 1})
    True
    >>> config_hash({"a": 1}) == config_hash({"a": 1.5})
    False
    """
    text = json.dumps(plain(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def plain(value: Any) -> Any:
    """Return a value as JSON has it; dataclasses with the name of their class, functions and types by their names.

    >>> plain({"method": bayesify.MAP(epochs=2), "sizes": (1, 2)})["method"]["class"]
    'MAP'
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"class": type(value).__name__, **fields}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path | torch.dtype | torch.memory_format):
        return str(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    raise TypeError(f"A configuration holds numbers, texts, lists and dataclasses, and no {type(value).__name__}.")


def _as_dict(config: Any) -> dict[str, Any]:
    described = plain({} if config is None else config)
    return described if isinstance(described, dict) else {"config": described}


def provenance() -> dict[str, Any]:
    """Return which code made a result, with what, and on what."""
    commit = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--", "src", "experiments", "benchmarks", ":!*/results/*")
    return {
        "commit": commit,
        "dirty": None if commit is None else bool(changes),
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            "bayesify": bayesify.__version__,
        },
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _git(*words: str) -> str | None:
    """Return what git says about this repository, or None outside of one."""
    try:
        said = subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return said.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _command() -> str:
    """Return the command line, as one would type it in the repository, without folders that decide nothing."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    start = f"python -m {spec.name}" if spec is not None else f"python {Path(sys.argv[0]).name}"
    words = sys.argv[1:]
    kept = [word for before, word in zip(["", *words], words, strict=False) if not {before, word} & FOLDERS]
    return " ".join([start, shlex.join(kept)]).rstrip()
