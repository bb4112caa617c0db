"""FashionMNIST with LeNets of 1, 4, 16 and 64 times the parameters: iBNN and mean-field VI, as in the paper's Figure 4.

`BAYESIFY_DATA=... python -m experiments.ibnn_fashion` trains each from scratch and prints the test error, NLL and ECE;
hours on two cores for the largest. Rows that are in `experiments/results/ibnn_fashion.json` are not run again, and runs
that were stopped go on from their checkpoints in `--work`. `--images 500 --epochs 1 --sizes 1` is a trial.
`--part components` draws Figure 2 for the smallest iBNN of those.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu
from torch.utils.data import DataLoader, Subset

import bayesify
from bayesify import IBNN
from bayesify.components import look_at_components
from bayesify.data import load
from bayesify.evaluate import evaluate
from bayesify.report import plot_components
from experiments.ledger import RESULTS, Ledger

EPOCHS = 20


class LeNet(nn.Module):
    """The authors' LeNet, with every hidden width multiplied.

    >>> [sum(p.numel() for p in LeNet(factor).parameters()) for factor in (1, 2)]
    [41806, 164518]
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
    # The authors' README has K = 8 and a variational rate of .2 K for a LeNet.
    found: dict[str, bayesify.Method] = {
        "plain": bayesify.MAP(epochs=epochs, lr=0.02, schedule="held", weight_decay=5e-4),
        "iBNN": IBNN.from_scratch(8, epochs=epochs, lr=0.02, latent_lr=0.2),
    }
    adapter = getattr(bayesify, "BayesAdapter", None)
    if adapter is None:
        print("There is no BayesAdapter here, so mean-field VI is not in the table.")
    else:
        scratch = {"start_std": (0.0067, 0.018), "prior_std": 1.0, "log_std_schedule": "constant"}
        found["mean-field VI"] = adapter(epochs=epochs, lr=0.02, log_std_lr=0.1, schedule="cosine", **scratch)
    return found


def loaders(images: int | None) -> tuple[DataLoader, DataLoader]:
    """Return batches for training and for testing."""
    train, test = load("fashion-mnist", "train"), load("fashion-mnist", "test")
    sets: list[Any] = [train, test] if images is None else [Subset(s, range(images)) for s in (train, test)]
    return DataLoader(sets[0], 128, shuffle=True, drop_last=True), DataLoader(sets[1], 500)


def fitted(name: str, factor: int, arguments: argparse.Namespace, seed: int) -> bayesify.Posterior:
    """Train a network of one size with one method, or go on with it."""
    torch.manual_seed(seed)
    posterior = bayesify.convert(LeNet(factor), methods(arguments.epochs)[name])
    train, _ = loaders(arguments.images)
    folder = arguments.work / f"{name}-{factor}-{seed}-{arguments.epochs}-{arguments.images}".replace(" ", "-")
    bayesify.fit(posterior, train, checkpoint=folder, checkpoint_steps=200, seed=seed, progress=False)
    return posterior


def run(name: str, factor: int, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train and test."""
    posterior = fitted(name, factor, arguments, seed)
    metrics = evaluate(posterior, loaders(arguments.images)[1], seed=seed).metrics
    parameters = sum(p.numel() for p in posterior.network.parameters())
    return {"parameters": parameters, "error": 1 - metrics["accuracy"], "nll": metrics["nll"], "ece": metrics["ece"]}


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("sizes", "components"), default="sizes")
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 2, 4, 8], help="factors of the widths")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--images", type=int, help="of each set, for a trial whose results are not kept")
    parser.add_argument("--only", nargs="*", help="names of methods")
    parser.add_argument("--work", type=Path, default=Path("ibnn-fashion-work"), help="folder for checkpoints")
    arguments = parser.parse_args()
    kept = arguments.images is None and arguments.epochs == EPOCHS
    ledger = Ledger(f"ibnn_fashion_{arguments.part}", "python -m experiments.ibnn_fashion", kept=kept)
    if arguments.part == "components":
        posterior = fitted("iBNN", 1, arguments, 0)
        found = look_at_components(posterior, loaders(arguments.images)[1])  # type: ignore[arg-type]
        ledger.row(
            lambda: {"accuracy": found.accuracy.tolist(), "disagreement": found.mean_disagreement}, name="components"
        )
        target = RESULTS if kept else arguments.work
        print(plot_components(found, target / "ibnn_fashion_components.svg"))
        return
    for seed in arguments.seeds:
        for factor in arguments.sizes:
            for name in arguments.only or methods(arguments.epochs):
                ledger.row(
                    lambda name=name, factor=factor, seed=seed: run(name, factor, arguments, seed),  # type: ignore[misc]
                    name=name, factor=factor, seed=seed,
                )  # fmt: skip


if __name__ == "__main__":
    main()
