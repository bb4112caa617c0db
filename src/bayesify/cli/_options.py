"""The options that commands share, a dataclass for each group: tyro takes names, types, defaults and help from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tyro.conf import OmitArgPrefixes, UseAppendAction, arg

from bayesify import storage
from bayesify.cli._comparison import Made, Task, fit_method, train
from bayesify.cli._data import check_name, load_split, make_loader, ood_sets
from bayesify.cli._files import FileData, open_files
from bayesify.cli._network import load_network
from bayesify.cli._output import JobError, Output, UsageError
from bayesify.data import SPLITS
from bayesify.data.records import is_file
from bayesify.files.networks import is_named
from bayesify.methods import MAP, Method
from bayesify.prediction import PREDICTORS, as_views

MAX_LEVEL = 0.998  # beyond it a thousand resampled sets have no end of the interval

__all__ = [
    "Command",
    "DataOptions",
    "FileOptions",
    "Job",
    "LearningJob",
    "MethodOptions",
    "NetworkOptions",
    "OodOptions",
    "Opened",
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
            looked into after the installed packages. For files also timm:NAME (images), hf:NAME or hf:FOLDER (text,
            transformers), and mlp (tables), which is taken where nothing is given.
        model_arg: An argument of the factory or the named model, as a Python literal or text: --model-arg
            num_classes=10, --model-arg pretrained=False.
        weights: The trained weights: .safetensors, or from torch 2.10 on a .pt/.pth state dict, which is read without
            running code; not needed if the factory returns a trained network.
        device: Where to compute, as cpu or cuda:1.
        train_epochs: For files: train the network itself first, for at most so many epochs, until the validation NLL no
            longer falls. None is 50 for an mlp, and 0 for others.
        train_lr: The rate of that training (Adam); None is 5e-5 for hf:, and 1e-3 for others.
    """

    model: Annotated[str | None, arg(metavar="MODULE:FACTORY|NAME")] = None
    model_arg: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="KEY=VALUE")] = ()
    weights: Annotated[Path | None, arg(metavar="FILE")] = None
    device: str = "cpu"
    train_epochs: Annotated[int | None, arg(metavar="N")] = None
    train_lr: Annotated[float | None, arg(metavar="RATE")] = None

    def training(self, model: str) -> tuple[int, float]:
        """Return for how many epochs a network is trained first, and at which rate."""
        epochs = (50 if model == "mlp" else 0) if self.train_epochs is None else self.train_epochs
        return epochs, self.train_lr or (5e-5 if model.startswith("hf:") else 1e-3)

    def load(self, seed: int) -> nn.Module:
        """Load the network; random weights are the same each time, so that checkpoints fit."""
        torch.manual_seed(seed)
        if self.model is None or is_named(self.model):
            raise UsageError(
                "give --model package.module:factory; networks by name are for data by path, as --data x.csv"
            )
        return load_network(self.model, self.model_arg, self.weights, self.device)


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """How a file is read.

    Attributes:
        label: The label column of a file; the classes of a folder of images are its sub-folders.
        text: The column with texts; None is 'text' where the network is one of transformers.
        image: The column with the paths of images, relative to the file; None is 'file' where the network is timm's.
        shares: Of the rows of a file that are for train, val and test, chosen by --seed. A saved posterior has its own.
        split_column: The column that says train, val or test instead.
        classes: The names of the classes in the order of the network's outputs, as cat,dog; None sorts them.
        ignore: A column of a table that is left out.
        raw: Leave the numbers of a table as they are, for a network that was trained on them so.
        image_size: Height and width of images in pixels; None asks timm's model.
        grey: Read images as grey, for a network of yours with one channel.
        tokenizer: Of transformers, a name or a folder, for texts with a network of your own.
        max_tokens: Where texts are cut.
        strict: End with exit code 1 if a row could not be used.
    """

    label: Annotated[str, arg(metavar="COLUMN")] = "label"
    text: Annotated[str | None, arg(metavar="COLUMN")] = None
    image: Annotated[str | None, arg(metavar="COLUMN")] = None
    shares: Annotated[str, arg(metavar="TRAIN,VAL,TEST")] = ".7,.15,.15"
    split_column: Annotated[str | None, arg(metavar="COLUMN")] = None
    classes: Annotated[str | None, arg(metavar="NAMES")] = None
    ignore: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="COLUMN")] = ()
    raw: bool = False
    image_size: Annotated[int | None, arg(metavar="PIXELS")] = None
    grey: bool = False
    tokenizer: Annotated[str | None, arg(metavar="NAME|DIR")] = None
    max_tokens: Annotated[int, arg(metavar="N")] = 256
    strict: bool = False

    def parsed_shares(self) -> tuple[float, float, float]:
        """Return the shares as numbers."""
        try:
            train, val, test = map(float, self.shares.split(","))
            return train, val, test
        except ValueError:
            raise UsageError(f"--shares {self.shares!r} are not three numbers, as .7,.15,.15") from None


