"""Label, learn, measure, choose, again and again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bayesify._core.deprecation import renamed
from bayesify._core.files import FileError, digest, read_json, write_atomically
from bayesify._core.optional import require
from bayesify.decide.acquisition import Acquisition, acquire

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["ActiveLearning", "Round", "active_learning"]


@dataclass(frozen=True)
class Round:
    """One round of active learning.

    Attributes:
        labelled: Indices of the labelled examples that the round learned from.
        chosen: Indices that were chosen after it; empty in the last.
        results: What `measure` returned.
    """

    labelled: tuple[int, ...]
    chosen: tuple[int, ...]
    results: dict[str, float]


@dataclass
class ActiveLearning:
    """A loop that buys labels where they are worth most, with its history in a file.

    A loop that was killed and is made again with the same settings and path goes on after the last whole round: the
    labels that were bought stay bought. The posterior of the round before is not in the file, so that the first
    `learn` then has None for it; loops that begin anew in each round end with the same numbers.

    Attributes:
        learn: `learn(indices, before)` makes a posterior of the examples with these indices. Before is the posterior of
            the last round, None in the first: go on from it, or begin anew.
        predict: Returns the prediction of a posterior for pool examples with these indices.
        measure: Returns numbers of a posterior, for the learning curve.
        start: Indices of the first labelled examples.
        pool: Indices of those that may be labelled.
        num: How many are labelled in each round.
        acquisition: As `acquire`.
        seed: Of the choice.
        path: A JSON file for the history; None keeps it in memory.
        subset: How many examples of the pool are looked at in a round, others in each; None looks at all of it.
        history: The rounds so far.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> loop = ActiveLearning(
        ...     learn=lambda indices, before: indices,
        ...     predict=lambda posterior, indices: SimpleNamespace(epistemic=torch.tensor(indices).float()),
        ...     measure=lambda posterior: {"labels": float(len(posterior))},
        ...     start=[0], pool=range(1, 6), num=2,
        ... )  # fmt: skip
        >>> [one.chosen for one in loop.run(3)], loop.curve("labels")
        ([(5, 4), (3, 2), ()], ([1, 3, 5], [1.0, 3.0, 5.0]))
    """

    learn: Callable[[list[int], Any], Any]
    predict: Callable[[Any, list[int]], Any]
    measure: Callable[[Any], dict[str, float]]
    start: Sequence[int]
    pool: Sequence[int]
    num: int
    acquisition: Acquisition = "bald"
    seed: int = 0
    path: str | Path | None = None
    subset: int | None = None
    history: list[Round] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Read the history that is there."""
        if len(set(self.start)) < len(self.start) or len(set(self.pool)) < len(self.pool):
            raise ValueError("An index is given twice. An example is labelled once: give each index once.")
        if self.subset is not None and self.subset < self.num:
            raise ValueError(f"subset is at least num, {self.num}, since these are chosen of it, not {self.subset}.")
        if self.path is not None and Path(self.path).exists():
            self.history = self._read(Path(self.path))

    def run(self, rounds: int) -> list[Round]:
        """Go on until there are so many rounds; labels are bought in all but the last.

        Returns:
            The rounds; the i-th learned from len(start) + i num labels.
        """
        first = set(self.start)
        posterior: Any = None
        if self.history and not self.history[-1].chosen and len(self.history) < rounds:
            self.history.pop()  # the last of a shorter run, which bought nothing
        bought = [index for one in self.history for index in one.chosen]
        labelled = [*self.start, *bought]
        taken = first | set(bought)
        open_ = [index for index in self.pool if index not in taken]
        for number in range(len(self.history), rounds):
            posterior = self.learn(list(labelled), posterior)
            results = self.measure(posterior)
            chosen: list[int] = []
            if number + 1 < rounds and open_:
                looked = self._looked_at(open_, self.seed + number)
                options: dict[str, Any] = {"acquisition": self.acquisition, "seed": self.seed + number}
                chosen = acquire(self.predict(posterior, looked), self.num, indices=looked, **options).tolist()
            self.history.append(Round(tuple(labelled), tuple(chosen), results))
            self._write()
            labelled += chosen
            now = set(chosen)
            open_ = [index for index in open_ if index not in now]
        return self.history[:rounds]

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Return the numbers of labels, and what was measured under a name."""
        return [len(one.labelled) for one in self.history], [one.results[name] for one in self.history]

    def plot(self, name: str, *, ax: Axes | None = None, label: str | None = None) -> Figure:
        """Draw the learning curve of a measure; needs matplotlib, `bayesify[report]`.

        Args:
            name: What `measure` calls it.
            ax: Where to draw, as onto another loop's; None makes a figure.
            label: In the legend; None takes the acquisition.
        """
        if ax is None:
            figures = require("matplotlib.figure", extra="report", purpose="A figure")
            ax = figures.Figure(figsize=(5.2, 3.2), layout="constrained").add_subplot()
        ax.plot(*self.curve(name), marker="o", label=self.acquisition if label is None else label)
        ax.set_xlabel("labels")
        ax.set_ylabel(name)
        ax.legend(frameon=False)
        found: Any = ax.figure
        return found  # type: ignore[no-any-return]

    def _looked_at(self, indices: list[int], seed: int) -> list[int]:
        if self.subset is None or self.subset >= len(indices):
            return indices
        order = torch.randperm(len(indices), generator=torch.Generator().manual_seed(seed))
        return [indices[position] for position in order[: self.subset].tolist()]

    def _settings(self) -> dict[str, Any]:
        values = [list(self.start), list(self.pool)]
        settings = {"num": self.num, "acquisition": self.acquisition, "seed": self.seed, "indices": digest(values)}
        return settings if self.subset is None else {**settings, "subset": self.subset}  # older files have none

    def _write(self) -> None:
        if self.path is not None:
            values = {"format": 1, "settings": self._settings(), "rounds": [asdict(one) for one in self.history]}
            write_atomically(Path(self.path), json.dumps({**values, "digest": digest(values)}).encode())

    def _read(self, path: Path) -> list[Round]:
        values = read_json(path)
        sealed = values.pop("digest", None)
        if values.get("format") != 1 or digest(values) != sealed:
            raise FileError(f"{path} is damaged, or not the history of a loop. Move it away, or give another path.")
        if values["settings"] != self._settings():
            raise FileError(f"{path} is the history of a loop with other settings or indices. Give another path.")
        return [Round(tuple(one["labelled"]), tuple(one["chosen"]), one["results"]) for one in values["rounds"]]


@renamed(how="acquisition")
def active_learning(
    learn: Callable[[list[int], Any], Any],
    predict: Callable[[Any, list[int]], Any],
    measure: Callable[[Any], dict[str, float]],
    *,
    start: Sequence[int],
    pool: Sequence[int],
    num: int,
    rounds: int,
    acquisition: Acquisition = "bald",
    seed: int = 0,
) -> list[Round]:
    """Run an `ActiveLearning` loop, and return its rounds."""
    options: dict[str, Any] = {"start": start, "pool": pool, "num": num, "acquisition": acquisition, "seed": seed}
    return ActiveLearning(learn, predict, measure, **options).run(rounds)
