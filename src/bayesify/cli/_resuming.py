"""Lines of JSON to a file that appears when it is whole, and that an interrupted run can go on with."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from bayesify._core.files import digest, read_json, write_atomically
from bayesify.cli._output import JobError, finite

__all__ = ["Lines"]


class Lines:
    """Write lines to stdout, or to FILE.part, which becomes FILE at the end.

    FILE.part.json says what the lines are of. Going on keeps whole batches alone, so that the batches that follow are
    those of a run that was never interrupted.

    Args:
        path: The file; None is stdout.
        mark: Plain values that say what is written; a run that goes on must have the same.
        resume: Whether to go on.
        size: How many lines make a batch.
        before: How many rows were left out before the first line, of which batches are counted too.
    """

    def __init__(
        self, path: Path | None, mark: Sequence[Any], *, resume: bool = False, size: int = 1, before: int = 0
    ) -> None:
        """Open the file."""
        self.path, self.count, self.size, self.before = path, 0, size, before
        if path is None:
            self.file: IO[str] = sys.stdout
            return
        self.part, self.note = path.with_name(f"{path.name}.part"), path.with_name(f"{path.name}.part.json")
        if not resume:
            if self.part.exists():
                raise JobError(
                    f"{self.part} is there, from a run that was interrupted or is still going on: give --resume to go "
                    "on with it, or remove it."
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.note, json.dumps({"digest": digest(list(mark))}).encode())
            self.file = self.part.open("x", encoding="utf-8", newline="\n")
            self._lock()
            return
        if not (self.part.is_file() and self.note.is_file()):
            raise JobError(f"There is nothing to go on with: {self.part} does not exist. Leave --resume out.")
        if read_json(self.note).get("digest") != digest(list(mark)):
            raise JobError(
                f"{self.part} was begun with another guard, other data or another --batch-size, --skip or --keep. Give "
                "what it was begun with, or remove it."
            )
        self.file = self.part.open("a", encoding="utf-8", newline="\n")
        self._lock()
        self.count = self._cut()

    def _lock(self) -> None:
        """Refuse a file that another run is writing, where the system can tell; the lock ends with the process."""
        try:
            import fcntl
        except ImportError:
            return
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.file.close()
            raise JobError(f"Another run is writing {self.part}. Wait for it, or give another --out.") from error

    def _cut(self) -> int:
        """Remove what does not make a whole batch, and return how many lines are left."""
        kept = position = whole = count = 0
        with self.part.open("r+b") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                count, position = count + 1, position + len(line)
                if (self.before + count) % self.size == 0:
                    kept, whole = position, count
            file.truncate(kept)
        return whole

    def verdicts(self) -> Iterator[str]:
        """Give the verdicts of the lines that are there."""
        with self.part.open(encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)["verdict"]

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        """Add lines, and let whoever follows the file see them."""
        self.file.write("".join(map(_line, lines)))
        self.file.flush()
        self.count += len(lines)

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put the file in place; what was interrupted stays, to go on with."""
        if self.path is None:
            return
        if kind is None:
            self.file.flush()
            os.fsync(self.file.fileno())
        self.file.close()
        if kind is None:
            os.replace(self.part, self.path)
            self.note.unlink(missing_ok=True)


def _line(values: dict[str, Any]) -> str:
    try:
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):  # of a column that was kept: not finite, or a date
        text = json.dumps(finite(values), ensure_ascii=False, default=str)
    return f"{text}\n"
