"""Scikit-learn's digits with a small trained network: a task that takes seconds, without files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from bayesify.data import photo_patches, read_digits
from experiments.config import Setting

__all__ = ["Digits"]


@dataclass(frozen=True)
class Digits:
    """The digits, and patches of photographs beside them.

    Attributes:
        hidden: Units of the hidden layer, which layer normalisation and dropout follow.
        epochs: Of the plain training.
    """

    hidden: int = 64
    epochs: int = 30

    def setting(self, seed: int, *, trial: bool, work: Path) -> Setting:
        """Train the network."""
        train, val, test = (read_digits(part) for part in ("train", "val", "test"))
        torch.manual_seed(0)
        hidden = [nn.Linear(64, self.hidden), nn.LayerNorm(self.hidden), nn.ReLU(), nn.Dropout(0.1)]
        network = nn.Sequential(nn.Flatten(1), *hidden, nn.Linear(self.hidden, 10))
        loader = DataLoader(train, 64, shuffle=True)
        optimizer = torch.optim.Adam(network.parameters(), 3e-3)
        for _ in range(1 if trial else self.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(network(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        few = 64 if trial else len(test)
        return Setting(
            network.eval(),
            loader,
            DataLoader(Subset(val, range(few)), 256) if trial else DataLoader(val, 256),
            DataLoader(Subset(test, range(few)), 256),
            {"photos": DataLoader(TensorDataset(photo_patches(few, seed=0)), 256)},
        )
