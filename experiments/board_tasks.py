"""The tasks of the scoreboard: those of the other experiments, with near and far OOD inputs and corrupted ones."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify.data import Split
from experiments.cifar import NUM_DATA, Cifar
from experiments.config import Setting, Task
from experiments.data import load
from experiments.fashion import LeNet
from experiments.networks import cifar_inputs
from experiments.records import config_hash
from experiments.scenes import Segmentation
from experiments.shift import Transform, far_images, loaders_of, near_images, shifts
from experiments.uci import Uci

__all__ = ["CifarBoard", "FashionBoard", "ScenesBoard", "Shown", "UciBoard"]

FEW = 32  # images of each kind in a trial


@dataclass(frozen=True)
class CifarBoard:
    """A pretrained ResNet on CIFAR-10: the first 2,000 test images are validation, the last 8,000 are reported.

    Attributes:
        network: "resnet20", "resnet32" or "resnet44".
        images: Training images that curvature is taken from.
        choose: Whether `fit` sees the validation images, to choose a prior by.
        ood: How many images of each OOD set.
        shifted: How many test images are corrupted.
    """

    network: str = "resnet20"
    images: int = 2000
    choose: bool = False
    ood: int = 500
    shifted: int = 200

    def setting(self, seed: int, *, trial: bool, work: Path) -> Setting:
        """Read the images and the weights."""
        task = Cifar(self.network, images=self.images, ood=0, num_data=NUM_DATA, choose=self.choose)
        made = task.setting(seed, trial=trial, work=work)
        far = ("fashion-mnist", "notmnist")
        return _with_others(made, load("cifar10", "test"), cifar_inputs, far, self.ood, self.shifted, trial)


@dataclass(frozen=True)
class FashionBoard:
    """The authors' LeNet of iBNN on Fashion-MNIST, trained here: the last 10,000 training images are validation.

    Attributes:
        epochs: Of the plain training.
        val: How many validation images are used.
        choose: Whether `fit` sees them, to choose a prior by.
        ood: How many images of each OOD set.
        shifted: How many test images are corrupted.
    """

    epochs: int = 8
    val: int = 2000
    choose: bool = False
    ood: int = 1000
    shifted: int = 500

    def setting(self, seed: int, *, trial: bool, work: Path) -> Setting:
        """Train the network of this seed, or go on with it."""
        train, val, test = (load("fashion-mnist", part) for part in ("train", "val", "test"))
        if trial:
            train, val, test = (part.part(slice(4 * FEW)) for part in (train, val, test))
        epochs = 1 if trial else self.epochs
        adam = bayesify.MAP(optimizer="adam", lr=1e-3, weight_decay=0.0, schedule="cosine", epochs=epochs)
        torch.manual_seed(seed)
        plain = bayesify.convert(LeNet(1), adam)
        loader = DataLoader(train, 128, shuffle=True, drop_last=True)
        folder = None if trial else work / f"fashion-{config_hash([self.epochs])}-{seed}"
        bayesify.fit(plain, loader, seed=seed, checkpoint=folder, progress=False, accuracy_tolerance=1.0)
        held_out = DataLoader(val.part(slice(self.val)), 500)
        made = Setting(
            plain.network.eval(),
            loader,
            held_out,
            DataLoader(test, 500),
            fitting={"val_loader": held_out} if self.choose else {},
        )
        return _with_others(made, test, _same, ("mnist", "notmnist"), self.ood, self.shifted, trial)


@dataclass(frozen=True)
class ScenesBoard:
    """The U-Net on scenes, whose pixels count one by one.

    Attributes:
        shifted: How many test scenes are corrupted.
    """

    shifted: int = 20

    def setting(self, seed: int, *, trial: bool, work: Path) -> Setting:
        """Make the scenes and train the U-Net, or go on with it."""
        made = Segmentation().setting(seed, trial=trial, work=work)
        scenes = made.test.dataset
        assert isinstance(scenes, TensorDataset)
        images, targets = (tensor[: 2 if trial else self.shifted] for tensor in scenes.tensors)
        return dataclasses.replace(made, shifted=partial(shifts, images, targets, _same, batch=16))


@dataclass(frozen=True)
class Shown:
    """A task whose validation data `fit` sees, to choose a prior by.

    Attributes:
        task: The task.
    """

    task: Task

    def setting(self, seed: int, *, trial: bool, work: Path) -> Setting:
        """Make it ready."""
        made = self.task.setting(seed, trial=trial, work=work)
        return dataclasses.replace(made, fitting={**made.fitting, "val_loader": made.val})


@dataclass(frozen=True)
class UciBoard(Uci):
    """A UCI table, with a tenth of the training rows held out to fit scales on."""

    val: ClassVar[float | None] = 0.1


def _with_others(
    made: Setting, test: Split, transform: Transform, far: tuple[str, ...], ood: int, shifted: int, trial: bool
) -> Setting:
    """Return a setting with OOD images, and with test images to corrupt."""
    number, few = (FEW, 4) if trial else (ood, shifted)
    others = near_images(test, number) | far_images(far, number, like=test.inputs)
    return dataclasses.replace(
        made,
        ood=loaders_of(others, transform),
        shifted=partial(shifts, test.inputs[:few], test.targets[:few], transform),
    )


def _same(images: Tensor) -> Tensor:
    return images
