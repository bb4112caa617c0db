"""FashionMNIST with the MLP of the paper's library: predictions in one pass beside draws of equal cost.

`BAYESIFY_DATA=... python -m experiments.streamlined_fashion` trains the MLP 784-128-64-10 as the library of Li et al.
(2025) does (Adam, 1e-3, 15 epochs), makes it Bayesian by Laplace (diagonal) and by BayesAdapter, and measures NLL, ECE
and AURC on the test images, and AUROC against notMNIST and against test images turned by 90 degrees. Variance
scales are fitted on the last 5,000 training images. Rows go to `experiments/results/streamlined_fashion.json`; what is
there is not made again. About six minutes of one core for each seed. `--trial` takes a few images and keeps nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import bayesify
from bayesify import BayesAdapter, Laplace, measure
from bayesify.data import load, rotate
from experiments.rows import Rows
from experiments.scoring import quality

RESULTS = Path(__file__).parent / "results" / "streamlined_fashion.json"
POSTERIORS: dict[str, bayesify.Method] = {
    "plain": bayesify.MAP(epochs=0),
    "laplace": Laplace(structure="diagonal"),
    "adapter": BayesAdapter(epochs=5),
}
# How it is predicted, and by how many draws; four cost about what one streamlined pass does.
PREDICTORS: dict[str, tuple[str, int | None]] = {
    "mean": ("mean", None),
    "4 draws": ("sampling", 4),
    "100 draws": ("sampling", 100),
    "streamlined": ("streamlined", None),
    "linearised": ("linearised", None),
}


class Data:
    """Batches of images (B, 784) in [0, 1]."""

    def __init__(self, *, trial: bool) -> None:
        """Read everything once."""
        train, test = load("fashion-mnist", "train"), load("fashion-mnist", "test")
        letters = load("notmnist", "test")
        own = 256 if trial else len(train) - 5000
        few = 64 if trial else 2000
        self.train = DataLoader(Subset(train, range(own)), 128, shuffle=True, drop_last=True)
        self.val = DataLoader(Subset(train, range(len(train) - (64 if trial else 5000), len(train))), 500)
        self.test = DataLoader(Subset(test, range(64 if trial else len(test))), 500)
        turned = rotate(torch.stack([test[index][0] for index in range(few)]), 90.0)
        self.ood = {
            "letters": DataLoader(Subset(letters, range(few)), 500),
            "turned by 90 degrees": DataLoader(TensorDataset(turned), 500),
        }


def mlp() -> nn.Sequential:
    """Return the network of the library's example."""
    layers = [nn.Flatten(1), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(*layers)


def trained(data: Data, seed: int, epochs: int) -> nn.Module:
    """Train the plain network."""
    torch.manual_seed(seed)
    network = mlp()
    optimizer = torch.optim.Adam(network.parameters(), 1e-3, weight_decay=1e-5)
    for _ in range(epochs):
        for x, y in data.train:
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x), y).backward()
            optimizer.step()
    return network.eval()


def posteriors(data: Data, network: nn.Module, seed: int) -> Iterator[tuple[str, bayesify.Posterior]]:
    """Convert and fit each."""
    for name, method in POSTERIORS.items():
        posterior = bayesify.convert(network, method)
        if method.epochs or isinstance(method, Laplace):
            bayesify.fit(posterior, data.train, seed=seed, progress=False, accuracy_tolerance=1.0)
        yield name, posterior


def row(data: Data, posterior: bayesify.Posterior, how: str, num_draws: int | None, seed: int) -> dict[str, Any]:
    """Measure one posterior with one predictor; predictors in one pass also with the scale of the validation images."""
    options: dict[str, Any] = {"how": how, "num_draws": num_draws, "seed": seed}
    found: dict[str, Any] = {}
    scales = {"": 1.0}
    if how in ("streamlined", "linearised"):
        scales[", scaled"] = bayesify.fit_variance_scale(posterior, data.val, how=how)
        found["variance scale"] = round(scales[", scaled"], 5)
    for suffix, scale in scales.items():
        found["test" + suffix] = _measures(data, posterior, {**options, "variance_scale": scale})
    return found


def _measures(data: Data, posterior: bayesify.Posterior, options: dict[str, Any]) -> dict[str, float]:
    labels = torch.cat([y for _, y in data.test])
    began = time.perf_counter()
    own = bayesify.predict(posterior, data.test, **options)
    seconds = time.perf_counter() - began
    assert isinstance(own, bayesify.ClassificationPrediction)
    values = {
        **quality(own, labels),
        "seconds": seconds,
    }
    for name, loader in data.ood.items():
        other = bayesify.predict(posterior, loader, **options)
        for score in ("total", "epistemic"):
            values[f"auroc-{score}/{name}"] = measure.auroc(own.score(score), other.score(score))
    return {name: round(float(value), 5) for name, value in values.items()}


def main() -> None:
    """Make the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--trial", action="store_true", help="a few images, and nothing is kept")
    arguments = parser.parse_args()
    epochs = 1 if arguments.trial else arguments.epochs
    data = Data(trial=arguments.trial)
    command = f"python -m experiments.streamlined_fashion --epochs {epochs}"
    rows = Rows(None if arguments.trial else RESULTS, command)
    for seed in arguments.seeds:
        for name, posterior in posteriors(data, trained(data, seed, epochs), seed):
            for label, how in PREDICTORS.items():
                if name != "plain" or label == "mean":
                    rows.row(f"{name}, {label}, seed {seed}", partial(row, data, posterior, *how, seed))


if __name__ == "__main__":
    main()
