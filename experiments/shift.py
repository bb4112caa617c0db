"""Shifted and OOD inputs that are made from a task's own images, for the scoreboard: nothing is tuned on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, TensorDataset

from bayesify.data import Split, corrupt, mix, shuffle_patches
from experiments.data import load

__all__ = ["SHIFTS", "STRENGTHS", "Shift", "far_images", "near_images", "shifts"]

SHIFTS = ("gaussian_noise", "defocus_blur", "contrast", "jpeg_compression", "brightness")
STRENGTHS = (1, 2, 3, 4, 5)
Transform = Callable[[Tensor], Tensor]


class Shift(NamedTuple):
    """Test inputs under one corruption at one strength."""

    name: str
    strength: int
    loader: DataLoader[Any]


def shifts(images: Tensor, targets: Tensor, transform: Transform, *, batch: int = 256) -> Iterator[Shift]:
    """Return images under every corruption at every strength, one set in memory at a time.

    Args:
        images: (N, C, H, W) with values from 0 to 1.
        targets: Theirs, which a corruption leaves as they are.
        transform: What makes inputs of images: normalisation.
        batch: Images in a batch.
    """
    for name in SHIFTS:
        for strength in STRENGTHS:
            made = transform(corrupt(images, name, strength))
            yield Shift(name, strength, DataLoader(TensorDataset(made, targets), batch))


def near_images(own: Split, number: int) -> dict[str, Tensor]:
    """Return images that are nearly of a class: two of different classes in one, and one with its quarters shuffled.

    Args:
        own: Test images and labels, more than two for each that is made.
        number: How many.
    """
    half = len(own) // 2
    first, second = own.part(slice(half)), own.part(slice(half, 2 * half))
    apart = (first.targets != second.targets).nonzero()[:number, 0]
    size = own.inputs.shape[-1] // 4
    return {
        "mixed": mix(first.inputs[apart], second.inputs[apart]),
        "shuffled": shuffle_patches(own.inputs[:number], size, generator=0),
    }


def far_images(names: tuple[str, ...], number: int, *, like: Tensor) -> dict[str, Tensor]:
    """Return images of other sets, in the size, colours and scale of (N, C, H, W) images from 0 to 1."""
    found = {}
    for name in names:
        split = load(name, "test")
        assert isinstance(split, Split)
        images = split.inputs[:number]
        if images.shape[-1] != like.shape[-1]:
            images = interpolate(images, size=like.shape[-1], mode="bilinear", antialias=True).clamp(0, 1)
        found[name] = images.expand(-1, like.shape[1], -1, -1)
    return found


def loaders_of(sets: dict[str, Tensor], transform: Transform, *, batch: int = 256) -> dict[str, DataLoader[Any]]:
    """Return loaders of inputs without labels."""
    return {name: DataLoader(TensorDataset(transform(torch.as_tensor(x))), batch) for name, x in sets.items()}
