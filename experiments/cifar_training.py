"""All of CIFAR-10's training images, with augmentations that the pretrained network has not seen."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader, Dataset

from experiments.augmentation import augmix, cutout
from experiments.board_tasks import CifarBoard
from experiments.cifar import NUM_DATA
from experiments.config import Setting
from experiments.data import load
from experiments.networks import cifar_inputs

__all__ = ["Augmentation", "CifarTraining", "TrainingImages"]

Augmentation = Literal["usual", "cutout", "augmix"]
SQUARE = 8
BORDER = (4, 4, 4, 4)  # black, as it was when the networks were trained


class TrainingImages(Dataset[tuple[Tensor, Tensor]]):
    """Training images, shifted by up to four pixels, mirrored, and changed further at random.

    Args:
        images: (N, 3, 32, 32) with values from 0 to 1.
        labels: (N,).
        augmentation: "usual" is no more than that, "cutout" hides a square, "augmix" mixes with changed copies first.
    """

    def __init__(self, images: Tensor, labels: Tensor, augmentation: Augmentation = "usual") -> None:
        self.pixels = (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()
        self.inputs = cifar_inputs(pad(images, BORDER)) if augmentation != "augmix" else None
        self.labels = labels
        self.augmentation = augmentation

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return one image, changed anew each time."""
        if self.inputs is None:
            mixed = augmix(Image.fromarray(self.pixels[index].numpy()))
            padded = cifar_inputs(pad(mixed, BORDER)[None])[0]
        else:
            padded = self.inputs[index]
        top, left, mirror = (int(torch.randint(high, ())) for high in (9, 9, 2))
        image = padded[:, top : top + 32, left : left + 32]
        image = image.flip(-1) if mirror else image
        return (cutout(image, SQUARE) if self.augmentation == "cutout" else image), self.labels[index]


@dataclass(frozen=True)
class CifarTraining:
    """A pretrained ResNet on CIFAR-10, trained on with all training images, measured as on the scoreboard.

    Attributes:
        augmentation: Of the training images.
        network: "resnet20", "resnet32" or "resnet44".
        batch: Images in a batch.
        ood: How many images of each OOD set.
        shifted: How many test images are corrupted.
    """

    augmentation: Augmentation = "usual"
    network: str = "resnet20"
    batch: int = 128
    ood: int = 500
    shifted: int = 200

    def setting(self, seed: int, *, trial: bool, work: Path) -> Setting:
        """Read the images and the weights."""
        board = CifarBoard(self.network, ood=self.ood, shifted=self.shifted)
        made = board.setting(seed, trial=trial, work=work)
        train = load("cifar10", "train").part(slice(64 if trial else NUM_DATA))
        images = TrainingImages(train.inputs, train.targets, self.augmentation)
        loader: DataLoader[Any] = DataLoader(images, 16 if trial else self.batch, shuffle=True, drop_last=True)
        return dataclasses.replace(made, train=loader)
