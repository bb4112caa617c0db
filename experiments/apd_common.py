"""What the APD experiments share: networks, data on one scale, and posteriors that are fitted once and kept."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify.data import gaussian_like, load, uniform_like
from experiments.rows import Rows

__all__ = ["BOUNDS", "NETWORKS", "RESULTS", "Data", "arguments_of", "flat", "kept", "mlp", "mnist", "rows_of"]

RESULTS = Path(__file__).parent / "results"
NETWORKS = {"fcNN1": (784, 100, 10), "fcNN2": (784, 400, 400, 10), "digits": (64, 100, 10)}
BOUNDS = (-1.0, 1.0)


def mlp(*sizes: int, dropout: float = 0.0) -> nn.Sequential:
    """Return linear layers with ReLU, and dropout, between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        layers += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers[: -2 if dropout else -1])


def flat(images: Tensor, size: int = 28) -> Tensor:
    """Map images on [0, 1], (N, C, H, W), to grey ones of one size on [-1, 1], (N, size^2)."""
    grey = images.mean(1, keepdim=True)
    if grey.shape[-1] != size:
        grey = interpolate(grey, size=size, mode="bilinear", antialias=True).clamp(0, 1)
    return 2 * grey.flatten(1) - 1


@dataclass(frozen=True)
class Data:
    """Data of an experiment: pairs (inputs, targets), and foreign inputs by name, all on [-1, 1]."""

    train: tuple[Tensor, Tensor]
    val: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    foreign: dict[str, Tensor]

    def loader(self, part: str, batch: int = 100) -> DataLoader[tuple[Tensor, ...]]:
        """Return batches of a part."""
        return DataLoader(TensorDataset(*getattr(self, part)), batch, shuffle=part == "train")


def mnist(*, trial: bool, number: int = 2000) -> Data:
    """Return MNIST and five foreign sets; the paper's are on five scales, these on one."""
    most, number = (300, 50) if trial else (None, number)

    def part(name: str) -> tuple[Tensor, Tensor]:
        split = load("mnist", name)
        return flat(split.inputs[:most]), split.targets[:most]

    test = part("test")
    sets = {
        "notMNIST": flat(load("notmnist", "test").inputs[:number]),
        "Omniglot": flat(load("omniglot", "test").inputs[:number]),
        "CIFAR-10, grey": flat(load("cifar10", "test").inputs[:number]),
        "Gaussian": gaussian_like(test[0][:number], generator=0),
        "uniform": uniform_like(test[0][:number], generator=0),
    }
    return Data(part("train"), part("val"), test, sets)


def kept(
    network: nn.Module, method: bayesify.Method, data: Data, work: Path | None, *, seed: int = 0, batch: int = 100,
    best: bool = False, **options: Any,
) -> bayesify.Posterior:  # fmt: skip
    """Return a fitted posterior from a folder, or fit it, going on where a run was stopped.

    Args:
        network: The network, the same in every call.
        method: How it is learned.
        data: Whose training part it learns from.
        work: The folder; None keeps nothing.
        seed: Of the fit.
        batch: Examples in a minibatch.
        best: Take the epoch with the least validation loss.
        options: Of `fit`.
    """
    if work is not None and (work / "posterior" / "config.json").exists():
        return bayesify.load(work / "posterior", network).eval()
    posterior = bayesify.convert(network, method)
    if best:
        options |= {"val_loader": data.loader("val", 1000), "patience": method.epochs}
    if work is not None:
        options["checkpoint"] = work / "run"
    bayesify.fit(posterior, data.loader("train", batch), seed=seed, progress=False, accuracy_tolerance=1.0, **options)
    if work is not None:
        bayesify.save(posterior, work / "posterior")
    return posterior.eval()


def arguments_of(parser: argparse.ArgumentParser, name: str, argv: Iterable[str] | None = None) -> argparse.Namespace:
    """Return the arguments, with those that every experiment here has."""
    parser.add_argument("--work", type=Path, default=Path(f"{name}-work"), help="folder for fitted posteriors")
    parser.add_argument("--trial", action="store_true", help="a few seconds, and nothing is kept")
    found = parser.parse_args(None if argv is None else list(argv))
    if found.trial:
        found.work = None
    torch.manual_seed(0)
    return found


def rows_of(name: str, arguments: argparse.Namespace, command: str = "") -> Rows:
    """Return the rows of an experiment's results file; those of a trial are not kept."""
    path = None if arguments.trial else RESULTS / f"{name}.json"
    return Rows(path, f"python -m experiments.{command or name}")
