"""Active learning on MNIST with a convolutional network and MC dropout (Gal, Islam and Ghahramani 2017).

`BAYESIFY_DATA=... python -m experiments.active_mnist` starts from 20 balanced labels and buys ten in each round, by
BALD, variation ratio, entropy or at random, of 2,000 examples of the pool, others each time, which 20 dropout masks
look at; every round trains from new weights. It keeps a learning curve for each choice and seed in
`experiments/results/active_mnist.json`, with a picture. The paper needs 335 labels by BALD, 295 by variation ratio, 355
by entropy and 835 at random for an error of 5 %, and 145, 120, 165 and 255 for 10 %.

Random labels are bought sixty at a time, up to 980, which is the same as ten at a time and looks less often. The
weight decay is the one of least NLL on 100 validation images after 100 random labels; steps and rate were chosen on
1,000 validation images with 380 labels that BALD had bought. Accuracies are of 2,000 test images, the same random ones
for all: the first half of MNIST's is the easier one. A run that is killed goes on after its last whole round, from the
histories in `--work`. `--trial` takes seconds.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import bayesify
from bayesify import measure
from bayesify.data import Split
from bayesify.decide import ActiveLearning
from bayesify.decide.acquisition import Acquisition
from experiments.apd_common import arguments_of, draw_curves, rows_of
from experiments.data import load

__all__ = ["CHOICES", "cnn", "main", "needed"]

CHOICES: dict[str, Acquisition] = {
    "random": "random", "BALD": "bald", "variation ratio": "variation-ratio", "entropy": "entropy",
}  # fmt: skip
START, BOUGHT, AT_RANDOM = 20, 10, 60
DECAYS = (0.0, 0.1, 1.0)  # decoupled, of Adam: a weight shrinks by the product of it and the sum of the rates


def cnn() -> nn.Sequential:
    """Return the paper's network: two convolutions of 32 filters, 4 by 4, and a hidden layer, with dropout."""
    made = nn.Sequential(
        nn.Conv2d(1, 32, 4), nn.ReLU(), nn.Conv2d(32, 32, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(3872, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip
    return made.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


class Lab:
    """The data, and how a posterior is made of some labels.

    Args:
        arguments: With `steps`, `batch`, `rate`, `draws` and `tested`.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.train, self.val, self.test = (load("mnist", part) for part in ("train", "val", "test"))
        chosen = torch.randperm(len(self.test), generator=torch.Generator().manual_seed(0))[: arguments.tested]
        self.test = self.test.part(chosen)

    def learn(self, labelled: list[int], before: Any = None, *, seed: int, decay: float) -> bayesify.Posterior:
        """Train a network from new weights, on batches of whole shuffled passes over the labelled images."""
        del before
        given = self.arguments
        x, y = self.train.inputs[labelled], self.train.targets[labelled]
        torch.manual_seed(seed)
        network, size = cnn(), given.steps * given.batch
        passes = torch.cat([torch.randperm(len(y)) for _ in range(size // len(y) + 1)])[:size]
        batches = [(x[some], y[some]) for some in passes.view(given.steps, given.batch)]
        method = bayesify.MCDropout(epochs=1, optimizer="adam", lr=given.rate, schedule="cosine", weight_decay=decay)
        posterior = bayesify.convert(network, method)
        bayesify.fit(posterior, batches, num_data=len(y), seed=seed, progress=False, accuracy_tolerance=1)
        return posterior

    def predict(self, posterior: bayesify.Posterior, inputs: Tensor) -> bayesify.ClassificationPrediction:
        """Return the average of dropout masks."""
        found = bayesify.predict(posterior, inputs, num_draws=self.arguments.draws, seed=0)
        return cast(bayesify.ClassificationPrediction, found)

    def measured(self, posterior: bayesify.Posterior, data: Split) -> dict[str, float]:
        """Return accuracy and NLL."""
        found = self.predict(posterior, data.inputs)
        figures = {
            "accuracy": measure.accuracy(found.probs, data.targets),
            "nll": measure.nll(found.probs, data.targets),
        }
        return {name: round(value, 4) for name, value in figures.items()}

    def decay(self) -> dict[str, Any]:
        """Return the weight decay of least NLL on 100 validation images."""
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(0))
        val = self.val.part(torch.arange(100))
        nll = {}
        for decay in DECAYS:
            posterior = self.learn(order[:100].tolist(), seed=0, decay=decay)
            nll[f"{decay:g}"] = self.measured(posterior, val)["nll"]
        return {"nll": nll, "chosen": float(min(nll, key=lambda name: nll[name]))}

    def curve(self, name: str, seed: int, decay: float, rounds: int, path: Path | None) -> dict[str, Any]:
        """Return test accuracy and NLL by the number of labels, and how many of each digit were bought."""
        y, given = self.train.targets, self.arguments
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
        start = [int(i) for digit in range(10) for i in order[y[order] == digit][: START // 10]]

        def predict(posterior: bayesify.Posterior, some: list[int]) -> Any:
            return some if name == "random" else self.predict(posterior, self.train.inputs[some])

        loop = ActiveLearning(
            learn=partial(self.learn, seed=seed, decay=decay), predict=predict,
            measure=partial(self.measured, data=self.test),
            start=start, pool=range(len(y)), subset=given.looked, num=AT_RANDOM if name == "random" else BOUGHT,
            acquisition=CHOICES[name], seed=1000 * seed, path=path,
        )  # fmt: skip
        history = loop.run(rounds)
        bought = torch.bincount(y[list(history[-1].labelled)], minlength=10).tolist()
        return {
            "labels": [len(one.labelled) for one in history],
            **{key: [one.results[key] for one in history] for key in ("accuracy", "nll")},
            "of each digit": bought,
        }


def needed(curve: dict[str, Any], accuracy: float) -> float | None:
    """Return at how many labels a curve first reaches an accuracy, by lines between points; None if it does not.

    The points are those that random choice has too: a curve that is looked at more often is seen to reach it earlier.

    >>> needed({"labels": [20, 30, 80, 140], "accuracy": [0.5, 0.9, 0.7, 0.9]}, 0.8)
    110.0
    """
    pairs = zip(curve["labels"], curve["accuracy"], strict=True)
    points = [pair for pair in pairs if (pair[0] - START) % AT_RANDOM == 0]
    if points[0][1] >= accuracy:
        return float(points[0][0])
    for (x, low), (z, high) in pairwise(points):
        if high >= accuracy:
            return float(round(x + (z - x) * (accuracy - low) / (high - low), 1))
    return None


def main() -> None:
    """Make the learning curves, seed by seed."""
    arguments = arguments_of(
        __doc__, "active_mnist", seeds=[0, 1, 2], rounds=37, steps=2400, batch=16, rate=1e-3, draws=20, looked=2000,
        tested=2000, choices=list(CHOICES),
    )  # fmt: skip
    if arguments.trial:
        arguments.seeds, arguments.rounds, arguments.steps, arguments.looked, arguments.tested = [0], 2, 5, 40, 40
    lab, rows = Lab(arguments), rows_of("active_mnist", arguments)
    for name in ("rounds", "choices"):  # of which a row says its own
        del rows.settings[name]
    decay = rows.row("weight decay", lab.decay)["chosen"]
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in arguments.seeds:
        for name in arguments.choices:
            rounds = arguments.rounds if arguments.trial or name != "random" else 17
            path = None if arguments.work is None else arguments.work / f"{name}-{seed}.json".replace(" ", "-")
            make = partial(lab.curve, name, seed, decay, rounds, path)
            config = {"choice": CHOICES[name], "decay": decay, "rounds": rounds}
            found.setdefault(name, []).append(rows.row(name, make, config=config, seed=seed))
    for name, curves in found.items():
        print(name, *(f"{level:.0%}: {[needed(one, level) for one in curves]}" for level in (0.9, 0.95)))
    means = {}
    for name, curves in found.items():
        mean = map(statistics.mean, zip(*(one["accuracy"] for one in curves), strict=True))
        means[name] = dict(zip(curves[0]["labels"], mean, strict=True))
    draw_curves(means, "active_mnist", arguments, x="labels", y="test accuracy", scale="linear")


if __name__ == "__main__":
    main()
