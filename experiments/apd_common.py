"""What the APD experiments share: networks, data on one scale, and posteriors that are fitted once and kept."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

import bayesify
from bayesify.data import gaussian_like, uniform_like
from experiments.data import load
from experiments.records import PICTURES, RESULTS, Records, config_hash

__all__ = [
    "BOUNDS", "NETWORKS", "Data", "arguments_of", "draw_curves", "flat", "keep_picture", "kept", "mlp", "mnist",
    "rows_of",
]  # fmt: skip

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
    """Data of an experiment: pairs (inputs, targets), and OOD inputs by name, all on [-1, 1]."""

    train: tuple[Tensor, Tensor]
    val: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    ood: dict[str, Tensor]

    def loader(self, part: str, batch: int = 100) -> DataLoader[tuple[Tensor, ...]]:
        """Return batches of a part, each by one look-up: example by example they cost a fifth of a step."""
        data = TensorDataset(*getattr(self, part))
        order = RandomSampler(data) if part == "train" else SequentialSampler(data)
        return DataLoader(data, batch_size=None, sampler=BatchSampler(order, batch, drop_last=False))


def mnist(*, trial: bool, number: int = 2000) -> Data:
    """Return MNIST and five OOD sets; the paper's are on five scales, these on one."""
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
    network: nn.Module, method: bayesify.Method, data: Data, work: Path | None, *, batch: int = 100, best: bool = False
) -> bayesify.Posterior:  # fmt: skip
    """Return a fitted posterior from a folder, or fit it.

    There are no checkpoints on the way: each would write the whole bank again, and a run takes minutes.

    Args:
        network: The network, the same in every call.
        method: How it is learned.
        data: Whose training part it learns from.
        work: The folder; None keeps nothing.
        batch: Examples in a minibatch.
        best: Take the epoch with the least validation loss.
    """
    if work is not None:  # a folder for each set of settings
        work = work.with_name(f"{work.name}-{config_hash([method, str(network), batch, best])}")
    if work is not None and (work / "config.json").exists():
        return bayesify.load(work, network).eval()
    posterior = bayesify.convert(network, method)
    choice: dict[str, Any] = {"val_loader": data.loader("val", 1000), "patience": method.epochs} if best else {}
    bayesify.fit(posterior, data.loader("train", batch), progress=False, accuracy_tolerance=1.0, **choice)
    if work is not None:
        bayesify.save(posterior, work)
    return posterior.eval()


def arguments_of(text: str | None, name: str, **options: Any) -> argparse.Namespace:
    """Return the command line's arguments.

    Args:
        text: What `--help` says.
        name: Of the experiment.
        options: Defaults by name; a tuple of words gives choices, the first of them the default, and a list any number.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(f"{name}-work"), help="folder for fitted posteriors")
    parser.add_argument("--trial", action="store_true", help="a few seconds, and nothing is kept")
    for option, default in options.items():
        if isinstance(default, tuple):
            parser.add_argument(f"--{option}", choices=default, default=default[0])
        elif isinstance(default, list):
            parser.add_argument(f"--{option}", type=type(default[0]), nargs="*", default=default)
        else:
            parser.add_argument(f"--{option}", type=type(default), default=default)
    found = parser.parse_args()
    if found.trial:
        found.work = None
    torch.manual_seed(0)
    return found


def rows_of(name: str, arguments: argparse.Namespace, **settings: Any) -> Records:
    """Return the rows of an experiment's results file, which depend on all arguments; those of a trial are not kept."""
    chosen = {option: value for option, value in vars(arguments).items() if option not in ("work", "trial", "seeds")}
    return Records(None if arguments.trial else RESULTS / f"{name}.json", {"experiment": name, **chosen, **settings})


def keep_picture(figure: Any, name: str, arguments: argparse.Namespace) -> None:
    """Write a picture for the pages; that of a trial elsewhere."""
    path = (Path(tempfile.mkdtemp()) if arguments.trial else PICTURES) / f"{name}.svg"
    figure.tight_layout()
    figure.savefig(path)
    print(path)


def draw_curves(
    curves: Mapping[str, Mapping[float, float]], name: str, arguments: argparse.Namespace, *, x: str, y: str,
    scale: str = "log",
) -> None:  # fmt: skip
    """Draw curves by name, each as values by place."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7.5, 4))
    for label, curve in curves.items():
        axis.plot(list(curve), list(curve.values()), marker="o", markersize=3, label=label)
    axis.set(xlabel=x, ylabel=y, xscale=scale)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    keep_picture(figure, name, arguments)
