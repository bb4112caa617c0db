"""iBNN on the pretrained CIFAR-10 ResNet-20, on a sentence encoder, and LeNets from scratch (the paper's Figure 4)."""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

import bayesify
from bayesify import IBNN, BayesAdapter
from experiments.cifar import NUM_DATA, Cifar
from experiments.clinc import Clinc, last_layer
from experiments.config import Config
from experiments.fashion import FashionLeNet
from experiments.measures import Scored

__all__ = ["EXPERIMENTS"]

DRAWS = 16  # in every prediction, whatever K is
CIFAR = Cifar(fresh=True, num_data=NUM_DATA)
CHOSEN: dict[str, Any] = {"epochs": 2, "means_std": 0.05}
MAIN: dict[str, bayesify.Method] = {
    "map": bayesify.MAP(),
    "mc-dropout": bayesify.MCDropout(p=0.05, insert_before="conv", epochs=2, lr=0.005, schedule="cosine"),
    **{f"ibnn-{k}": IBNN(components=k, draws_per_component=DRAWS // k, **CHOSEN) for k in (4, 8, 16)},
    **{
        f"ibnn-{k}, means_std={std}": IBNN(components=k, draws_per_component=DRAWS // k, **{**CHOSEN, "means_std": std})
        for std, k in product((0.1, 0.3), (4, 8, 16))
    },
    "ibnn-16, not fitted": IBNN(components=16, draws_per_component=1, **{**CHOSEN, "epochs": 0}),
}
# Changes of K = 16 and two epochs, one at a time, on validation images.
TUNED = IBNN(components=16, draws_per_component=1, **CHOSEN)
TUNING: dict[str, dict[str, Any]] = {
    "not fitted": {"epochs": 0},
    "not fitted, means_std=0.08": {"epochs": 0, "means_std": 0.08},
    "not fitted, start_std=0.02": {"epochs": 0, "start_std": (0.02, 0.008)},
    "fitted": {},
    "means_std=0.1": {"means_std": 0.1},
    "start_std=0.02": {"start_std": (0.02, 0.008)},
    **{f"latent_lr={r}": {"latent_lr": r} for r in (0.001, 0.004, 0.04)},
    "slow_lr=0.001": {"slow_lr": 1e-3},
    "joint": {"weights": "joint", "lr": 0.01},
    "frozen": {"weights": "frozen"},
    "kl=average": {"kl": "average"},
    "repeats=1": {"repeats": 1},
}
ENCODER = IBNN(draws_per_component=2, epochs=2, optimizer="adam", latent_lr=1e-3, slow_lr=1e-5, weight_decay=0.0)
QUERIES: dict[str, bayesify.Method] = {
    "map": bayesify.MAP(),
    "mc-dropout": bayesify.MCDropout(p=0.1),
    "ibnn-4": ENCODER,
    "ibnn-8": dataclasses.replace(ENCODER, components=8),
    "ibnn-4, weights frozen": dataclasses.replace(ENCODER, weights="frozen"),
}
EPOCHS = 5


def _plain(rate: float) -> bayesify.Method:
    return bayesify.MAP(epochs=EPOCHS, lr=rate, schedule="held", weight_decay=5e-4)


def _mean_field(rate: float) -> bayesify.Method:
    return BayesAdapter(
        epochs=EPOCHS, lr=rate, schedule="held", log_std_lr=0.1, log_std_schedule="constant", start_std=(0.0067, 0.018),
        prior_std=1.0,
    )  # fmt: skip


# The authors' README has K = 8 and a variational rate of .2 K for a LeNet. In a short run that rate alone is an
# advantage, so the others have rows with more of it too.
FROM_SCRATCH: dict[str, bayesify.Method] = {
    "plain": _plain(0.02),
    "iBNN": IBNN.from_scratch(8, epochs=EPOCHS, lr=0.02, latent_lr=0.2),
    "mean-field VI": _mean_field(0.02),
    "plain, rate .1": _plain(0.1),
    "mean-field VI, rate .1": _mean_field(0.1),
}

EXPERIMENTS = {
    "ibnn_cifar_main_resnet20": [
        Config(name, CIFAR, method, (Scored(),), seeds=(0,) if name == "map" else (0, 1, 2))
        for name, method in MAIN.items()
    ],
    "ibnn_cifar_tuning_resnet20": [
        Config(
            name, dataclasses.replace(CIFAR, images=2500), dataclasses.replace(TUNED, **changes), (Scored(test=False),)
        )
        for name, changes in TUNING.items()
    ],
    "ibnn_clinc_main": [
        *(
            Config(name, Clinc(), method, (Scored(),), seeds=(0, 1, 2) if name == "ibnn-4" else (0,))
            for name, method in QUERIES.items()
        ),
        Config("ibnn-4, last layer and head", Clinc(), ENCODER, (Scored(),), include=(last_layer(), "head")),
    ],
    "ibnn_fashion_sizes": [
        Config(
            f"{name}, {factor**2}x parameters", FashionLeNet(factor), method,
            (Scored(num_draws=None if name.startswith("plain") else DRAWS),),
        )
        for factor, (name, method) in product((1, 2, 4, 8), FROM_SCRATCH.items())
    ],
}  # fmt: skip
