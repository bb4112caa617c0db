"""ABNN on the CIFAR-10 ResNet-20 without draws: one pass for each member against nine draws.

`BAYESIFY_DATA=... python -m experiments.streamlined_abnn` fits ABNN as `experiments.abnn_cifar` does (or goes on from
its checkpoints in `--work`) and prints, for nine draws and for each predictor without draws, NLL, ECE and AURC on the
test images, as they are and with the variance scale of the validation images, and the time over that of a plain pass
in the same run. The question: the same NLL as nine draws at under a third of their cost? Rows go to
`experiments/results/streamlined_abnn.json`; about 25 minutes of one core if ABNN has to be fitted, else 8. `--trial`
takes a few images and keeps nothing.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset

import bayesify
from bayesify import ABNN, measure
from bayesify.evaluate import right_or_wrong
from experiments.abnn_cifar import Run
from experiments.rows import Rows

RESULTS = Path(__file__).parent / "results" / "streamlined_abnn.json"
PREDICTORS: dict[str, tuple[str, int | None]] = {
    "mean of three members": ("sampling", 3),
    "nine draws": ("sampling", 9),
    "streamlined (margin)": ("margin", None),
    "moments": ("moments", None),
    "linearised": ("linearised", None),
}


def row(run: Run, posterior: bayesify.Posterior, test: DataLoader, how: str, number: int | None) -> dict[str, Any]:
    """Measure one predictor, with its cost in plain passes."""
    options: dict[str, Any] = {"how": how, "num_samples": number, "seed": 0}
    found: dict[str, Any] = {}
    scales = {"": 1.0}
    if how != "sampling":
        scales[", scaled"] = bayesify.fit_variance_scale(posterior, run.val, how=how)
        found["variance scale"] = round(scales[", scaled"], 5)
    labels = torch.cat([y for _, y in test])
    plain = bayesify.convert(run.network(), "map")
    for suffix, scale in scales.items():
        began = time.perf_counter()
        bayesify.predict(plain, test, how="mean")
        middle = time.perf_counter()
        own = bayesify.predict(posterior, test, variance_scale=scale, **options)
        end = time.perf_counter()
        assert isinstance(own, bayesify.ClassificationPrediction)
        values = {
            "accuracy": measure.accuracy(own.probs, labels),
            "nll": measure.nll(own.probs, labels),
            "ece": measure.ece(own.probs, labels),
            "aurc": measure.aurc(*right_or_wrong(own, labels)),
            "epistemic": own.epistemic.mean(),
            "cost in plain passes": (end - middle) / (middle - began),
        }
        found["test" + suffix] = {name: round(float(value), 5) for name, value in values.items()}
    return found


def main() -> None:
    """Make the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000, help="training images that ABNN was or is fitted on")
    parser.add_argument("--test", type=int, default=2000, help="how many test images")
    parser.add_argument("--work", type=Path, default=Path("abnn-work"), help="folder for checkpoints")
    parser.add_argument("--trial", action="store_true", help="a few images, and nothing is kept")
    arguments = parser.parse_args()
    images, number = (128, 32) if arguments.trial else (arguments.images, arguments.test)
    run = Run("resnet20", images, arguments.work, trial=arguments.trial)
    method = ABNN(epochs=0) if arguments.trial else ABNN()
    posterior = run.posterior("abnn", method, seed=0, part="main")
    test = DataLoader(Subset(run.test.dataset, range(number)), 256)
    command = f"python -m experiments.streamlined_abnn --images {images} --test {number}"
    rows = Rows(None if arguments.trial else RESULTS, command)
    for name, how in PREDICTORS.items():
        rows.row(name, partial(row, run, posterior, test, *how))


if __name__ == "__main__":
    main()
