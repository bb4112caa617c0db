"""The options that commands share, a dataclass for each group: tyro takes names, types, defaults and help from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tyro.conf import OmitArgPrefixes, UseAppendAction, arg

from bayesify import storage
from bayesify.cli._comparison import Made, Task, fit_method
from bayesify.cli._data import load_split, make_loader, ood_sets
from bayesify.cli._network import load_network
from bayesify.cli._output import JobError, Output, UsageError
from bayesify.methods import Method
from bayesify.prediction import PREDICTORS, as_views

MAX_LEVEL = 0.998  # beyond it a thousand resampled sets have no end of the interval

__all__ = [
    "Command",
    "DataOptions",
    "Job",
    "LearningJob",
    "MethodOptions",
    "NetworkOptions",
    "OodOptions",
    "PredictionOptions",
    "ScoreOptions",
    "SplitOptions",
]


@dataclass(frozen=True, kw_only=True)
class Command(ABC):
    """What every command takes.

    Attributes:
        json: Print one JSON object to stdout, and nothing else there.
        quiet: Show no progress bars (they go to stderr).
        debug: Show the traceback of an error.
    """

    json: bool = False
    quiet: bool = False
    debug: bool = False

    @abstractmethod
    def run(self) -> Output:
        """Do the work."""


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """Which network is meant.

    Attributes:
        model: A function or class that returns the torch.nn.Module, as package.module:name; the present folder is
            looked into after the installed packages.
        model_arg: An argument of the factory, as a Python literal or text: --model-arg num_classes=10.
        weights: The trained weights: .safetensors, or from torch 2.10 on a .pt/.pth state dict, which is read without
            running code; not needed if the factory returns a trained network.
        device: Where to compute, as cpu or cuda:1.
    """

    model: Annotated[str, arg(metavar="MODULE:FACTORY")]
    model_arg: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="KEY=VALUE")] = ()
    weights: Annotated[Path | None, arg(metavar="FILE")] = None
    device: str = "cpu"

    def load(self, seed: int) -> nn.Module:
        """Load the network; random weights are the same each time, so that checkpoints fit."""
        torch.manual_seed(seed)
        return load_network(self.model, self.model_arg, self.weights, self.device)


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Which data are meant.

    Attributes:
        data: A named set (digits, mnist, fashion-mnist, cifar10, uci/yacht, ...; read from the folder BAYESIFY_DATA),
            or a function that returns a torch Dataset of (input, target), called with split='train', 'val' or 'test';
            it may return None for 'val'.
        normalise: For named images, which are floats in [0, 1]: 'imagenet' then removes ImageNet's mean and standard
            deviation, as the public CIFAR-10 networks expect. Tables are not scaled.
        batch_size: How many inputs go through the network at once.
    """

    data: Annotated[str, arg(metavar="NAME|MODULE:FUNCTION")]
    normalise: Literal["none", "imagenet"] = "none"
    batch_size: int = 128

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.batch_size < 1:
            raise ValueError(f"--batch-size {self.batch_size} is less than 1.")

    def find(self, split: str) -> Dataset[Any] | None:
        """Load a split; None where there is no 'val'."""
        return load_split(self.data, split, normalise=self.normalise)

    def part(self, split: str) -> Dataset[Any]:
        """Load a split that must be there."""
        found = self.find(split)
        if found is None:
            raise JobError(
                f"{self.data} has no {split!r} split. Give --data as a package.module:function that makes one."
            )
        return found


@dataclass(frozen=True, kw_only=True)
class SplitOptions(DataOptions):
    """Which data are meant.

    Attributes:
        split: Which part of --data.
    """

    split: str = "test"


@dataclass(frozen=True, kw_only=True)
class OodOptions(SplitOptions):
    """Which data are meant.

    Attributes:
        ood: Out-of-distribution data for the AUROC; as --data, split 'test'. Named images get the channels and the size
            of those of --data.
    """

    ood: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME|MODULE:FUNCTION")] = ()


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """Which method is meant, and how it is fitted.

    Attributes:
        method: A method of 'bayesify methods'; the network is converted, and fitted on 'train' where the method learns.
            Its settings are options of its name, as --swag.rank 10: --help after --method swag shows them.
        set: A setting of all the methods given that have it, --set lr=0.01, or of one of them, --set swag.rank=10.
        epochs: Of every method given; with 0 there is no training, and laplace still makes its pass over the data.
            None takes the method's.
        likelihood: What the outputs mean.
        widen: Find the width of the noise of every method given on the 'val' split; with --epochs 0, of one that was
            not trained.
        calibrate: Fit temperatures and pooling (regression: a scale of the variance) on the 'val' split afterwards.
        checkpoint: Keep the state of the fit here; the same command then goes on from it.
    """

    method: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME")] = ()
    set: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="[METHOD.]KEY=VALUE")] = ()
    epochs: Annotated[int | None, arg(metavar="N")] = None
    likelihood: Literal["classification", "binary", "regression"] = "classification"
    widen: bool = False
    calibrate: bool = False
    checkpoint: Annotated[Path | None, arg(metavar="DIR")] = None

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.epochs is not None and self.epochs < 0:
            raise ValueError(f"--epochs {self.epochs} is less than 0.")


