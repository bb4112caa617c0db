"""What an experiment is: a task, a method, measures and seeds, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import nn
from torch.utils.data import DataLoader

import bayesify
from experiments.records import config_hash, plain
from experiments.shift import Shift

__all__ = ["Config", "Fit", "Measure", "Setting", "Student", "Task"]


@dataclass(frozen=True, eq=False)
class Setting:
    """A task made ready: the network, and the data as loaders.

    Attributes:
        network: The trained network, which is not changed.
        train: What the posterior learns from.
        val: What settings, temperatures and scales are chosen on.
        test: What is reported.
        ood: Inputs of other kinds, by name.
        fitting: Options of `fit`.
        likelihood: What the outputs mean.
        supervision: Makes the options of `fit` that ask for uncertainty; None where there are none.
        scale: The standard deviation of regression targets, in their own units.
        shifted: Makes the first test inputs under corruptions, set by set; None where there are no such inputs.
    """

    network: nn.Module
    train: DataLoader[Any]
    val: DataLoader[Any]
    test: DataLoader[Any]
    ood: Mapping[str, DataLoader[Any]] = field(default_factory=dict)
    fitting: Mapping[str, Any] = field(default_factory=dict)
    likelihood: Any = "classification"
    supervision: Callable[[], dict[str, Any]] | None = None
    scale: float = 1.0
    shifted: Callable[[], Iterator[Shift]] | None = None


class Task(Protocol):
    """A frozen dataclass that says which network and which data."""

    def __hash__(self) -> int: ...

    def setting(self, seed: int, *, trial: bool, work: Path) -> Setting:
        """Make it ready; a trial has a few examples, and `work` keeps what takes long."""
        ...


class Measure(Protocol):
    """A frozen dataclass that says what is measured."""

    def __call__(self, posterior: bayesify.Posterior, setting: Setting, *, seed: int, trial: bool) -> dict[str, Any]:
        """Return figures as JSON has them; the posterior is left as it is."""
        ...


@dataclass(frozen=True)
class Fit:
    """A fit that another row may have made, whose checkpoint in `--work` is then taken.

    Attributes:
        task: The network and the data.
        method: How the network was made Bayesian.
        seed: Of the fit, counted from that of the row it is part of.
        include: Which modules were converted; all, if None.
    """

    task: Task
    method: bayesify.Method
    seed: int = 0
    include: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Student:
    """One network that a row's posterior teaches: on the row's training data, from its network.

    Attributes:
        epochs: Of them.
        lr: Of SGD.
        views: What the teacher sees.
        mix: How inputs are mixed; not part of the configuration's hash where they are not.
    """

    epochs: int = 10
    lr: float = 0.05
    views: tuple[str, ...] = ("identity", "mirror")
    mix: float = 0.0


@dataclass(frozen=True)
class Config:
    """One line of a table: a method on a task.

    Attributes:
        name: What the table calls it.
        task: The network and the data.
        method: How the network is made Bayesian.
        measures: What is measured.
        seeds: With which seeds; not part of the configuration's hash.
        include: Which modules are converted; all, if None.
        supervised: Whether uncertainty is asked for on the task's OOD training inputs.
        members: Fits whose ensemble the row is, in place of a fit of its own.
        student: What is taught by all that, and measured in its place.
    """

    name: str
    task: Task
    method: bayesify.Method
    measures: tuple[Measure, ...]
    seeds: tuple[int, ...] = (0,)
    include: tuple[str, ...] | None = None
    supervised: bool = False
    members: tuple[Fit, ...] = ()
    student: Student | None = None

    def described(self) -> dict[str, Any]:
        """Return all that decides the measures but the seed."""
        described: dict[str, Any] = plain(self)
        unused = {"class", "seeds", *(name for name in ("members", "student") if not getattr(self, name))}
        if self.student is not None and not self.student.mix:
            del described["student"]["mix"]
        return {key: value for key, value in described.items() if key not in unused}

    def fit_hash(self) -> str:
        """Return the hash of what decides the fitted posterior, whatever is measured then."""
        made = [self.members, self.student] if self.members or self.student else []
        return config_hash([self.task, self.method, self.include, self.supervised, *made])

    def fits(self) -> list[Config]:
        """Return the members as rows that measure nothing."""
        return [Config("", one.task, one.method, (), include=one.include) for one in self.members]
