"""UCI regression on the published splits, which the seed numbers: a network with 50 hidden units."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bayesify import Gaussian
from bayesify.data import standardise
from experiments.config import Setting
from experiments.data import data_root, read_uci

__all__ = ["Uci"]


@dataclass(frozen=True)
class Uci:
    """One table; the split is the seed.

    Attributes:
        table: Its name.
        epochs: Of the plain training.
        held_out: Report on a fifth of the training rows instead of the test rows: to choose settings by.
    """

    table: str
    epochs: int = 40
    held_out: bool = False

    def setting(self, seed: int, *, trial: bool, work: Path) -> Setting:
        """Train the network on one split, and take the noise from its residuals."""
        made = standardise(*read_uci(data_root() / "uci" / f"{self.table}.npz", seed))
        train, test = ((part.inputs.float(), part.targets.float()) for part in made.splits)
        if self.held_out:
            order = torch.randperm(len(train[0]), generator=torch.Generator().manual_seed(seed))
            own, held = order.tensor_split([4 * len(order) // 5])
            train, test = (train[0][own], train[1][own]), (train[0][held], train[1][held])
        loader = DataLoader(TensorDataset(*train), 32, shuffle=True)
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(train[0].shape[1], 50), nn.ReLU(), nn.Linear(50, 1))
        optimizer = torch.optim.Adam(network.parameters(), 1e-2, weight_decay=1e-5)
        for _ in range(1 if trial else self.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(network(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        likelihood = Gaussian()
        with torch.no_grad():
            residual = (network(train[0]) - train[1]).square().mean().sqrt()
            likelihood.log_noise.fill_(math.log(float(residual)))
        # Scales of variances are fitted on the training rows: there are too few to hold some out.
        rows = DataLoader(TensorDataset(*test), 1000)
        known = DataLoader(TensorDataset(*train), 1000)
        return Setting(network, loader, known, rows, likelihood=likelihood, scale=float(made.targets.std))
