"""ABNN on the pretrained CIFAR-10 ResNets, on a sentence encoder and on a U-Net, beside baselines.

Six minutes of one core for each ABNN row of ResNet-20, twice that for ResNet-44.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import bayesify
from bayesify import ABNN
from experiments.cifar import Cifar
from experiments.clinc import Clinc, last_layer
from experiments.config import Config
from experiments.measures import Pixels, Scored
from experiments.scenes import CLASSES, Segmentation

__all__ = ["EXPERIMENTS"]

MAIN: dict[str, bayesify.Method] = {
    "map": bayesify.MAP(),
    "mc-dropout, last layer": bayesify.MCDropout(p=0.1, insert_before="linear"),
    "abnn": ABNN(),
    "abnn, all parameters": ABNN(train="all"),
    "mc-dropout, convolutions": bayesify.MCDropout(p=0.05, insert_before="conv", epochs=2, lr=0.005, schedule="cosine"),
    "deep ensemble of perturbed copies": bayesify.DeepEnsemble(
        members=5, start="perturbed", perturb_std=0.3, epochs=2, lr=0.02
    ),
}
# One change at a time, one epoch.
ABLATIONS: dict[str, dict[str, Any]] = {
    "the default": {},
    "not fitted": {"epochs": 0},
    "eta=0": {"eta": 0.0},
    "eta=6": {"eta": 6.0},
    "alpha=0.1": {"alpha": 0.1},
    "noise per element": {"noise": "element"},
    "noise per element, alpha=0.2": {"noise": "element", "alpha": 0.2},
    "noise per channel": {"noise": "channel"},
    "statistics updated": {"statistics": "updated"},
    "all parameters trained": {"train": "all"},
    "normalised loss, eta=6": {"eta": 6.0, "normalised": True},
    "alpha=0": {"alpha": 0.0},
}
# The paper's open question 1: how many layers.
LAYERS: dict[str, tuple[str, ...]] = {
    "the first layer": ("bn1",),
    "the last stage": ("layer3",),
    "the last two stages": ("layer2", "layer3"),
    "second norm of each block": ("*.bn2",),
}
# Compared on validation images alone, after one epoch.
TUNING: tuple[dict[str, Any], ...] = (
    *({"alpha": alpha} for alpha in (0.02, 0.05, 0.1, 0.15)),
    *({"alpha": 0.05, "eta": eta} for eta in (0.0, 6.0)),
    *({"alpha": 0.05, "lr": lr} for lr in (0.001, 0.02)),
    {"alpha": 0.05, "schedule": "cosine"},
    {"alpha": 0.05, "epochs": 0},
    {"alpha": 0.05, "noise": "channel"},
    {"alpha": 0.1, "noise": "channel"},
    {"alpha": 0.05, "statistics": "updated"},
    {"alpha": 0.05, "train": "all", "statistics": "updated"},
)
SCORED, VALIDATED = (Scored(),), (Scored(test=False),)
# What the paper has and the defaults have not, at two epochs of all images: eta = 6, and noise for each element, with
# which the logits move as much as with the default (`python -m experiments.abnn_study --part alpha`).
CLAIMS: dict[str, dict[str, Any]] = {
    "abnn": {},
    "eta=6": {"eta": 6.0},
    "eta=0": {"eta": 0.0},
    "noise per element, as much in the logits": {"noise": "element", "alpha": 0.117},
}
SHORT = Cifar(test=2000, ood=500)


def _main(task: Cifar) -> list[Config]:
    return [
        Config(name, task, method, SCORED, seeds=(0, 1, 2) if name == "abnn" else (0,)) for name, method in MAIN.items()
    ]


def _label(changes: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in changes.items())


ENCODER = ABNN(epochs=1, optimizer="adam", lr=1e-3, weight_decay=0.0)
NINE = (Scored(num_draws=9),)
QUERIES: dict[str, bayesify.Method] = {
    "map": bayesify.MAP(),
    "abnn": ENCODER,
    "abnn, not fitted": dataclasses.replace(ENCODER, epochs=0),
    "mc-dropout": bayesify.MCDropout(p=0.1),
    "abnn, eta=0": dataclasses.replace(ENCODER, eta=0.0),
}
SCENES: dict[str, bayesify.Method] = {
    "map": bayesify.MAP(),
    "abnn": ABNN(epochs=1),
    **{f"abnn, alpha={alpha}": ABNN(epochs=1, alpha=alpha) for alpha in (0.02, 0.1)},
    "abnn, eta=0": ABNN(epochs=1, eta=0.0),
    "mc-dropout": bayesify.MCDropout(p=0.1, insert_before="conv", epochs=1, lr=0.005, schedule="cosine"),
    "deep ensemble of perturbed copies": bayesify.DeepEnsemble(
        members=3, start="perturbed", perturb_std=0.2, epochs=2, lr=0.02
    ),
}

ENCODER_TUNING: list[dict[str, Any]] = [{"alpha": alpha, "lr": 0.001} for alpha in (0.1, 0.05, 0.02)]

EXPERIMENTS = {
    "abnn_cifar_main_resnet20": _main(Cifar()),
    "abnn_cifar_main_resnet44": _main(Cifar("resnet44", images=2500)),
    "abnn_cifar_ablations_resnet20": [
        *(Config(name, SHORT, ABNN(**{"epochs": 1, **changes}), SCORED) for name, changes in ABLATIONS.items()),
        *(Config(name, SHORT, ABNN(epochs=1), SCORED, include=include) for name, include in LAYERS.items()),
        # Images that the network is not perfect on.
        Config("grey border", dataclasses.replace(SHORT, grey=True), ABNN(epochs=1), SCORED),
    ],
    "abnn_cifar_claims_resnet20": [
        Config(name, Cifar(images=50_000), ABNN(**changes), SCORED) for name, changes in CLAIMS.items()
    ],
    "abnn_cifar_tuning_resnet20": [
        Config(_label(changes), Cifar(), ABNN(**{"epochs": 1, **changes}), VALIDATED) for changes in TUNING
    ],
    "abnn_clinc_main": [
        *(
            Config(name, Clinc(), method, NINE, seeds=(0, 1, 2) if name == "abnn" else (0,))
            for name, method in QUERIES.items()
        ),
        Config("abnn, last layer", Clinc(), ENCODER, NINE, include=(last_layer(),)),
    ],
    "abnn_clinc_tuning": [
        Config(_label(c), Clinc(), dataclasses.replace(ENCODER, **c), (Scored(num_draws=9, test=False),))
        for c in ENCODER_TUNING
    ],
    "abnn_segmentation": [
        Config(name, Segmentation(), method, (Pixels(len(CLASSES)),), seeds=(0, 1, 2) if name == "abnn" else (0,))
        for name, method in SCENES.items()
    ],
}
