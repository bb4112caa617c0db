"""Members that learn: the pretrained ResNet-20 trained on at training rates, with augmentations it has not seen.

An epoch is all 50,000 images, about three minutes of one core.
"""

from __future__ import annotations

from bayesify import MAP
from experiments.board import Board, Way
from experiments.cifar_training import Augmentation, CifarTraining
from experiments.config import Config

__all__ = ["EXPERIMENTS", "RESTART"]

RESTART = MAP(epochs=12, lr=0.1, weight_decay=5e-4, schedule="cosine")
MEMBERS: tuple[tuple[Augmentation, tuple[int, ...]], ...] = (("cutout", (0,)), ("augmix", (1,)), ("usual", (2,)))


def _member(augmentation: Augmentation, seeds: tuple[int, ...]) -> Config:
    board = Board(way=Way(pooling="probs", temperatures="one"))
    return Config(f"restart, {augmentation}", CifarTraining(augmentation), RESTART, (board,), seeds=seeds)


EXPERIMENTS = {"gain_members": [_member(augmentation, seeds) for augmentation, seeds in MEMBERS]}
