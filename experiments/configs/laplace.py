"""Laplace on the pretrained CIFAR-10 ResNet-20: the prior by the evidence or on the first 2,000 test images."""

from __future__ import annotations

import dataclasses

import bayesify
from bayesify import Laplace
from experiments.cifar import NUM_DATA, Cifar
from experiments.config import Config
from experiments.measures import Scored

__all__ = ["EXPERIMENTS"]

CIFAR = Cifar(images=10_000, num_data=NUM_DATA, channels_last=False)
FEW = dataclasses.replace(CIFAR, images=2000)  # for posteriors of all layers
LAST = {"probit": Scored(how="closed-form"), "200 draws of logits": Scored(how="closed-form", num_draws=200)}
ALL = {
    "diagonal": Laplace(structure="diagonal", mc_labels=1),
    "kronecker": Laplace(structure="kronecker", mc_labels=1),
}
PER_LAYER = Laplace(structure="diagonal", mc_labels=1, prior_per="layer", prior_precision="marginal-likelihood")


def _chosen(name: str, task: Cifar, method: Laplace, measure: Scored, prior: str, suffix: str = "") -> Config:
    by_validation = prior == "validation"
    method = dataclasses.replace(method, prior_precision="validation" if by_validation else "marginal-likelihood")
    return Config(
        f"{name}, prior by {prior}{suffix}", dataclasses.replace(task, choose=by_validation), method, (measure,)
    )


EXPERIMENTS = {
    "laplace_cifar": [
        Config("map", CIFAR, bayesify.MAP(), (Scored(),)),
        *(
            _chosen("last layer", CIFAR, Laplace(), measure, prior, f", {how}")
            for prior in ("evidence", "validation")
            for how, measure in LAST.items()
        ),
        *(
            _chosen(name, FEW, method, Scored(num_draws=5), prior)
            for name, method in ALL.items()
            for prior in ("evidence", "validation")
        ),
        Config("diagonal, prior by evidence for each layer", FEW, PER_LAYER, (Scored(num_draws=5),)),
    ],
}
