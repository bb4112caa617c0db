"""What `choose` tried, and what it took."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bayesify.prediction import Views

__all__ = ["IDENTITY", "Candidate", "Choice"]

IDENTITY = Views("identity")


@dataclass(frozen=True)
class Candidate:
    """What was tried.

    Attributes:
        name: What it is.
        passes: What a prediction costs, in plain passes.
        epochs: What fitting costs, in plain epochs.
        nll: Mean NLL of validation examples, each judged by what was found and calibrated on the other half of them.
        nll_error: Its standard error.
        gain: How much less that is than the plain network's with a temperature.
        gain_error: The standard error of this difference, of the same examples.
        views: What the network sees.
        reason: Why it could not be tried; None where it was.
    """

    name: str
    passes: int
    epochs: float = 0.0
    nll: float = math.nan
    nll_error: float = math.nan
    gain: float = math.nan
    gain_error: float = math.nan
    views: Views = IDENTITY
    reason: str | None = None


@dataclass(frozen=True)
class Choice:
    """All that `choose` tried, and what it took.

    Attributes:
        candidates: In the order in which they were tried.
        chosen: The name of the one that was taken.
    """

    candidates: tuple[Candidate, ...]
    chosen: str

    def __str__(self) -> str:
        """Return a table: NLL with its 95 % interval, and the paired gain over the plain network with its own."""
        width = max(len(one.name) for one in self.candidates)
        lines = [f"{'':{width}}  passes  epochs  validation NLL    gain over plain + temperature"]
        for one in self.candidates:
            if one.reason is not None:
                lines.append(f"{one.name:{width}}  not tried: {one.reason}")
                continue
            nll = f"{one.nll:.4f} +- {1.96 * one.nll_error:.4f}"
            gain = f"{one.gain:+.4f} +- {1.96 * one.gain_error:.4f}" if one.gain_error else ""
            mark = "  <- chosen" if one.name == self.chosen else ""
            lines.append(f"{one.name:{width}}  {one.passes:6}  {one.epochs:6.1f}  {nll}  {gain}{mark}".rstrip())
        return "\n".join(lines)
