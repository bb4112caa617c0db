"""Markov chains over a network's weights, while they move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.laws import Pass, Patch, Posterior, TensorTree
from bayesify.laws.vectorised import vectorised_outputs

__all__ = ["Chains"]


class Chains(nn.Module):
    """The present states of chains, as parameters that a sampler moves.

    Args:
        starts: For each chain, the parameters by name that it begins with.
        names: Which of them it moves.

    Attributes:
        meter: Of the noise of the sampler's gradients, while it runs.
    """

    def __init__(self, starts: Sequence[Mapping[str, Tensor]], names: Sequence[str]) -> None:
        super().__init__()
        self.chains = nn.ModuleList(
            TensorTree({name: nn.Parameter(start[name].detach().clone()) for name in names}) for start in starts
        )
        self.meter: Any = None

    def tensors(self, index: int) -> dict[str, Tensor]:
        """Return the present state of a chain, by name."""
        tree = self.chains[index]
        assert isinstance(tree, TensorTree)
        return tree.as_dict()

    def outputs(self, posterior: Posterior, inputs: Any, index: int, *, ood_rows: int = 0) -> Tensor:
        """Return the outputs of a chain's present state."""
        return posterior.outputs(inputs, Pass(ood_rows=ood_rows), patch=Patch(self.tensors(index)))

    def all_outputs(self, posterior: Posterior, inputs: Any) -> Tensor:
        """Return the outputs of all chains, (C, B, ...): in one vectorised pass where they allow it."""
        if torch.is_grad_enabled():
            posterior.guard()
        together = vectorised_outputs(posterior.network, self.chains, posterior.read, inputs)
        if together is not None:
            return together
        return torch.stack([self.outputs(posterior, inputs, index) for index in range(len(self.chains))])
