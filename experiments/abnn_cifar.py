"""ABNN on the pretrained CIFAR-10 ResNets, beside the baselines, with ablations.

`BAYESIFY_DATA=... python -m experiments.abnn_cifar` fine-tunes three members for each of three seeds on 10,000
training images, and measures them on the last 8,000 test images, on Fashion-MNIST and on notMNIST. `--part tuning`
compares settings on the validation images alone; `--part ablations` changes one setting at a time, for one seed and
epoch; `--part study` asks what members and noise bring apart. Rows go to `experiments/results/abnn_cifar_*.json`; a
run that was stopped goes on from the rows there and from its checkpoints in `--work`, and several processes may share
the work. Six minutes of one core for each ABNN row of ResNet-20, twice that for ResNet-44.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

import bayesify
from bayesify import ABNN
from bayesify.fitting import NonFiniteError
from bayesify.laws import NormNoise
from experiments.cifar import loaders, ood_loaders
from experiments.networks import pretrained
from experiments.rows import Rows
from experiments.scoring import calibrated, scored

RESULTS = Path(__file__).parent / "results"

METHODS: dict[str, bayesify.Method] = {
    "map": bayesify.MAP(),
    "mc-dropout, last layer": bayesify.MCDropout(p=0.1, insert_before="linear"),
    "abnn": ABNN(),
    "abnn, all parameters": ABNN(train="all"),
    "mc-dropout, convolutions": bayesify.MCDropout(p=0.05, insert_before="conv", epochs=2, lr=0.005, schedule="cosine"),
    "deep ensemble of perturbed copies": bayesify.DeepEnsemble(
        members=5, start="perturbed", perturb_std=0.3, epochs=2, lr=0.02
    ),
}
ABLATIONS: dict[str, tuple[dict[str, Any], Any]] = {
    "the default": ({}, None),
    "not fitted": ({"epochs": 0}, None),
    "eta=0": ({"eta": 0.0}, None),
    "eta=6": ({"eta": 6.0}, None),
    "alpha=0.1": ({"alpha": 0.1}, None),
    "noise per element": ({"noise": "element"}, None),
    "noise per element, alpha=0.2": ({"noise": "element", "alpha": 0.2}, None),
    "noise per channel": ({"noise": "channel"}, None),
    "statistics updated": ({"statistics": "updated"}, None),
    "all parameters trained": ({"train": "all"}, None),
    # The paper's open question 1: how many layers.
    "the first layer": ({}, ["bn1"]),
    "the last stage": ({}, ["layer3"]),
    "the last two stages": ({}, ["layer2", "layer3"]),
    "second norm of each block": ({}, ["*.bn2"]),
    "normalised loss, eta=6": ({"eta": 6.0, "normalised": True}, None),
    "alpha=0": ({"alpha": 0.0}, None),
    # Images that the network is not perfect on.
    "grey border": ({}, None),
}
# What is compared on validation images alone, after one epoch.
TUNING: list[dict[str, Any]] = [
    *({"alpha": alpha} for alpha in (0.02, 0.05, 0.1, 0.15)),
    *({"alpha": 0.05, "eta": eta} for eta in (0.0, 6.0)),
    *({"alpha": 0.05, "lr": lr} for lr in (0.001, 0.02)),
    {"alpha": 0.05, "schedule": "cosine"},
    {"alpha": 0.05, "epochs": 0},
    {"alpha": 0.05, "noise": "channel"},
    {"alpha": 0.1, "noise": "channel"},
    {"alpha": 0.05, "statistics": "updated"},
    {"alpha": 0.05, "train": "all", "statistics": "updated"},
]


class Run:
    """The data, and the settings that all rows share."""

    def __init__(self, network: str, images: int, work: Path, *, trial: bool) -> None:
        """Read everything once; a trial cuts every set to a few images."""
        self.name = network
        self.work = work
        self.train, self.val, self.test = loaders(images=images)
        self.grey = loaders(images=images, grey=True)[0]
        self.ood = ood_loaders(32 if trial else 1000)
        self.short = DataLoader(Subset(self.test.dataset, range(2000)), 256), ood_loaders(500)
        if trial:
            self.val, self.test = (DataLoader(Subset(x.dataset, range(32)), 32) for x in (self.val, self.test))
            self.short = self.test, self.ood

    def network(self) -> nn.Module:
        """Return the pretrained network, in the memory format that is faster on most processors."""
        return pretrained(self.name).to(memory_format=torch.channels_last)

    def posterior(
        self, label: str, method: bayesify.Method, *, seed: int = 0, include: Any = None, part: str
    ) -> bayesify.Posterior:
        """Convert and fit; a run that was done before is read from its checkpoint."""
        posterior = bayesify.convert(self.network(), method, include=include)
        name = "".join(c if c.isalnum() or c == "." else "-" for c in f"{self.name}-{part}-{label}-{seed}")
        checkpoint = {"checkpoint": self.work / name, "checkpoint_steps": 100} if method.epochs else {}
        train = self.grey if label == "grey border" else self.train
        bayesify.fit(posterior, train, seed=seed, progress=False, accuracy_tolerance=1.0, **checkpoint)
        return posterior

    def row(self, label: str, method: bayesify.Method, *, seed: int = 0, include: Any = None, part: str) -> dict:
        """Convert, fit and measure; the tuning sees the validation images alone, ablations 2,000 of the test images."""
        began = time.perf_counter()
        try:
            posterior = self.posterior(label, method, seed=seed, include=include, part=part)
        except NonFiniteError as error:
            return {"seed": seed, "failed": str(error)}
        row: dict[str, Any] = {"seed": seed, "fit seconds": round(time.perf_counter() - began, 1)}
        row["parameters learned"] = sum(p.numel() for p in posterior.parameters() if p.requires_grad)
        if part == "tuning":
            return {**row, **scored(posterior, self.val, None, seed=seed)}
        sets = (self.test, self.ood) if part == "main" else self.short
        return {**row, **scored(posterior, self.val, *sets, seed=seed)}


def study(run: Run, rows: Rows) -> None:
    """Ask what the parts of the first seed's posterior bring, and what networks that were trained apart would."""
    posterior = run.posterior("abnn", ABNN(), seed=0, part="main")
    layers = [module for module in posterior.modules() if isinstance(module, NormNoise)]
    for name, alpha, draws in (
        ("nine draws", None, 9),
        ("thirty draws", None, 30),
        ("the three members without noise", 0.0, 3),
    ):
        for layer in layers:
            layer.alpha = posterior.method.alpha if alpha is None else alpha  # type: ignore[attr-defined]
        rows.row(name, partial(scored, posterior, run.val, None, num_draws=draws))
    names = ("resnet20", "resnet32", "resnet44")

    def apart() -> dict[str, Any]:
        members = [bayesify.convert(pretrained(name), "map") for name in names]
        outputs = []
        for loader in (run.val, run.test):
            predictions = [bayesify.predict(member, loader, num_draws=1) for member in members]
            labels = torch.cat([y for _, y in loader])
            outputs.append((torch.stack([prediction.log_probs for prediction in predictions]), labels))
        return calibrated(*outputs)

    rows.row("the average of the pretrained ResNets 20, 32 and 44", apart)


