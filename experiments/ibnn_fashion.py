"""FashionMNIST with LeNets of 1, 4, 16 and 64 times the parameters: iBNN and mean-field VI, as in the paper's Figure 4.

`BAYESIFY_DATA=... python -m experiments.ibnn_fashion` trains each from scratch and prints the test error, NLL and ECE;
hours on two cores for the largest. `--part components` draws Figure 2 for the smallest iBNN of those. Rows go to
`experiments/results/ibnn_fashion_*.json`; what is there is not made again, and fits that were stopped go on from their
checkpoints in `--work`. `--trial` takes a few images and keeps nothing.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu
from torch.utils.data import DataLoader, RandomSampler, Subset

import bayesify
from bayesify import IBNN, BayesAdapter
from bayesify.data import load
from bayesify.evaluation.components import look_at_components
from bayesify.evaluation.report import plot_components
from experiments.rows import Rows
from experiments.scoring import scored

RESULTS = Path(__file__).parent / "results"
DRAWS = 16  # two of every component


class LeNet(nn.Module):
    """The authors' LeNet, with every hidden width multiplied.

    >>> [sum(p.numel() for p in LeNet(factor).parameters()) for factor in (1, 2)]
    [41806, 165202]
    """

    def __init__(self, factor: int) -> None:
        """Make it; a factor of 2 has about four times the parameters."""
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6 * factor, 5)
        self.conv2 = nn.Conv2d(6 * factor, 16 * factor, 5)
        self.conv3 = nn.Conv2d(16 * factor, 120 * factor, 4)
        self.fc1 = nn.Linear(120 * factor, 64 * factor)
        self.fc2 = nn.Linear(64 * factor, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 1, 28, 28) to logits (B, 10)."""
        h = max_pool2d(relu(self.conv1(x)), 2)
        h = max_pool2d(relu(self.conv2(h)), 2)
        h = relu(self.conv3(h)).flatten(1)
        logits: Tensor = self.fc2(relu(self.fc1(h)))
        return logits


def methods(epochs: int) -> dict[str, bayesify.Method]:
    """Return the methods, set up to train from scratch."""

    def plain(rate: float) -> bayesify.Method:
        return bayesify.MAP(epochs=epochs, lr=rate, schedule="held", weight_decay=5e-4)

    def mean_field(rate: float) -> bayesify.Method:
        return BayesAdapter(
            epochs=epochs, lr=rate, schedule="held", log_std_lr=0.1, log_std_schedule="constant",
            start_std=(0.0067, 0.018), prior_std=1.0,
        )  # fmt: skip

    # The authors' README has K = 8 and a variational rate of .2 K for a LeNet. In a short run that rate alone is an
    # advantage, so the others have rows with more of it too.
    return {
        "plain": plain(0.02),
        "iBNN": IBNN.from_scratch(8, epochs=epochs, lr=0.02, latent_lr=0.2),
        "mean-field VI": mean_field(0.02),
        "plain, rate .1": plain(0.1),
        "mean-field VI, rate .1": mean_field(0.1),
    }


class Data:
    """Batches: all training images but the last 5,000 to learn from, those to find a temperature, the test images."""

    def __init__(self, images: int | None, *, trial: bool) -> None:
        """Read everything once; an epoch has so many images, others each time, or all."""
        train, test = load("fashion-mnist", "train"), load("fashion-mnist", "test")
        own, val = len(train) - 5000, range(len(train) - 5000, len(train))
        mine = Subset(train, range(256 if trial else own))
        self.train = DataLoader(mine, 128, sampler=RandomSampler(mine, num_draws=images), drop_last=True)
        self.val = DataLoader(Subset(train, val[:64] if trial else val), 500)
        self.test = DataLoader(Subset(test, range(64 if trial else len(test))), 500)


def fitted(data: Data, name: str, factor: int, seed: int, arguments: argparse.Namespace) -> bayesify.Posterior:
    """Train a network of one size with one method, or go on with it."""
    torch.manual_seed(seed)
    posterior = bayesify.convert(LeNet(factor), methods(arguments.epochs)[name])
    folder = arguments.work / f"{name}-{factor}-{seed}-{arguments.epochs}-{arguments.images}".replace(" ", "-")
    checkpoint = {} if arguments.trial else {"checkpoint": folder, "checkpoint_steps": 200}
    bayesify.fit(posterior, data.train, num_data=len(data.train.dataset), seed=seed, progress=False, **checkpoint)
    return posterior


def size_row(data: Data, name: str, factor: int, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train and test."""
    posterior = fitted(data, name, factor, seed, arguments)
    parameters = sum(p.numel() for p in posterior.network.parameters())
    row = {"seed": seed, "epochs": arguments.epochs, "parameters": parameters}
    return {**row, **scored(posterior, data.val, data.test, num_draws=None if name == "plain" else DRAWS, seed=seed)}


def components_row(data: Data, pictures: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Look at the components of the smallest iBNN, and draw them."""
    found = look_at_components(fitted(data, "iBNN", 1, 0, arguments), data.test)  # type: ignore[arg-type]
    print(plot_components(found, pictures / "ibnn_fashion_components.svg"))
    return {"accuracy": [round(float(a), 5) for a in found.accuracy], "disagreement": found.mean_disagreement}


def main() -> None:
    """Make the rows of a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("sizes", "components"), default="sizes")
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 2, 4, 8], help="factors of the widths")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--images", type=int, help="training images in an epoch; all, if not given")
    parser.add_argument("--only", nargs="*", help="names of methods")
    parser.add_argument("--work", type=Path, default=Path("ibnn-fashion-work"), help="folder for checkpoints")
    parser.add_argument("--trial", action="store_true", help="a few images, and nothing is kept")
    arguments = parser.parse_args()
    if arguments.trial:
        arguments.epochs = 1
    data, part = Data(None if arguments.trial else arguments.images, trial=arguments.trial), arguments.part
    command = f"python -m experiments.ibnn_fashion --part {part} --epochs {arguments.epochs}"
    command += f" --images {arguments.images}" if arguments.images else ""
    rows = Rows(None if arguments.trial else RESULTS / f"ibnn_fashion_{part}.json", command)
    if part == "components":
        pictures = arguments.work if arguments.trial else RESULTS
        rows.row("iBNN, 1x", partial(components_row, data, pictures, arguments))
        return
    for seed, factor, name in product(arguments.seeds, arguments.sizes, arguments.only or methods(1)):
        make = partial(size_row, data, name, factor, seed, arguments)
        rows.row(f"{name}, {factor**2}x parameters, seed {seed}", make)


if __name__ == "__main__":
    main()
