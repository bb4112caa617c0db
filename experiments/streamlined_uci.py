"""UCI regression on the published splits: predictions in one pass beside draws.

`BAYESIFY_DATA=... python -m experiments.streamlined_uci` trains a network with 50 hidden units on each table and split,
makes it Bayesian by Laplace (diagonal, prior and noise by the evidence) and by BayesAdapter, and measures RMSE, NLL and
the coverage of 95 % intervals in the targets' own units. The first five splits of the five small tables by default,
about seven minutes of one core; `--splits 20` takes all. Rows go to `experiments/results/streamlined_uci.json`; what is
there is not made again. `--validate` measures on a fifth of the training rows instead, for BayesAdapter's rates: its
rows go to `streamlined_uci_tuning.json`. `--trial` takes one split of one table, one epoch, and keeps nothing.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import BayesAdapter, Gaussian, Laplace, measure
from bayesify.data import data_root, read_uci, standardise
from experiments.rows import Rows

RESULTS = Path(__file__).parent / "results"
TABLES = ("bostonHousing", "energy", "wine-quality-red", "yacht", "power-plant")
PREDICTORS: dict[str, tuple[str, int | None]] = {
    "mean": ("mean", None),
    "4 draws": ("sampling", 4),
    "100 draws": ("sampling", 100),
    "streamlined": ("streamlined", None),
    "linearised": ("linearised", None),
}


def split_rows(table: str, split: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train on one split and measure every posterior with every predictor."""
    epochs = arguments.epochs
    made = standardise(*read_uci(data_root() / "uci" / f"{table}.npz", split))
    train, test = ((part.inputs.float(), part.targets.float()) for part in made.splits)
    if arguments.validate:
        order = torch.randperm(len(train[0]), generator=torch.Generator().manual_seed(split))
        own, held = order.tensor_split([4 * len(order) // 5])
        train, test = (train[0][own], train[1][own]), (train[0][held], train[1][held])
    scale = float(made.targets.std)
    loader = DataLoader(TensorDataset(*train), 32, shuffle=True)
    torch.manual_seed(split)
    network = nn.Sequential(nn.Linear(train[0].shape[1], 50), nn.ReLU(), nn.Linear(50, 1))
    optimizer = torch.optim.Adam(network.parameters(), 1e-2, weight_decay=1e-5)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(network(x), y).backward()
            optimizer.step()
    residual = (network(train[0]) - train[1]).square().mean().sqrt()
    methods: dict[str, bayesify.Method] = {
        "laplace": Laplace(structure="diagonal"),
        # Adam, since the loss grows with 1 / noise variance, and steps of SGD would with it.
        "adapter": BayesAdapter(
            epochs=max(1, epochs // 2), optimizer="adam", lr=arguments.lr, log_std_lr=arguments.log_std_lr,
            schedule="cosine", log_std_schedule="cosine",
        ),
    }  # fmt: skip
    found: dict[str, Any] = {}
    for name, method in methods.items():
        likelihood = Gaussian()
        with torch.no_grad():
            likelihood.log_noise.fill_(math.log(float(residual.detach())))
        posterior = bayesify.convert(network, method, likelihood=likelihood)
        bayesify.fit(posterior, loader, likelihood=likelihood, seed=split, progress=False)
        for label, (how, number) in PREDICTORS.items():
            prediction = bayesify.predict(posterior, test[0], how=how, num_draws=number, seed=split)  # type: ignore[arg-type]
            assert isinstance(prediction, bayesify.RegressionPrediction)
            found[f"{name}, {label}"] = _measures(prediction, test[1], scale)
    return found


def _measures(prediction: bayesify.RegressionPrediction, targets: torch.Tensor, scale: float) -> dict[str, float]:
    targets = targets.reshape(prediction.mean.shape)
    values = {
        "rmse": measure.rmse(prediction.mean, targets) * scale,
        "nll": measure.gaussian_nll(prediction.mean, prediction.variance, targets) + math.log(scale),
        "coverage": measure.interval_coverage(*prediction.interval(0.95), targets),
        "epistemic share": (prediction.epistemic / prediction.variance).mean(),
    }
    return {name: round(float(value), 5) for name, value in values.items()}


def main() -> None:
    """Make the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="*", default=list(TABLES))
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1e-3, help="of BayesAdapter's means")
    parser.add_argument("--log-std-lr", type=float, default=5e-2, help="of its standard deviations")
    parser.add_argument("--validate", action="store_true", help="measure on a fifth of the training rows")
    parser.add_argument("--trial", action="store_true", help="one split, one epoch, and nothing is kept")
    arguments = parser.parse_args()
    if arguments.trial:
        arguments.tables, arguments.splits, arguments.epochs = arguments.tables[-2:-1], 1, 1
    command = (
        f"python -m experiments.streamlined_uci --epochs {arguments.epochs} --lr {arguments.lr:g} "
        f"--log-std-lr {arguments.log_std_lr:g}"
    )
    label = f", lr={arguments.lr:g}, log_std_lr={arguments.log_std_lr:g}" if arguments.validate else ""
    path = RESULTS / f"streamlined_uci{'_tuning' if arguments.validate else ''}.json"
    rows = Rows(None if arguments.trial else path, command)
    for table in arguments.tables:
        for split in range(arguments.splits):
            rows.row(f"{table}, split {split}{label}", partial(split_rows, table, split, arguments))


if __name__ == "__main__":
    main()
