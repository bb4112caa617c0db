"""Laplace on the pretrained CIFAR-10 ResNet-20, beside the plain network and one temperature.

`BAYESIFY_DATA=... python -m experiments.laplace_cifar` takes the curvature from the training images, chooses the prior
by the marginal likelihood or on the first 2,000 test images, and measures on the last 8,000 and on clothes and letters.
Rows go to `experiments/results/laplace_cifar.json`; a run that was stopped goes on from the rows there. Minutes of one
core for each row.
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
from bayesify import Laplace, measure
from bayesify.prediction import ClassificationPrediction
from experiments.cifar import foreign_loaders, loaders
from experiments.networks import pretrained
from experiments.rows import Rows
from experiments.scoring import calibrated, scored

RESULTS = Path(__file__).parent / "results" / "laplace_cifar.json"
NUM_DATA = 50_000
DRAWS = 20

# The method, and how predictions are made.
ROWS: dict[str, tuple[bayesify.Method, dict[str, Any]]] = {
    "map": (bayesify.MAP(), {}),
    "last layer, prior by evidence, probit": (Laplace(), {"how": "closed-form"}),
    "last layer, prior by evidence, draws of logits": (Laplace(), {"how": "closed-form", "num_samples": 200}),
    "last layer, prior by evidence, draws of weights": (Laplace(), {}),
    "last layer, prior by validation, probit": (Laplace(prior_precision="validation"), {"how": "closed-form"}),
    "last layer, prior by validation, draws of logits": (
        Laplace(prior_precision="validation"),
        {"how": "closed-form", "num_samples": 200},
    ),
    "diagonal, prior by evidence, draws": (Laplace(structure="diagonal"), {}),
    "diagonal, prior by evidence for each layer, draws": (Laplace(structure="diagonal", prior_per="layer"), {}),
    "diagonal, prior by validation, draws": (Laplace(structure="diagonal", prior_precision="validation"), {}),
    "kronecker, prior by evidence, draws": (Laplace(structure="kronecker"), {}),
    "kronecker, prior by validation, draws": (Laplace(structure="kronecker", prior_precision="validation"), {}),
}


class Run:
    """The data, and what all rows share."""

    def __init__(self, images: int, few: int, *, trial: bool) -> None:
        """Read everything once; `few` training images are for posteriors of all layers."""
        train, self.val, self.test = loaders(images=images)
        self.train = {True: train, False: DataLoader(Subset(train.dataset, range(few)), 128)}
        self.foreign = foreign_loaders(32 if trial else 1000)
        if trial:
            self.val, self.test = (DataLoader(Subset(x.dataset, range(32)), 32) for x in (self.val, self.test))

    def row(self, method: bayesify.Method, predicting: dict[str, Any]) -> dict[str, Any]:
        """Convert, fit and measure."""
        posterior = bayesify.convert(pretrained("resnet20"), method)
        posterior.default_samples = DRAWS // 2 if isinstance(method, Laplace) else 1  # while the prior is searched for
        began = time.perf_counter()
        last = getattr(method, "structure", "last-layer") == "last-layer"
        fitting = {"num_data": NUM_DATA, "progress": False, "accuracy_tolerance": 1.0}
        bayesify.fit(posterior, self.train[last], val_loader=self.val, **fitting)
        row: dict[str, Any] = {"fit seconds": round(time.perf_counter() - began, 1)}
        if isinstance(method, Laplace):
            row["training images seen"] = len(self.train[last].dataset)
            row["prior precision"] = [round(value, 4) for value in posterior.prior_precision.tolist()]
            row["log marginal likelihood"] = round(posterior.log_marginal_likelihood(), 1)
        if predicting:
            return {**row, **self._closed_form(posterior, predicting)}
        draws = DRAWS if isinstance(method, Laplace) else None
        return {**row, **scored(posterior, self.val, self.test, self.foreign, num_samples=draws)}

    def _closed_form(self, posterior: bayesify.Posterior, predicting: dict[str, Any]) -> dict[str, Any]:
        def predicted(loader: DataLoader) -> ClassificationPrediction:
            found = bayesify.predict(posterior, loader, seed=0, **predicting)
            assert isinstance(found, ClassificationPrediction)
            return found

        own = {name: predicted(loader) for name, loader in (("val", self.val), ("test", self.test))}
        labels = {name: torch.cat([y for _, y in loader]) for name, loader in (("val", self.val), ("test", self.test))}
        others = {name: predicted(loader) for name, loader in self.foreign.items()}
        # The temperature acts on the prediction as a whole: softmax(ln p / T).
        pairs = [(own[name].log_probs[None], labels[name]) for name in own]
        row = calibrated(pairs[0], pairs[1], {name: other.log_probs[None] for name, other in others.items()})
        for name, other in others.items():
            scores = own["test"].epistemic, other.epistemic
            row["test"][f"auroc-epistemic/{name}"] = round(measure.auroc(*scores), 5)
        return row


def main() -> None:
    """Make the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=NUM_DATA, help="training images for the last layer")
    parser.add_argument("--few", type=int, default=10_000, help="training images for posteriors of all layers")
    parser.add_argument("--only", nargs="*", help="what the names of rows begin with")
    parser.add_argument("--trial", action="store_true", help="a few images, and nothing is kept")
    arguments = parser.parse_args()
    images, few = (256, 128) if arguments.trial else (arguments.images, arguments.few)
    run = Run(images, few, trial=arguments.trial)
    command = f"python -m experiments.laplace_cifar --images {images} --few {few}"
    rows = Rows(None if arguments.trial else RESULTS, command)
    for name, (method, predicting) in ROWS.items():
        if arguments.only is None or name.startswith(tuple(arguments.only)):
            rows.row(name, partial(run.row, method, predicting))


if __name__ == "__main__":
    main()