def main() -> None:
    """Make the rows of a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("main", "ablations", "tuning", "study"), default="main")
    parser.add_argument("--network", choices=("resnet20", "resnet44"), default="resnet20")
    parser.add_argument("--images", type=int, default=10_000, help="how many training images to fit on")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, default=Path("abnn-work"), help="folder for checkpoints")
    parser.add_argument("--only", nargs="*", help="names of rows")
    parser.add_argument("--trial", action="store_true", help="a few images, and nothing is kept")
    arguments = parser.parse_args()
    images = 128 if arguments.trial else arguments.images
    run = Run(arguments.network, images, arguments.work, trial=arguments.trial)
    path = RESULTS / f"abnn_cifar_{arguments.part}_{arguments.network}.json"
    chosen = f"--part {arguments.part} --network {arguments.network} --images {images}"
    rows = Rows(None if arguments.trial else path, f"python -m experiments.abnn_cifar {chosen}")

    def wanted(label: str) -> bool:
        return arguments.only is None or label in arguments.only

    if arguments.part == "study":
        study(run, rows)
    elif arguments.part == "tuning":
        for changes in TUNING:
            label = ", ".join(f"{key}={value}" for key, value in changes.items())
            method = dataclasses.replace(ABNN(epochs=1), **changes)
            if wanted(label):
                rows.row(label, partial(run.row, label, method, part="tuning"))
    elif arguments.part == "ablations":
        for label, (changes, include) in ABLATIONS.items():
            if wanted(label):
                method = dataclasses.replace(ABNN(epochs=1), **changes)
                rows.row(label, partial(run.row, label, method, include=include, part="ablations"))
    else:
        for label, method in METHODS.items():
            for seed in arguments.seeds if label == "abnn" else [0]:
                if wanted(label):
                    seeded = dataclasses.replace(method, seed=seed) if hasattr(method, "seed") else method
                    rows.row(f"{label}, seed {seed}", partial(run.row, label, seeded, seed=seed, part="main"))


if __name__ == "__main__":
    main()
