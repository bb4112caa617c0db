"""The baselines on the pretrained CIFAR-10 ResNet-20, and every kind of method on digits, in seconds."""

from __future__ import annotations

import bayesify
from experiments.cifar import Cifar
from experiments.config import Config
from experiments.digits import Digits
from experiments.measures import Predictor, Predictors, Scored

__all__ = ["EXPERIMENTS"]

FIVE = (Scored(num_draws=5),)
CIFAR = Cifar(choose=True, channels_last=False)
METHODS: dict[str, bayesify.Method] = {
    "map": bayesify.MAP(),
    "mc-dropout, last layer, not fitted": bayesify.MCDropout(p=0.1, insert_before="linear"),
    "mc-dropout, convolutions": bayesify.MCDropout(p=0.05, insert_before="conv", epochs=1, lr=0.005, schedule="cosine"),
    "swag": bayesify.SWAG(epochs=2, lr=0.01, snapshots_per_epoch=10, rank=10, num_bn_draws=10, statistics_batches=20),
    "deep ensemble of perturbed copies": bayesify.DeepEnsemble(
        members=3, start="perturbed", perturb_std=0.3, epochs=1, lr=0.02
    ),
}
# Digits are to try the runner on: they need no files, and are no evidence for a method.
WAYS = (Predictor("mean", "mean"), Predictor("20 draws", "sampling", 20), Predictor("streamlined", "streamlined"))

EXPERIMENTS = {
    "baselines": [Config(name, CIFAR, method, FIVE) for name, method in METHODS.items()],
    "digits": [
        Config("map", Digits(), bayesify.MAP(), (Scored(),)),
        Config("mc-dropout", Digits(), bayesify.MCDropout(), (Scored(num_draws=20),)),
        Config("abnn", Digits(), bayesify.ABNN(epochs=2), (Scored(),), seeds=(0, 1)),
        Config("bayes-adapter", Digits(), bayesify.BayesAdapter(epochs=5), (Scored(), Predictors(WAYS))),
    ],
}
