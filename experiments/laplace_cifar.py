"""Laplace on the pretrained CIFAR-10 ResNet-20, beside the plain network and one temperature.

`BAYESIFY_DATA=... python -m experiments.laplace_cifar` takes the curvature from the training images, chooses the prior
by the marginal likelihood or on the first 2,000 test images, and measures on the last 8,000, on Fashion-MNIST and on
notMNIST. Rows go to `experiments/results/laplace_cifar.json`; a run that was stopped goes on from the rows there.
Minutes of one core for each row.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

import bayesify
from bayesify import Laplace, measure
from bayesify.laws import LaplacePosterior, LastLayerLaplacePosterior
from bayesify.likelihoods.prediction import ClassificationPrediction
from experiments.cifar import loaders, ood_loaders
from experiments.networks import pretrained
from experiments.rows import Rows
from experiments.scoring import calibrated, scored

RESULTS = Path(__file__).parent / "results" / "laplace_cifar.json"
NUM_DATA = 50_000
DRAWS = 20

# How the prior is chosen, and how the last layer is predicted.
LAST_LAYER: dict[str, tuple[str, int | None]] = {
    "last layer, prior by evidence, closed form": ("evidence", None),
    "last layer, prior by evidence, 200 draws of logits": ("evidence", 200),
    "last layer, prior by validation, closed form": ("validation", None),
    "last layer, prior by validation, 200 draws of logits": ("validation", 200),
}
# The method, and whether the prior is chosen on validation data.
ALL_LAYERS: dict[str, tuple[Laplace, bool]] = {
    "diagonal, prior by evidence": (Laplace(structure="diagonal", mc_labels=1), False),
    "diagonal, prior by evidence for each layer": (
        Laplace(structure="diagonal", mc_labels=1, prior_per="layer"),
        False,
    ),
    "diagonal, prior by validation": (Laplace(structure="diagonal", mc_labels=1), True),
    "kronecker, prior by evidence": (Laplace(structure="kronecker", mc_labels=1), False),
    "kronecker, prior by validation": (Laplace(structure="kronecker", mc_labels=1), True),
}
FITTING: dict[str, Any] = {"num_data": NUM_DATA, "progress": False, "accuracy_tolerance": 1.0}


class Run:
    """The data, and what rows share."""

    def __init__(self, images: int, few: int, draws: int, *, trial: bool) -> None:
        """Read everything once; `few` training images are for posteriors of all layers."""
        train, self.val, self.test = loaders(images=images)
        self.draws = draws
        self.train = train
        self.some = DataLoader(Subset(train.dataset, range(few)), 128)
        self.ood = ood_loaders(32 if trial else 1000)
        if trial:
            self.val, self.test = (DataLoader(Subset(x.dataset, range(32)), 32) for x in (self.val, self.test))

    def plain(self) -> dict[str, Any]:
        """Measure the plain network."""
        return scored(bayesify.convert(pretrained("resnet20"), "map"), self.val, self.test, self.ood)

    @cached_property
    def last_layer(self) -> LastLayerLaplacePosterior:
        """Return the last layer's posterior with the prior of most evidence."""
        posterior = bayesify.convert(pretrained("resnet20"), Laplace())
        bayesify.fit(posterior, self.train, **FITTING)
        assert isinstance(posterior, LastLayerLaplacePosterior)
        return posterior.eval()

    @cached_property
    def features(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return outputs and features of every set: they do not depend on the prior."""
        sets = {"val": self.val, "test": self.test, **self.ood}
        with torch.no_grad():
            found = {name: [self.last_layer.features(batch[0]) for batch in loader] for name, loader in sets.items()}
        return {name: (torch.cat([o for o, _ in one]), torch.cat([f for _, f in one])) for name, one in found.items()}

    def row_of_last_layer(self, prior: str, num_draws: int | None) -> dict[str, Any]:
        """Measure the closed form."""
        posterior = self.last_layer
        began = time.perf_counter()
        posterior.maximise_evidence()
        if prior == "validation":
            posterior.choose_prior(self.val)
        row = {"seconds to choose the prior": round(time.perf_counter() - began, 1), **_settings(posterior)}
        found: dict[str, ClassificationPrediction] = {}
        for name, pair in self.features.items():
            prediction = posterior.predictive(*pair, num_draws=num_draws, seed=0)
            assert isinstance(prediction, ClassificationPrediction)
            found[name] = prediction
        labels = [torch.cat([y for _, y in loader]) for loader in (self.val, self.test)]
        # The temperature acts on the prediction as a whole: softmax(ln p / T).
        others = {name: found[name].log_probs[None] for name in self.ood}
        pairs = [(found[name].log_probs[None], y) for name, y in zip(("val", "test"), labels, strict=True)]
        row.update(calibrated(pairs[0], pairs[1], others))
        for part in ("test", "test, calibrated"):  # of one prediction, where the posterior's own epistemic part counts
            row[part] = {key: value for key, value in row[part].items() if "-epistemic/" not in key}
        for name in self.ood:
            scores = found["test"].epistemic, found[name].epistemic
            row["test"][f"auroc-epistemic/{name}"] = round(measure.auroc(*scores), 5)
        return row

    def row_of_all_layers(self, method: Laplace, validation: bool) -> dict[str, Any]:
        """Convert, fit and measure by draws."""
        began = time.perf_counter()
        posterior = bayesify.convert(pretrained("resnet20"), method)
        bayesify.fit(posterior, self.some, **FITTING)
        assert isinstance(posterior, LaplacePosterior)
        if validation:
            posterior.choose_prior(self.val, num_draws=self.draws)
        row = {"fit seconds": round(time.perf_counter() - began, 1), **_settings(posterior)}
        return {**row, **scored(posterior, self.val, self.test, self.ood, num_draws=self.draws)}


def _settings(posterior: LaplacePosterior) -> dict[str, Any]:
    return {
        "prior precision": [round(value, 4) for value in posterior.prior_precision.tolist()],
        "log marginal likelihood": round(posterior.log_marginal_likelihood(), 1),
    }


def main() -> None:
    """Make the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=NUM_DATA, help="training images for the last layer")
    parser.add_argument("--few", type=int, default=10_000, help="training images for posteriors of all layers")
    parser.add_argument("--draws", type=int, default=DRAWS, help="of posteriors of all layers")
    parser.add_argument("--only", nargs="*", help="what the names of rows begin with")
    parser.add_argument("--trial", action="store_true", help="a few images, and nothing is kept")
    arguments = parser.parse_args()
    images, few = (256, 128) if arguments.trial else (arguments.images, arguments.few)
    run = Run(images, few, arguments.draws, trial=arguments.trial)
    command = f"python -m experiments.laplace_cifar --images {images} --few {few} --draws {arguments.draws}"
    rows = Rows(None if arguments.trial else RESULTS, command)
    makers: dict[str, Callable[[], dict[str, Any]]] = {"map": run.plain}
    makers |= {name: partial(run.row_of_last_layer, *how) for name, how in LAST_LAYER.items()}
    makers |= {name: partial(run.row_of_all_layers, *how) for name, how in ALL_LAYERS.items()}
    for name, make in makers.items():
        if arguments.only is None or name.startswith(tuple(arguments.only)):
            rows.row(name, make)


if __name__ == "__main__":
    main()
