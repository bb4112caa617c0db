"""A segmentation set that is made from real images: Fashion-MNIST items on CIFAR-10 photographs.

A scene (3, 64, 64) is a CIFAR-10 photograph, enlarged twice, on which two or three Fashion-MNIST items lie in random
colours. A pixel's label is 0 for the photograph and 1 to 10 for the items. An OOD scene also has an MNIST digit
or a notMNIST letter, whose pixels no class describes, as the anomalies of StreetHazards and BDD-Anomaly are. Training
scenes use the training parts of both sets, test scenes the test parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from bayesify.data import load

__all__ = ["CLASSES", "OOD", "Scenes", "make_scenes"]

CLASSES = ("photograph", "top", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "trainer", "bag", "boot")
OOD = -100  # the label of an anomaly: it does not count
SIZE, ITEM = 64, 28


class Scenes(NamedTuple):
    """Images (N, 3, 64, 64) with values from 0 to 1, and labels (N, 64, 64)."""

    images: Tensor
    labels: Tensor


def make_scenes(part: str, number: int, *, seed: int, ood: str | None = None) -> Scenes:
    """Compose scenes.

    Args:
        part: "train", "val" or "test".
        number: How many.
        seed: Of what is chosen and where it lies.
        ood: "mnist" or "notmnist" adds one such object to each scene.
    """
    generator = torch.Generator().manual_seed(seed)
    items = load("fashion-mnist", part)
    photos = load("cifar10", part).inputs
    if photos.shape[-1] == 3:
        photos = photos.permute(0, 3, 1, 2)
    others = None if ood is None else load(ood, "test").inputs  # type: ignore[call-overload]
    images, labels = torch.empty(number, 3, SIZE, SIZE), torch.zeros(number, SIZE, SIZE, dtype=torch.long)

    def below(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    for index in range(number):
        photo = _unit(photos[below(len(photos))])
        images[index] = interpolate(photo[None], scale_factor=2, mode="bilinear")[0].clamp(0, 1)
        for _ in range(2 + below(2)):
            chosen = below(len(items))
            _paste(images[index], labels[index], items.inputs[chosen], int(items.targets[chosen]) + 1, generator)
        if others is not None:
            _paste(images[index], labels[index], others[below(len(others))], OOD, generator)
    return Scenes(images, labels)


def _paste(image: Tensor, labels: Tensor, item: Tensor, label: int, generator: torch.Generator) -> None:
    grey = _unit(item)[0]
    top, left = (int(torch.randint(SIZE - ITEM + 1, (), generator=generator)) for _ in range(2))
    colour = 0.3 + 0.7 * torch.rand(3, 1, 1, generator=generator)
    mask = grey > 0.15
    rows, columns = slice(top, top + ITEM), slice(left, left + ITEM)
    image[:, rows, columns] = torch.where(mask, grey * colour, image[:, rows, columns])
    labels[rows, columns] = torch.where(mask, label, labels[rows, columns])


def _unit(image: Tensor) -> Tensor:
    return image.float() / 255 if image.dtype == torch.uint8 else image.float()
