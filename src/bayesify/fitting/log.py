"""TensorBoard event files, if asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["Log", "open_log"]


class Log:
    """A log that writes nothing."""

    def add(self, scalars: dict[str, float | None], step: int) -> None:
        """Add numbers by name; None is left out."""

    def close(self) -> None:
        """Finish the file."""


class _TensorBoardLog(Log):
    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def add(self, scalars: dict[str, float | None], step: int) -> None:
        for name, value in scalars.items():
            if value is not None:
                self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


def open_log(folder: str | Path | None) -> Log:
    """Return a log of TensorBoard event files in a folder, or one that writes nothing."""
    if folder is None:
        return Log()
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("log_dir needs TensorBoard: pip install 'bayesify[logs]'.") from error
    return _TensorBoardLog(SummaryWriter(str(folder)))
