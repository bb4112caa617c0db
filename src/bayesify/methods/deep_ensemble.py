"""Deep ensembles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bayesify.laws import LossTerms, MemberLaw, PointLaw, Posterior, statistics_names
from bayesify.methods.method import Method, Schedule, Stage, member_losses, member_stages, register
from bayesify.selection import Conversion, Selection, require_something, select_parameters

__all__ = ["DeepEnsemble", "Start", "start_member"]

Start = Literal["reset", "perturbed", "network"]


@register
@dataclass(frozen=True, kw_only=True)
class DeepEnsemble(Method):
    """Several networks trained apart, averaged (Lakshminarayanan et al. 2017).

    Members are stored once each, as tensors; all of them run through one network. Fitting costs M trainings, one
    after another, each with its own data order; prediction M plain passes.

    Attributes:
        members: How many.
        start: "reset" initialises every member anew; "perturbed" adds noise to the given weights; "network" starts
            each from the given weights as they are.
        perturb_std: Standard deviation of the noise of "perturbed", relative to each tensor's root mean square.
        seed: Of the initialisations.
    """

    name = "deep-ensemble"
    trains_draws = False
    trains_together = True

    members: int = 5
    start: Start = "reset"
    perturb_std: float = 0.1
    seed: int = 0
    epochs: int = 30
    lr: float = 0.05
    weight_decay: float = 5e-4
    schedule: Schedule = "cosine"

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.members < 1:
            raise ValueError(f"An ensemble needs at least one member, but members={self.members}.")

    @classmethod
    def example(cls) -> DeepEnsemble:
        """Return an ensemble that is trained for few epochs."""
        return cls(members=5, epochs=15)

    def build(self, network: nn.Module, selection: Selection) -> tuple[MemberLaw, Conversion]:
        """Give each member its own copy of the wanted parameters and of batch normalisation's statistics."""
        names, table = select_parameters(network, selection, how=f"{self.members} members, start={self.start!r}")
        require_something(table, network, "DeepEnsemble", "parameters that are not frozen")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            members = [start_member(network, names, self.start, self.perturb_std) for _ in range(self.members)]
        return MemberLaw(network, [PointLaw(network, own) for own in members]), table

    def objective(self, posterior: Posterior, inputs: Any, targets: Any, num_data: int) -> LossTerms:
        """Return the present member's loss, or the mean over members when none is chosen."""
        plain = super().objective
        return member_losses(posterior, lambda _: plain(posterior, inputs, targets, num_data))

    def stages(self, posterior: Posterior) -> list[Stage]:
        """Return one stage for each member."""
        return member_stages(posterior)


def start_member(network: nn.Module, names: list[str], start: Start, perturb_std: float) -> dict[str, Tensor]:
    """Return the tensors that a member, or a chain, begins with: parameters and batch-normalisation statistics."""
    buffers = {name: network.get_buffer(name).clone() for name in statistics_names(network)}
    weights = {name: network.get_parameter(name).detach().clone() for name in names}
    if start == "perturbed":
        for weight in weights.values():
            scale = perturb_std * weight.square().mean().sqrt()
            weight.add_(torch.randn_like(weight) * scale)
    if start == "reset":
        weights, buffers = _initialised(network, names, list(buffers))
    return {**{name: nn.Parameter(w) for name, w in weights.items()}, **buffers}


def _initialised(
    network: nn.Module, names: list[str], buffers: list[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return new values as the modules' own `reset_parameters` draws them; the network keeps its own."""
    kept = {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
    owners = {name.rpartition(".")[0] for name in [*names, *buffers]}
    try:
        for owner in sorted(owners):
            module = network.get_submodule(owner)
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if not callable(reset):
                raise ValueError(
                    f"Module {owner or '(network)'!r} ({type(module).__name__}) has parameters but no "
                    "reset_parameters(), so new members cannot be initialised. Make the members yourself, "
                    "bayesify.ensemble([make_network() for _ in range(5)]), or use DeepEnsemble(start='perturbed')."
                )
            reset()
        weights = {name: network.get_parameter(name).detach().clone() for name in names}
        return weights, {name: network.get_buffer(name).clone() for name in buffers}
    finally:
        network.load_state_dict(kept)
