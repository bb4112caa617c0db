"""What a training run leaves behind."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["EpochRecord", "History"]


@dataclass(frozen=True)
class EpochRecord:
    """One epoch.

    Attributes:
        stage: The part of the training, for example a member.
        epoch: From 1.
        steps: Optimiser steps since the stage began.
        terms: Mean loss terms over the epoch, nats per example; `total` is their sum.
        val_nll: Validation NLL, if there is a validation loader.
        lr: The first group's learning rate at the epoch's end.
        seconds: Wall time.
    """

    stage: str
    epoch: int
    steps: int
    terms: dict[str, float]
    val_nll: float | None
    lr: float
    seconds: float


@dataclass(repr=False)
class History:
    """The record of a run.

    Attributes:
        epochs: One record for each epoch of each stage.
        accuracy_before: Of the original network, where the likelihood has an accuracy.
        accuracy_after: Of the fitted posterior, on the same examples.
        resumed_from: The epoch a checkpoint was resumed at, as (stage, epoch), if any.
    """

    epochs: list[EpochRecord] = field(default_factory=list)
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    resumed_from: tuple[str, int] | None = None

    @property
    def seconds(self) -> float:
        """Return the time of all epochs together."""
        return sum(record.seconds for record in self.epochs)

    def __repr__(self) -> str:
        """Show the run in a line."""
        words = [f"{len(self.epochs)} epochs", f"{self.seconds:.1f} s"]
        if self.epochs:
            words.append(f"loss {self.epochs[-1].terms['total']:.4f}")
        if self.epochs and self.epochs[-1].val_nll is not None:
            words.append(f"validation NLL {self.epochs[-1].val_nll:.4f}")
        if self.accuracy_before is not None and self.accuracy_after is not None:
            words.append(f"accuracy {self.accuracy_before:.4f} -> {self.accuracy_after:.4f}")
        return f"History({', '.join(words)})"

    def to_dict(self) -> dict[str, Any]:
        """Return the history as plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> History:
        """Rebuild a history."""
        records = [EpochRecord(**record) for record in values["epochs"]]
        return cls(records, values["accuracy_before"], values["accuracy_after"])