@dataclass(frozen=True, kw_only=True)
class PredictionOptions:
    """How predictions are made.

    Attributes:
        num_draws: How many draws; None takes the posterior's own number.
        views: What of the images the network sees, as identity,mirror; shift(2,0) is two pixels down. None takes the
            posterior's own.
        seed: Of everything random.
    """

    num_draws: Annotated[int | None, arg(metavar="N")] = None
    how: Annotated[str, arg(metavar="NAME", help=f"One of {', '.join(PREDICTORS)}.")] = "sampling"
    views: Annotated[str | None, arg(metavar="NAMES")] = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.num_draws is not None and self.num_draws < 1:
            raise ValueError(f"--num-draws {self.num_draws} is less than 1.")
        as_views(self.views)  # a wrong name should not wait for the data

    @property
    def options(self) -> dict[str, Any]:
        """Return them as arguments of `predict`."""
        return {"num_draws": self.num_draws, "how": self.how, "views": self.views}


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(PredictionOptions):
    """How predictions are made.

    Attributes:
        score: The uncertainty that detects OOD inputs: total, epistemic, ...
        intervals: Show bootstrap intervals of this level, as 0.95, of all measures.
    """

    score: str = "total"
    intervals: Annotated[float | None, arg(metavar="LEVEL")] = None

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        if self.intervals is not None and not 0 < self.intervals <= MAX_LEVEL:
            raise ValueError(f"--intervals {self.intervals} is no level between 0 and {MAX_LEVEL}, such as 0.95.")


@dataclass(frozen=True, kw_only=True)
class Job(Command):
    """A command with a network and data."""

    network: OmitArgPrefixes[NetworkOptions]
    data: OmitArgPrefixes[DataOptions]
    prediction: OmitArgPrefixes[PredictionOptions]

    def task(
        self, network: nn.Module, split: str, methods: Iterable[Method], learning: MethodOptions | None = None
    ) -> Task:
        """Load the data that the methods need: training data where one learns, validation data where one chooses."""
        methods, learning = list(methods), learning or MethodOptions()
        test, data = self.data.part(split), self.data

        def loader(found: Dataset[Any] | None, *, shuffle: bool = False) -> DataLoader[Any] | None:
            return None if found is None else make_loader(found, data.batch_size, shuffle=shuffle)

        val = data.part("val") if learning.calibrate or learning.widen else None
        if val is None and any(method.surveys for method in methods):
            val = data.find("val")
        ood = ood_sets(getattr(data, "ood", ()), test, normalise=data.normalise)
        return Task(
            network=network,
            test=make_loader(test, data.batch_size),
            train=loader(data.part("train"), shuffle=True) if any(method.learns for method in methods) else None,
            val=loader(val),
            widens=learning.widen,
            calibrates=learning.calibrate,
            ood={name: make_loader(found, data.batch_size) for name, found in ood.items()},
            likelihood=learning.likelihood,
            checkpoint=learning.checkpoint,
            predicting=self.prediction.options,
            score=getattr(self.prediction, "score", "total"),
            seed=self.prediction.seed,
            progress=not self.quiet,
        )


@dataclass(frozen=True, kw_only=True)
class LearningJob(Job):
    """A command that fits methods: each that `--method` names becomes a field, whose options have its name."""

    always: ClassVar[tuple[str, ...]] = ()  # methods that take part unasked

    learning: OmitArgPrefixes[MethodOptions]

    @property
    def methods(self) -> dict[str, Method]:
        """The methods by name, with the epochs that the command line asks for."""
        epochs, found = self.learning.epochs, [value for value in vars(self).values() if isinstance(value, Method)]
        return {m.name: m if epochs is None or m.name in self.always else replace(m, epochs=epochs) for m in found}

    def one_method(self) -> Method:
        """Return the method where there can be only one."""
        if len(self.methods) != 1:
            raise UsageError("give one --method NAME; 'bayesify methods' lists them")
        return next(iter(self.methods.values()))

    def one_posterior(self, folder: Path | None, split: str) -> tuple[Task, Made]:
        """Load a saved posterior, or make one from a method."""
        if (folder is None) == (not self.methods):
            raise UsageError("give either --posterior DIR, or --method NAME to make one now")
        methods = [] if folder is not None else [self.one_method()]
        network = self.network.load(self.prediction.seed)
        task = self.task(network, split, methods, self.learning)
        return task, (fit_method(task, methods[0]) if folder is None else (storage.load(folder, network), None))
