"""Predictions without draws beside draws: ResNet-20, the MLP of the paper's library, and UCI regression."""

from __future__ import annotations

import dataclasses

import bayesify
from bayesify import ABNN, BayesAdapter, Laplace
from experiments.cifar import Cifar
from experiments.config import Config
from experiments.configs.adapter import CHOSEN, CIFAR
from experiments.fashion import FashionMLP
from experiments.measures import Predictor, Predictors
from experiments.uci import Uci

__all__ = ["EXPERIMENTS"]

MEAN, STREAMLINED = Predictor("mean", "mean"), Predictor("streamlined", "streamlined")
LINEARISED = Predictor("linearised", "linearised")
DRAWS = (Predictor("4 draws", "sampling", 4), Predictor("100 draws", "sampling", 100))  # four cost about one pass
SIDE_BY_SIDE = (MEAN, *DRAWS, STREAMLINED, LINEARISED)
MEMBERS = (Predictor("mean of three members", "sampling", 3), Predictor("nine draws", "sampling", 9))
FEWER = (Predictor("four draws", "sampling", 4), Predictor("twenty draws", "sampling", 20))
TABLES = ("bostonHousing", "energy", "wine-quality-red", "yacht", "power-plant")
# Adam, since the loss grows with 1 / noise variance, and steps of SGD would with it.
REGRESSION = BayesAdapter(
    epochs=20, optimizer="adam", lr=1e-3, log_std_lr=5e-2, schedule="cosine", log_std_schedule="cosine"
)
RATES = ((1e-3, 1e-2), (1e-3, 5e-2), (3e-3, 2e-2))

EXPERIMENTS = {
    # The question for ABNN: the same NLL as nine draws at under a third of their cost?
    "streamlined_cifar": [
        Config(
            "abnn", Cifar(test=1000, ood=0), ABNN(),
            (Predictors((*MEMBERS, STREAMLINED, Predictor("moments", "moments"), LINEARISED)),),
        ),
        Config(
            "adapter", dataclasses.replace(CIFAR, test=1000, ood=0, channels_last=True), CHOSEN,
            (Predictors((MEAN, *FEWER, STREAMLINED, LINEARISED)),),
        ),
    ],
    "streamlined_fashion": [
        Config("plain", FashionMLP(), bayesify.MAP(), (Predictors((MEAN,)),), seeds=(0, 1, 2)),
        Config("laplace", FashionMLP(), Laplace(structure="diagonal"), (Predictors(SIDE_BY_SIDE),), seeds=(0, 1, 2)),
        Config("adapter", FashionMLP(), BayesAdapter(epochs=5), (Predictors(SIDE_BY_SIDE),), seeds=(0, 1, 2)),
    ],
    "streamlined_uci": [
        Config(f"{table}, {name}", Uci(table), method, (Predictors(SIDE_BY_SIDE, scaled=False),), seeds=(0, 1, 2, 3, 4))
        for table in TABLES
        for name, method in (("laplace", Laplace(structure="diagonal")), ("adapter", REGRESSION))
    ],
    "streamlined_uci_tuning": [
        Config(
            f"{table}, adapter, lr={lr:g}, log_std_lr={rate:g}", Uci(table, held_out=True),
            dataclasses.replace(REGRESSION, lr=lr, log_std_lr=rate), (Predictors(SIDE_BY_SIDE, scaled=False),),
        )
        for lr, rate in RATES
        for table in TABLES
    ],
}  # fmt: skip
