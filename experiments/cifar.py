"""CIFAR-10 as every experiment here uses it: pretrained ResNets, one split, one set of OOD images.

The pretrained networks saw all 50,000 training images. What is tuned after training uses the first 2,000 test images;
results are reported on the last 8,000.

`BAYESIFY_DATA=... python -m experiments.cifar` prints what the border of the training images means to ResNet-20: its
accuracy on 6,400 of them, and on the validation images once its statistics are estimated again from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset, TensorDataset

from bayesify import OODRegularizer
from bayesify.data import OODImages
from experiments.config import Setting
from experiments.data import load
from experiments.networks import cifar_inputs, pretrained

__all__ = ["AugmentedImages", "Cifar", "CifarAsked", "loaders", "ood_loaders"]

NUM_DATA = 50_000
# Noise, which is the proxy of attacks, has to be most of the OOD images: with as many fakes the posterior learns the
# fakes alone.
REGULARIZER = OODRegularizer(weight=5.0, threshold=0.45)
OOD_BATCH, FAKES = 40, 0.2


class AugmentedImages(Dataset[tuple[Tensor, Tensor]]):
    """Training images, shifted by up to four pixels and mirrored at random.

    The border is black, as it was when the networks were trained. A grey one (zeros after the normalisation) changes
    the statistics of the first layers, and with them the accuracy.

    >>> images = AugmentedImages(torch.ones(1, 3, 32, 32), torch.zeros(1, dtype=torch.long))
    >>> (images.images[0, :, 0, 0] == cifar_inputs(torch.zeros(1, 3, 1, 1))[0, :, 0, 0]).all().item()
    True
    """

    def __init__(self, images: Tensor, labels: Tensor, *, grey: bool = False) -> None:
        """Keep images (N, 3, 32, 32) with values from 0 to 1, padded and normalised once; `grey` is the mean colour."""
        border = (4, 4, 4, 4)
        self.images = pad(cifar_inputs(images), border) if grey else cifar_inputs(pad(images, border))
        self.labels = labels

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return one image, changed anew each time."""
        top, left, mirror = (int(torch.randint(high, ())) for high in (9, 9, 2))
        image = self.images[index, :, top : top + 32, left : left + 32]
        return (image.flip(-1) if mirror else image), self.labels[index]


def loaders(
    batch_size: int = 128, *, images: int = 50_000, grey: bool = False
) -> tuple[DataLoader[Any], DataLoader[Any], DataLoader[Any]]:
    """Return loaders of augmented training images (the first so many), of validation images and of test images."""
    train, val, test = (load("cifar10", split) for split in ("train", "val", "test"))
    augmented = AugmentedImages(train.inputs[:images], train.targets[:images], grey=grey)
    return (
        DataLoader(augmented, batch_size, shuffle=True, drop_last=True),
        DataLoader(TensorDataset(cifar_inputs(val.inputs), val.targets), 256),
        DataLoader(TensorDataset(cifar_inputs(test.inputs), test.targets), 256),
    )


def ood_loaders(number: int = 2000) -> dict[str, DataLoader[Any]]:
    """Return images of Fashion-MNIST and of notMNIST on the scale of CIFAR's inputs."""
    found = {}
    for name in ("fashion-mnist", "notmnist"):
        images = load(name, "test").inputs[:number]
        colour = interpolate(images, size=32, mode="bilinear", antialias=True).expand(-1, 3, -1, -1)
        found[name] = DataLoader(TensorDataset(cifar_inputs(colour.clamp(0, 1))), 256)
    return found


@dataclass(frozen=True)
class Cifar:
    """A pretrained ResNet and CIFAR-10.

    Attributes:
        network: "resnet20", "resnet32" or "resnet44".
        images: Training images in an epoch.
        fresh: Whether each epoch has others of all 50,000 images, or the first so many.
        batch: Images in a batch.
        test: How many test images.
        ood: How many images of each OOD set; 0 for none.
        num_data: The number of data that priors and KL divergences are weighed against; None takes `images`.
        choose: Whether `fit` sees the validation images, to choose by.
        grey: Whether the border of training images is grey.
        channels_last: Whether the network is in the memory format that is faster for plain networks on most processors.
    """

    network: str = "resnet20"
    images: int = 5000
    fresh: bool = False
    batch: int = 128
    test: int = 8000
    ood: int = 1000
    num_data: int | None = None
    choose: bool = False
    grey: bool = False
    channels_last: bool = True

    def setting(self, seed: int, *, trial: bool, work: Path) -> Setting:
        """Read the images, and the weights of the network."""
        images, batch, few = (64, 16, 32) if trial else (self.images, self.batch, self.test)
        whole, val, test = loaders(images=images if trial or not self.fresh else NUM_DATA, grey=self.grey)
        sampler = RandomSampler(whole.dataset, num_samples=images if self.fresh else None)  # type: ignore[arg-type]
        val = DataLoader(Subset(val.dataset, range(few)), 256) if trial else val
        network = pretrained(self.network)
        return Setting(
            network.to(memory_format=torch.channels_last) if self.channels_last else network,  # type: ignore[call-overload]
            DataLoader(whole.dataset, batch, sampler=sampler, drop_last=True),
            val,
            DataLoader(Subset(test.dataset, range(few)), 256),
            ood_loaders(min(few, self.ood)) if self.ood else {},
            {"num_data": self.num_data or len(whole.dataset)} | ({"val_loader": val} if self.choose else {}),  # type: ignore[arg-type]
            supervision=lambda: _supervision(8 if trial else OOD_BATCH, self.regularizer()),
        )

    def regularizer(self) -> OODRegularizer:
        """Return what is asked for on OOD images."""
        return REGULARIZER


@dataclass(frozen=True)
class CifarAsked(Cifar):
    """The same, with a threshold and a weight of one's own for the uncertainty that is asked for."""

    threshold: float = REGULARIZER.threshold
    weight: float = REGULARIZER.weight

    def regularizer(self) -> OODRegularizer:
        """Return what is asked for on OOD images."""
        return OODRegularizer(weight=self.weight, threshold=self.threshold)


def _supervision(batch: int, regularizer: OODRegularizer) -> dict[str, Any]:
    """Return what `fit` needs to ask for uncertainty on OOD images."""
    made = OODImages(_pixels(), share=FAKES, transform=lambda image: cifar_inputs(image[None])[0])
    return {"ood_loader": DataLoader(made, batch, shuffle=True), "regularizer": regularizer}


@cache
def _pixels() -> Tensor:
    return load("cifar10", "train").inputs


@torch.no_grad()
def _accuracy(network: nn.Module, loader: DataLoader[Any]) -> float:
    network.eval()
    right = [(network(x).argmax(1) == y).double() for x, y in loader]
    return float(torch.cat(right).mean())


@torch.no_grad()
def main() -> None:
    """Print what each border does."""
    for name, grey in (("black", False), ("grey", True)):
        train, val, _ = loaders(images=6400, grey=grey)
        network = pretrained("resnet20")
        line = f"{name:6} training images {_accuracy(network, train):.4f}, validation {_accuracy(network, val):.4f}"
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
                module.momentum = None  # the average over all batches
        network.train()
        for x, _ in train:
            network(x)
        print(f"{line}, with statistics of these images {_accuracy(network, val):.4f}", flush=True)


if __name__ == "__main__":
    main()