@dataclass(frozen=True, kw_only=True)
class DataOptions(FileOptions):
    """Which data are meant.

    Attributes:
        data: A named set (digits, mnist, fashion-mnist, cifar10, uci/yacht, ...; read from the folder BAYESIFY_DATA),
            or a function that returns a torch Dataset of (input, target), called with split='train', 'val' or 'test';
            it may return None for 'val'. Or a path: *.csv, *.tsv, *.parquet, *.jsonl, or a folder of images.
        normalise: For named images, which are floats in [0, 1]: 'imagenet' then removes ImageNet's mean and standard
            deviation, as the public CIFAR-10 networks expect. Tables are not scaled.
        batch_size: How many inputs go through the network at once.
    """

    data: Annotated[str, arg(metavar="PATH|NAME|MODULE:FUNCTION")]
    normalise: Literal["none", "imagenet"] = "none"
    batch_size: int = 128

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.batch_size < 1:
            raise ValueError(f"--batch-size {self.batch_size} is less than 1.")

    @property
    def by_path(self) -> bool:
        """Whether the data are a file or a folder."""
        return self.data not in SPLITS and is_file(self.data)

    def find(self, split: str) -> Dataset[Any] | None:
        """Load a split of a named set or of a function; None where there is no 'val'."""
        return load_split(self.data, split, normalise=self.normalise)


@dataclass(frozen=True, kw_only=True)
class SplitOptions(DataOptions):
    """Which data are meant.

    Attributes:
        split: Which part of --data: train, val, test; of a file also all. None is test; with a saved posterior all of a
            file that it was not fitted on, and for 'predict' all of every file.
    """

    split: str | None = None


@dataclass(frozen=True, kw_only=True)
class OodOptions(SplitOptions):
    """Which data are meant.

    Attributes:
        ood: Out-of-distribution data for the AUROC; as --data, split 'test', all of a file. Named images get the
            channels and the size of those of --data.
    """

    ood: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="PATH|NAME|MODULE:FUNCTION")] = ()


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


@dataclass(frozen=True)
class Opened:
    """A network with its data.

    Attributes:
        network: The network.
        find: Returns a part of the data; None where there is no 'val'.
        name: What the data are called.
        likelihood: What the outputs mean.
        files: The file that the data are from, if they are.
    """

    network: nn.Module
    find: Callable[[str], Dataset[Any] | None]
    name: str
    likelihood: str = "classification"
    files: FileData | None = None

    def part(self, split: str) -> Dataset[Any]:
        """Load a part that must be there."""
        found = self.find(split)
        if found is not None:
            return found
        if self.files is not None:
            raise JobError(f"{self.name} has no row for {split!r}: give other --shares, or --split all.")
        raise JobError(f"{self.name} has no {split!r} split. Give --data as a package.module:function that makes one.")

    def unit(self) -> dict[str, str]:
        """Say in which unit the figures of numbers are, where they were standardised."""
        labels = None if self.files is None else self.files.encoding.labels
        if labels is None or labels.std == 1:
            return {}
        return {f"unit of {labels.column!r}": f"{labels.std:.4g}, its standard deviation"}

    def split(self, asked: str | None) -> str:
        """Return the part that is measured."""
        return asked or ("test" if self.files is None else self.files.default_split())


