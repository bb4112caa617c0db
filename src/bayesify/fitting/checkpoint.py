"""Checkpoints: one file, written in one step, that holds all a run needs to go on as if nothing had happened."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from bayesify._core.files import FileError, digest, pack, read_tensors, remove_temporaries, unpack, write_tensors
from bayesify.fitting.history import History
from bayesify.fitting.identity import differences, own_tensors
from bayesify.laws import Posterior

__all__ = ["ANEW", "Checkpoint", "Progress", "Saved"]

FORMAT = 2
PARTS = {"optimiser", "probe", "random", "scaler", "schedule"}
ANEW = "or another folder (or delete the file) to begin anew"


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
    """

    stage: int = 0
    epoch: int = 0
    step: int = 0
    done: bool = False
    best_nll: float | None = None
    best_epoch: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class Saved:
    """What a checkpoint holds.

    Attributes:
        settings: What decided the run.
        tensors: The posterior's.
        history: The record so far.
        progress: Where the run was.
        parts: The rest: optimiser, schedule, scaler, the state of random generators for each process, and the probe.
    """

    settings: dict[str, Any]
    tensors: dict[str, Tensor]
    history: History
    progress: Progress
    parts: dict[str, Any]


class Checkpoint:
    """The checkpoint of one run in one folder.

    Args:
        folder: Where it is; None keeps nothing.
    """

    def __init__(self, folder: str | Path | None) -> None:
        self.folder = None if folder is None else Path(folder)
        self.settings: dict[str, Any] = {}

    @property
    def path(self) -> Path:
        """Where the file is."""
        assert self.folder is not None
        return self.folder / "checkpoint.safetensors"

    def set_settings(self, settings: dict[str, Any]) -> None:
        """Set what must be the same for a run to go on."""
        self.settings = json.loads(json.dumps(settings))  # as they come back from a file, where tuples are lists

    # -- writing ----------------------------------------------------------------------------------------------------

    def clean(self) -> None:
        """Remove what runs that were killed while they wrote left behind."""
        if self.folder is not None and self.folder.is_dir():
            remove_temporaries(self.folder, r"(?:checkpoint|best-\d+)\.safetensors", older=60.0)

    def save(self, posterior: Posterior, progress: Progress, history: History, parts: dict[str, Any]) -> None:
        """Write everything; a reader finds the checkpoint before or this one, never a part."""
        if self.folder is None:
            return
        tensors = {f"posterior.{name}": tensor for name, tensor in own_tensors(posterior).items()}
        tree = pack({**parts, "progress": vars(progress), "history": history.to_dict()}, tensors, "run")
        write_tensors(self.path, tensors, {"format": FORMAT, "settings": self.settings, "tree": tree})

    def save_best(self, posterior: Posterior, stage: int) -> None:
        """Keep the best weights of a stage.

        Each stage has a file, since a run that is killed early in a stage goes on at the end of the one before.
        """
        if self.folder is not None:
            write_tensors(self._best(stage), own_tensors(posterior), {"run": digest(self.settings)})

    # -- reading ----------------------------------------------------------------------------------------------------

    def read(self) -> Saved | None:
        """Return what the checkpoint holds, every byte checked, or None where there is none."""
        if self.folder is None or not self.path.exists():
            return None
        if not self.path.is_file():
            raise FileError(f"{self.path} is no file. Delete it, or give another folder.")
        tensors, header = self._read()
        if header.get("format") != FORMAT:
            raise FileError(
                f"{self.path} has format {header.get('format')!r}, and this bayesify reads format {FORMAT}. Finish the "
                "run with the version that began it, or delete the file to begin anew."
            )
        try:
            parts = unpack(header["tree"], tensors)
            history, progress = History.from_dict(parts.pop("history")), Progress(**parts.pop("progress"))
            settings = dict(header["settings"])
            if parts.keys() != PARTS:
                raise ValueError(f"it has {sorted(parts)}")
        except Exception as error:
            raise FileError(
                f"{self.path} holds something else than a run ({type(error).__name__}: {error}). Copy it again, or "
                "delete it to begin anew."
            ) from error
        own = {name.removeprefix("posterior."): t for name, t in tensors.items() if name.startswith("posterior.")}
        return Saved(settings, own, history, progress, parts)

    def _read(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        try:
            return read_tensors(self.path, sealed=True)
        except FileError:
            found = read_tensors(self.path)
            if found[1].get("format") == 1:  # which had no seal
                return found
            raise

    def check(self, saved: Saved) -> None:
        """Raise where the checkpoint is of another run."""
        words = differences(saved.settings, self.settings)
        if words:
            raise ValueError(
                f"{self.path} belongs to another run: {words}. To go on with it give the same settings, data and "
                "network (fix random weights by torch.manual_seed before the network is made, or keep them in a "
                f"file), {ANEW}."
            )

    def restore(self, posterior: Posterior, tensors: dict[str, Tensor]) -> None:
        """Put a posterior into a state that was kept."""
        kept = own_tensors(posterior).keys()
        others = {name: value for name, value in posterior.state_dict().items() if name not in kept}
        try:
            posterior.load_state_dict({**others, **tensors})
        except RuntimeError as error:
            raise FileError(f"{self.folder} does not fit the network: {error}. Give the same, {ANEW}.") from error

    def read_best(self, stage: int) -> dict[str, Tensor]:
        """Return the best weights of a stage that were kept on disk."""
        path = self._best(stage)
        if not path.is_file():
            raise FileError(
                f"There is no file {path}, which held the best weights of the run in {self.path}. Put it back, or "
                "delete both to begin anew."
            )
        tensors, header = read_tensors(path, sealed=True)
        if header.get("run") != digest(self.settings):
            raise FileError(f"{path} belongs to another run than {self.path}. Put its own back, or delete both.")
        return tensors

    def _best(self, stage: int) -> Path:
        assert self.folder is not None
        return self.folder / f"best-{stage}.safetensors"
