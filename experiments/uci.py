"""UCI regression on the published splits, which the seed numbers: a network with 50 hidden units."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
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
    val: ClassVar[float | None] = None  # the share of training rows that are held out to fit scales on

    def setting(self, seed: int, *, trial: bool, work: Path) -> Setting:
        """Train the network on one split, and take the noise from its residuals."""
        made = standardise(*read_uci(data_root() / "uci" / f"{self.table}.npz", seed))
        train, test = ((part.inputs.float(), part.targets.float()) for part in made.splits)
        if self.held_out:
            train, test = _cut(train, 4 * len(train[0]) // 5, seed)
        # Scales of variances are fitted on the training rows: there are too few to hold some out.
        val = train
        if self.val is not None:
            train, val = _cut(train, round((1 - self.val) * len(train[0])), seed)
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
        rows = DataLoader(TensorDataset(*test), 1000)
        known = DataLoader(TensorDataset(*val), 1000)
        return Setting(network, loader, known, rows, likelihood=likelihood, scale=float(made.targets.std))


def _cut(rows: tuple[Tensor, Tensor], first: int, seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return so many rows, chosen at random, and the others."""
    order = torch.randperm(len(rows[0]), generator=torch.Generator().manual_seed(seed))
    own, held = order.tensor_split([first])
    return (rows[0][own], rows[1][own]), (rows[0][held], rows[1][held])
