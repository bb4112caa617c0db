"""Checkpoints: one file, written in one step, that holds all a run needs to go on as if nothing had happened."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from bayesify._files import FileError, pack, read_tensors, unpack, write_tensors
from bayesify.posteriors import Posterior

__all__ = ["Checkpoint", "Progress"]

FORMAT = 1


@dataclass
class Progress:
    """Where a run is.

    Attributes:
        stage: Index of the stage.
        epoch: Whole epochs of the stage that are done.
        step: Batches of the present epoch that are done.
        done: Whether all stages, and what comes after them, are finished.
        best_nll: The least validation NLL of the stage.
        best_epoch: Its epoch.
        sums: Sums of the loss terms over the present epoch.
        seconds: Time spent on the present epoch.
        optimiser: The name of its type.
    """

    stage: int = 0
    epoch: int = 0
    step: int = 0
    done: bool = False
    best_nll: float | None = None
    best_epoch: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    optimiser: str = ""


class Checkpoint:
    """The checkpoint of one run in one folder.

    Args:
        folder: Where it is; None keeps nothing.
        settings: What must be the same for a run to go on.
    """

    def __init__(self, folder: str | Path | None, settings: dict[str, Any]) -> None:
        self.folder = None if folder is None else Path(folder)
        # As they come back from a file, where tuples are lists.
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))

    def save(self, posterior: Posterior, parts: dict[str, Any]) -> None:
        """Write everything; a reader finds the checkpoint before or this one, never a part."""
        if self.folder is None:
            return
        tensors: dict[str, Tensor] = {f"posterior.{k}": t for k, t in posterior.state_dict().items()}
        tree = pack(parts, tensors, "run")
        header = {"format": FORMAT, "settings": self.settings, "tree": tree}
        write_tensors(self.folder / "checkpoint.safetensors", tensors, header)

    def load(self, posterior: Posterior) -> dict[str, Any] | None:
        """Put the posterior back and return the other parts, or None where there is no checkpoint."""
        if self.folder is None or not (self.folder / "checkpoint.safetensors").exists():
            return None
        path = self.folder / "checkpoint.safetensors"
        tensors, header = read_tensors(path)
        if header.get("format") != FORMAT:
            raise FileError(
                f"{path} has format {header.get('format')!r}, and this bayesify reads format {FORMAT}. Finish the "
                "run with the version that began it, or delete the file to begin anew."
            )
        self._check_settings(header["settings"], path)
        own = {k.removeprefix("posterior."): t for k, t in tensors.items() if k.startswith("posterior.")}
        posterior.load_state_dict(own)
        parts: dict[str, Any] = unpack(header["tree"], tensors)
        return parts

    def _check_settings(self, found: dict[str, Any], path: Path) -> None:
        differing = sorted(key for key in {*found, *self.settings} if found.get(key) != self.settings.get(key))
        if differing:
            words = ", ".join(f"{key} was {found.get(key)!r} and is {self.settings.get(key)!r}" for key in differing)
            raise ValueError(
                f"{path} belongs to another run: {words}. Give the same settings to go on with it, or "
                "another folder (or delete the file) to begin anew."
            )

    def save_best(self, posterior: Posterior, stage: int) -> None:
        """Keep the best weights of a stage.

        Each stage has a file, since a run that is killed early in a stage goes on at the end of the one before.
        """
        if self.folder is not None:
            write_tensors(self.folder / f"best-{stage}.safetensors", posterior.state_dict())

    def load_best(self, stage: int) -> dict[str, Tensor]:
        """Return the best weights of a stage that were kept on disk."""
        assert self.folder is not None
        return read_tensors(self.folder / f"best-{stage}.safetensors")[0]
