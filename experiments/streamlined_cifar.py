"""ABNN and BayesAdapter on the CIFAR-10 ResNet-20 without draws.

`BAYESIFY_DATA=... python -m experiments.streamlined_cifar` fits both as `experiments.abnn_cifar` and
`experiments.adapter_cifar` do (or goes on from their checkpoints in `--abnn` and `--adapter`) and prints, for draws and
for each predictor without draws, NLL, ECE and AURC on the test images, as they are and with the variance scale of the
validation images, and the time over that of a plain pass in the same run. The question for ABNN: the same NLL as nine
draws at under a third of their cost? Rows go to `experiments/results/streamlined_cifar.json`; about 30 minutes of one
core if both have to be fitted, else 15. `--trial` takes a few images and keeps nothing.
"""

from __future__ import annotations

import argparse
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset

import bayesify
from bayesify import ABNN, BayesAdapter
from experiments import abnn_cifar, adapter_cifar
from experiments.cifar import loaders
from experiments.networks import pretrained
from experiments.rows import Rows
from experiments.scoring import quality

RESULTS = Path(__file__).parent / "results" / "streamlined_cifar.json"
# How it is predicted, and by how many draws.
PREDICTORS: dict[str, dict[str, tuple[str, int | None]]] = {
    "abnn": {
        "mean of three members": ("sampling", 3),
        "nine draws": ("sampling", 9),
        "streamlined": ("streamlined", None),
        "moments": ("moments", None),
        "linearised": ("linearised", None),
    },
    "adapter": {
        "mean": ("mean", None),
        "four draws": ("sampling", 4),
        "twenty draws": ("sampling", 20),
        "streamlined": ("streamlined", None),
        "linearised": ("linearised", None),
    },
}


def fitted(name: str, arguments: argparse.Namespace) -> bayesify.Posterior:
    """Convert and fit, or go on from a checkpoint."""
    images, trial = arguments.images, arguments.trial
    if name == "abnn":
        run = abnn_cifar.Run("resnet20", images, arguments.abnn, trial=trial)
        return run.posterior("abnn", ABNN(epochs=0) if trial else ABNN(), seed=0, part="main")
    settings = argparse.Namespace(network="resnet20", images=images, work=arguments.adapter, trial=trial)
    # The settings of the page of BayesAdapter, which were chosen on validation images.
    start = 0.0125 * math.exp(-0.5), 0.0125 * math.exp(0.5)
    method = BayesAdapter(epochs=0 if trial else 2, lr=1e-4, start_std=start)
    return adapter_cifar.Run(settings, layout=torch.channels_last).posterior("bayes-adapter", method, 0)[0]


def row(
    posterior: bayesify.Posterior, val: DataLoader, test: DataLoader, how: str, number: int | None
) -> dict[str, Any]:
    """Measure one predictor, with its cost in plain passes."""
    options: dict[str, Any] = {"how": how, "num_draws": number, "seed": 0}
    found: dict[str, Any] = {}
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    scales = {"": 1.0}
    if how not in ("sampling", "mean"):
        scales[", scaled"] = bayesify.fit_variance_scale(posterior, val, how=how)
        found["variance scale"] = round(scales[", scaled"], 5)
    labels = torch.cat([y for _, y in test])
    plain = bayesify.convert(pretrained("resnet20").to(memory_format=torch.channels_last), "map")
    for suffix, scale in scales.items():
        began = clock()
        bayesify.predict(plain, test, how="mean")
        middle = clock()
        own = bayesify.predict(posterior, test, variance_scale=scale, **options)
        end = clock()
        assert isinstance(own, bayesify.ClassificationPrediction)
        values = {
            **quality(own, labels),
            "epistemic": own.epistemic.mean(),
            "cost in plain passes": (end - middle) / (middle - began),
        }
        found["predictor"] = own.predictor
        found["test" + suffix] = {name: round(float(value), 5) for name, value in values.items()}
    return found


def main() -> None:
    """Make the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000, help="training images of an epoch")
    parser.add_argument("--test", type=int, default=2000, help="how many test images")
    parser.add_argument("--only", nargs="*", choices=list(PREDICTORS), default=list(PREDICTORS))
    parser.add_argument("--abnn", type=Path, default=Path("abnn-work"), help="folder for its checkpoints")
    parser.add_argument("--adapter", type=Path, default=Path("adapter-work"), help="folder for its checkpoints")
    parser.add_argument("--trial", action="store_true", help="a few images, and nothing is kept")
    arguments = parser.parse_args()
    if arguments.trial:
        arguments.images, arguments.test = 128, 32
    _, val, test = loaders(images=128)
    test = DataLoader(Subset(test.dataset, range(arguments.test)), 256)
    if arguments.trial:
        val = test
    command = f"python -m experiments.streamlined_cifar --images {arguments.images} --test {arguments.test}"
    rows = Rows(None if arguments.trial else RESULTS, command)
    for name in arguments.only:
        posterior = fitted(name, arguments)
        for label, how in PREDICTORS[name].items():
            rows.row(f"{name}, {label}", partial(row, posterior, val, test, *how))


if __name__ == "__main__":
    main()
