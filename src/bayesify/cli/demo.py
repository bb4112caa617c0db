"""The whole path on embedded data: train a small network, make it Bayesian with every method, compare, report."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from bayesify.cli._comparison import Comparison, Made, Task, compare, fit_method
from bayesify.conversion import convert
from bayesify.data import Split, photo_patches, read_digits, uniform_like
from bayesify.fitting import History, fit
from bayesify.methods import MAP, Method, list_methods

__all__ = ["Demo", "DemoData", "make_network", "read_data", "run_demo", "train_network"]

TRAINING = MAP(epochs=50, lr=0.1, schedule="cosine")
NUM_TRAIN = 200
NUM_OOD = 500


@dataclass(frozen=True)
class DemoData:
    """What the demo learns from and is measured on.

    Attributes:
        train: The few digits that the network and the methods learn from.
        val: Digits to calibrate on.
        test: Digits for the table only.
        ood: Images that are no digits, by name: patches of photographs, and uniform noise.
    """

    train: Split
    val: Split
    test: Split
    ood: dict[str, Tensor]


@dataclass(frozen=True)
class Demo:
    """What the demo found.

    Attributes:
        introduction: What was trained on what, as a sentence.
        comparison: The rows, and what failed.
        report: The HTML file; None if it could not be written.
        seconds: Wall time.
    """

    introduction: str
    comparison: Comparison
    report: Path | None
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the tensors as plain values."""
        report = None if self.report is None else str(self.report)
        rest = {"report": report, "seconds": self.seconds}
        return {"introduction": self.introduction, **self.comparison.to_dict(), **rest}


def run_demo(out: Path, *, seed: int = 0, quick: bool = False, progress: bool = True) -> Demo:
    """Train a network on a few digits, make it Bayesian with every registered method, compare, and write a report.

    The network stands for one that you have trained. It learns from only 200 of the 1078 digits there are for
    training, without weight decay and until its training loss is near zero: like most networks that are trained to the
    end it is surer than it should be, and with all the digits there would be little left to improve. The
    other digits of the training part join the test part. Every method starts from this network with its own
    `example()` settings and sees the same 200 digits; calibration uses the validation part, and the test part is only
    measured on.

    Args:
        out: Folder of the report.
        seed: Of the choice of digits, the training and the draws.
        quick: Train for a moment only, to check that everything runs; the figures then say nothing.
        progress: Whether to show progress bars.

    Returns:
        The table's rows, what failed, and where the report is.
    """
    with _one_thread():
        return _run(out, seed, quick, progress)


def _run(out: Path, seed: int, quick: bool, progress: bool) -> Demo:
    start = time.perf_counter()
    data = read_data(seed=seed, num_train=64 if quick else NUM_TRAIN, num_other=100 if quick else None)
    everything = dict(sorted(list_methods().items(), key=lambda item: item[0] != MAP.name))  # the plain network first
    with tqdm(total=len(everything) + 1, desc="training", file=sys.stderr, disable=not progress, leave=False) as bar:
        network, history, seconds = train_network(data.train, seed=seed, quick=quick, progress=progress)
        task = Task(
            network=network,
            train=_loader(data.train, shuffle=True),
            val=_loader(data.val),
            calibrates=True,
            test=_loader(data.test),
            ood={name: _loader(Split(x, torch.zeros(len(x)).long())) for name, x in data.ood.items()},
            plain_seconds=seconds,
            seed=seed,
            progress=progress,
        )

        def each(name: str) -> None:
            bar.update()
            bar.set_description(name)

        makers: dict[str, Callable[[], Made]] = {
            name: partial(_make, task, cls, quick=quick) for name, cls in everything.items()
        }
        comparison = compare(task, makers, each=each)
        bar.update()
    introduction = _introduction(network, data, history, seconds)
    comparison, report = comparison.with_report(
        out / "report.html",
        title="bayesify demo",
        images=data.test.inputs,
        class_names=[str(digit) for digit in range(10)],
        ood_images=data.ood,
        notes=[introduction],
    )
    return Demo(introduction, comparison, report, time.perf_counter() - start)


def read_data(*, seed: int, num_train: int, num_other: int | None = None) -> DemoData:
    """Read the digits and cut the OOD images.

    Args:
        seed: Decides which digits are learned from.
        num_train: How many are.
        num_other: At most so many in each of the other parts; None takes all.
    """
    whole, test = read_digits("train"), read_digits("test")
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed))
    unused = whole.part(order[num_train:])
    test = Split(torch.cat([test.inputs, unused.inputs]), torch.cat([test.targets, unused.targets]))
    some = slice(num_other)
    photos = photo_patches(min(NUM_OOD, num_other or NUM_OOD), seed=seed)
    ood = {"photos": photos, "noise": uniform_like(photos, generator=seed)}
    return DemoData(whole.part(order[:num_train]), read_digits("val").part(some), test.part(some), ood)


def make_network() -> nn.Module:
    """Make a small convolutional network with batch normalisation, for images (B, 1, 8, 8).

    >>> make_network()(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]

    features = [*block(1, 32, 1), *block(32, 64, 2), *block(64, 64, 2)]
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(4 * 64, 10))


def train_network(train: Split, *, seed: int, quick: bool, progress: bool) -> tuple[nn.Module, History, float]:
    """Train the network that stands for the user's, with the library's own loop.

    Returns:
        The network, the history of its training, and the seconds that it took.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = make_network()
    loader, epochs = _loader(train, shuffle=True), 2 if quick else None
    # What torch loads at the first step of all should not count as training.
    fit(convert(network, TRAINING), [next(iter(loader))], epochs=1, num_data=len(train), progress=False)
    posterior = convert(network, TRAINING)
    start = time.perf_counter()
    history = fit(posterior, loader, epochs=epochs, seed=seed, progress=progress)
    return posterior.network.eval(), history, time.perf_counter() - start


def _make(task: Task, cls: type[Method], *, quick: bool) -> Made:
    method = cls.example()
    return fit_method(task, dataclasses.replace(method, epochs=min(1, method.epochs)) if quick else method)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute in one thread: sums have one order then, and so small a network waits more for a second than it gains."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _loader(split: Split, *, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(split, batch_size=16 if shuffle else 256, shuffle=shuffle)


def _introduction(network: nn.Module, data: DemoData, history: History, seconds: float) -> str:
    weights, loss = sum(p.numel() for p in network.parameters()), history.epochs[-1].terms["total"]
    ood = " and ".join(f"{len(images)} of {name}" for name, images in data.ood.items())
    return (
        f"A network of {weights:,} weights learned {len(data.train)} digits in {seconds:.1f} s, to a training loss of "
        f"{loss:.4f}. The figures are of {len(data.test)} other digits; OOD inputs are {ood}. 'fit' is what a "
        "method adds to the training."
    )
