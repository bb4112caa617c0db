"""Fashion-MNIST: LeNets of several sizes to train from scratch, and a trained MLP."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu
from torch.utils.data import DataLoader, RandomSampler, Subset, TensorDataset

from bayesify.data import rotate
from experiments.config import Setting
from experiments.data import load

__all__ = ["FashionLeNet", "FashionMLP", "LeNet"]

HELD_OUT = 5000  # the last training images


class LeNet(nn.Module):
    """The authors' LeNet, with every hidden width multiplied.

    >>> [sum(p.numel() for p in LeNet(factor).parameters()) for factor in (1, 2)]
    [41806, 165202]
    """

    def __init__(self, factor: int) -> None:
        """Make it; a factor of 2 has about four times the parameters."""
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6 * factor, 5)
        self.conv2 = nn.Conv2d(6 * factor, 16 * factor, 5)
        self.conv3 = nn.Conv2d(16 * factor, 120 * factor, 4)
        self.fc1 = nn.Linear(120 * factor, 64 * factor)
        self.fc2 = nn.Linear(64 * factor, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 1, 28, 28) to logits (B, 10)."""
        h = max_pool2d(relu(self.conv1(x)), 2)
        h = max_pool2d(relu(self.conv2(h)), 2)
        h = relu(self.conv3(h)).flatten(1)
        logits: Tensor = self.fc2(relu(self.fc1(h)))
        return logits


@dataclass(frozen=True)
class FashionLeNet:
    """A LeNet with new weights: all training images but the last 5,000 to learn from, those to find a temperature.

    Attributes:
        factor: Of the hidden widths.
        images: Training images in an epoch, others each time.
    """

    factor: int = 1
    images: int = 20_000

    def setting(self, seed: int, *, trial: bool, work: Path) -> Setting:
        """Read the images and make the network."""
        train, test = load("fashion-mnist", "train"), load("fashion-mnist", "test")
        own, val = range(len(train) - HELD_OUT), range(len(train) - HELD_OUT, len(train))
        mine = Subset(train, own[:256] if trial else own)
        torch.manual_seed(seed)
        return Setting(
            LeNet(self.factor),
            DataLoader(
                mine, 128, sampler=RandomSampler(mine, num_samples=256 if trial else self.images), drop_last=True
            ),
            DataLoader(Subset(train, val[:64] if trial else val), 500),
            DataLoader(Subset(test, range(64 if trial else len(test))), 500),
            fitting={"num_data": len(mine), "accuracy_tolerance": 1.0},
        )


@dataclass(frozen=True)
class FashionMLP:
    """The MLP 784-128-64-10 of the library of Li et al. (2025), trained as there (Adam, 1e-3).

    Attributes:
        epochs: Of the plain training.
        ood: How many letters, and test images turned by 90 degrees.
    """

    epochs: int = 15
    ood: int = 2000

    def setting(self, seed: int, *, trial: bool, work: Path) -> Setting:
        """Train the network."""
        train, test = load("fashion-mnist", "train"), load("fashion-mnist", "test")
        own, few = (256, 64) if trial else (len(train) - HELD_OUT, self.ood)
        loader = DataLoader(Subset(train, range(own)), 128, shuffle=True, drop_last=True)
        held_out = range(len(train) - (64 if trial else HELD_OUT), len(train))
        turned = rotate(torch.stack([test[index][0] for index in range(few)]), 90.0)
        torch.manual_seed(seed)
        layers = [nn.Flatten(1), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)]
        network = nn.Sequential(*layers)
        optimizer = torch.optim.Adam(network.parameters(), 1e-3, weight_decay=1e-5)
        for _ in range(1 if trial else self.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(network(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return Setting(
            network.eval(),
            loader,
            DataLoader(Subset(train, held_out), 500),
            DataLoader(Subset(test, range(64 if trial else len(test))), 500),
            {
                "letters": DataLoader(Subset(load("notmnist", "test"), range(few)), 500),
                "turned by 90 degrees": DataLoader(TensorDataset(turned), 500),
            },
        )