@dataclass(frozen=True, kw_only=True)
class Job(Command):
    """A command with a network and data."""

    network: OmitArgPrefixes[NetworkOptions]
    data: OmitArgPrefixes[DataOptions]
    prediction: OmitArgPrefixes[PredictionOptions]

    def open(
        self,
        folders: Sequence[str | Path] = (),
        *,
        likelihood: str = "classification",
        checkpoint: Path | None = None,
    ) -> Opened:
        """Open network and data; of files, those of saved posteriors, or new ones whose network is trained first."""
        seed, name = self.prediction.seed, self.data.data
        if not self.data.by_path:
            check_name(name)
            return Opened(self.network.load(seed), self.data.find, name, likelihood)
        torch.manual_seed(seed)
        shown = not self.quiet
        files = open_files(self.network, self.data, folders=folders, likelihood=likelihood, seed=seed, shown=shown)
        opened = Opened(files.network, files.find, name, files.settings.likelihood, files)
        epochs, rate = self.network.training(files.settings.model)
        if folders or not epochs:
            return opened
        size = self.data.batch_size
        val = files.find("val")
        trained = train(
            files.network,
            make_loader(opened.part("train"), size, shuffle=True),
            None if val is None else make_loader(val, size),
            MAP(epochs=epochs, lr=rate, optimizer="adam"),
            likelihood=likelihood,
            checkpoint=None if checkpoint is None else checkpoint / "network",
            seed=seed,
            progress=shown,
        )
        files.network, files.stored = trained, True
        return replace(opened, network=trained)

    def finish(self, opened: Opened, output: Output) -> Output:
        """Say which rows of a file could not be used; with --strict, that is a failure."""
        if opened.files is None:
            return output
        opened.files.tell()
        unread = len(opened.files.unread.rows)
        data = {**output.data, "unread_rows": unread}
        return replace(output, data=data, failed=output.failed or (self.data.strict and unread > 0))

    def task(
        self, opened: Opened, split: str, methods: Iterable[Method], learning: MethodOptions | None = None
    ) -> Task:
        """Load the data that the methods need: training data where one learns, validation data where one chooses."""
        methods, learning = list(methods), learning or MethodOptions()
        test, data = opened.part(split), self.data

        def loader(found: Dataset[Any] | None, *, shuffle: bool = False) -> DataLoader[Any] | None:
            return None if found is None else make_loader(found, data.batch_size, shuffle=shuffle)

        val = opened.part("val") if learning.calibrate or learning.widen else None
        if val is None and any(method.surveys for method in methods):
            val = opened.find("val")
        ood = self._ood(opened, test)
        return Task(
            network=opened.network,
            test=make_loader(test, data.batch_size),
            train=loader(opened.part("train"), shuffle=True) if any(method.learns for method in methods) else None,
            val=loader(val),
            widens=learning.widen,
            calibrates=learning.calibrate,
            ood={name: make_loader(found, data.batch_size) for name, found in ood.items()},
            likelihood=opened.likelihood,
            checkpoint=learning.checkpoint,
            predicting=self.prediction.options,
            score=getattr(self.prediction, "score", "total"),
            seed=self.prediction.seed,
            progress=not self.quiet,
        )

    def _ood(self, opened: Opened, test: Dataset[Any]) -> dict[str, Dataset[Any]]:
        specs: Sequence[str] = getattr(self.data, "ood", ())
        paths = [spec for spec in specs if spec not in SPLITS and is_file(spec)]
        if paths and opened.files is None:
            raise UsageError(f"--ood {paths[0]}: a path needs --data that is one too")
        named = [spec for spec in specs if spec not in paths]
        found = ood_sets(named, test, normalise=self.data.normalise)
        return found | {path: opened.files.unlabelled(path) for path in paths if opened.files is not None}


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

    def open_data(self, folders: Sequence[str | Path] = ()) -> Opened:
        """Open network and data as the methods want them."""
        return self.open(folders, likelihood=self.learning.likelihood, checkpoint=self.learning.checkpoint)

    def one_method(self) -> Method:
        """Return the method where there can be only one."""
        if len(self.methods) != 1:
            raise UsageError("give one --method NAME; 'bayesify methods' lists them")
        return next(iter(self.methods.values()))

    def one_posterior(self, folder: Path | None, asked: str | None) -> tuple[Opened, Task, Made]:
        """Load a saved posterior, or make one from a method."""
        if (folder is None) == (not self.methods):
            raise UsageError("give either --posterior DIR, or --method NAME to make one now")
        methods = [] if folder is not None else [self.one_method()]
        opened = self.open_data([] if folder is None else [folder])
        task = self.task(opened, opened.split(asked), methods, self.learning)
        made = fit_method(task, methods[0]) if folder is None else (storage.load(folder, opened.network), None)
        return opened, task, made
