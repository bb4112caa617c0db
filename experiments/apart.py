"""Networks of different architectures as members of one posterior: the bar of trainings apart."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from experiments.board_tasks import CifarBoard
from experiments.config import Setting
from experiments.networks import pretrained

__all__ = ["Apart", "CifarApart"]


class Apart(nn.Module):
    """Several networks, of which a buffer says which one runs: members of an ensemble differ in it alone.

    >>> networks = [nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1))]
    >>> x = torch.ones(1, 1)
    >>> torch.equal(Apart(networks, 1)(x), networks[1](x))
    True
    """

    which: Tensor

    def __init__(self, networks: list[nn.Module], which: int) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.register_buffer("which", torch.tensor(which))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the network that runs."""
        outputs: Tensor = self.networks[int(self.which)](x)
        return outputs


@dataclass(frozen=True)
class CifarApart:
    """Pretrained ResNets on CIFAR-10, of which one runs; measured as on the scoreboard.

    Attributes:
        which: The one that runs.
        networks: Their names.
    """

    which: int = 0
    networks: tuple[str, ...] = ("resnet20", "resnet32", "resnet44")

    def setting(self, seed: int, *, trial: bool, work: Path) -> Setting:
        """Read the images and the weights."""
        made = CifarBoard().setting(seed, trial=trial, work=work)
        networks: list[nn.Module] = [pretrained(name) for name in self.networks]
        return dataclasses.replace(made, network=Apart(networks, self.which).eval())
