"""Deep ensembles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from bayesify.laws import LossTerms, MemberLaw, PointLaw, Posterior, statistics_names, tracking_norms
from bayesify.methods.method import Method, Schedule, Stage, member_losses, member_stages, register, trained_members
from bayesify.methods.shared_trunk import all_outputs
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
        keep_network: Whether the given network is one more member, the first, as it is.
        share_trunk: Whether members have only the converted modules of their own, `convert(..., include=[...])`. All
            others are the trunk: not trained, with the statistics that its normalisation has, and computed once for
            all members, in prediction and in training, where all members then meet each batch together.
        seed: Of the initialisations.
    """

    name = "deep-ensemble"
    trains_draws = False
    trains_together = True

    members: int = 5
    start: Start = "reset"
    perturb_std: float = 0.1
    keep_network: bool = False
    share_trunk: bool = False
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

    @classmethod
    def restarts(cls, members: int = 3, **settings: Any) -> DeepEnsemble:
        """Return members that are trained on from the network at training rates, beside the network itself.

        A cosine from lr .1 leaves where the network was and comes down elsewhere. A restart is worth its pass once it
        is about as good as the network; give it augmentations that the network has not seen, so that there is
        something to learn.

        Args:
            members: How many restarts.
            settings: Others than these.

        Example:
            >>> DeepEnsemble.restarts(2).keep_network
            True
        """
        chosen: dict[str, Any] = {"start": "network", "keep_network": True, "epochs": 12, "lr": 0.1}
        return cls(members=members, **{**chosen, **settings})

    @classmethod
    def heads(cls, members: int = 3, **settings: Any) -> DeepEnsemble:
        """Return members that share a trunk: what `convert(..., include=[...])` names is reset and trained anew.

        Args:
            members: How many.
            settings: Others than these.

        Example:
            >>> from bayesify import convert
            >>> network = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
            >>> posterior = convert(network, DeepEnsemble.heads(2), include="2")
            >>> [sorted(part.own.as_dict()) for part in posterior.law.laws]
            [[], ['2.bias', '2.weight'], ['2.bias', '2.weight']]
        """
        chosen: dict[str, Any] = {"share_trunk": True, "keep_network": True, "epochs": 12, "lr": 0.1}
        return cls(members=members, **{**chosen, **settings})

    def build(self, network: nn.Module, selection: Selection) -> tuple[MemberLaw, Conversion]:
        """Give each member its own copy of the wanted parameters and of batch normalisation's statistics."""
        names, table = select_parameters(network, selection, how=f"{self.members} members, start={self.start!r}")
        require_something(table, network, "DeepEnsemble", "parameters that are not frozen")
        buffers, trunk = statistics_names(network), frozenset[str]()
        if self.share_trunk:
            trunk = _trunk_norms(network, table)
            buffers = [name for name in buffers if name.rpartition(".")[0] not in trunk]
            _freeze_trunk(network, names)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            members = [start_member(network, names, self.start, self.perturb_std, buffers) for _ in range(self.members)]
        kept = [PointLaw(network)] if self.keep_network else []
        law = MemberLaw(network, [*kept, *(PointLaw(network, own) for own in members)])
        law.keep_statistics = trunk
        return law, table

    def objective(self, posterior: Posterior, inputs: Any, targets: Any, num_data: int) -> LossTerms:
        """Return the present member's loss, or the mean over members when none is chosen."""
        plain = super().objective
        if not self.share_trunk or posterior.present_part is not None:
            return member_losses(posterior, lambda _: plain(posterior, inputs, targets, num_data))
        outputs = all_outputs(posterior, inputs, trained_members(posterior))
        losses = [self.terms(posterior, one, targets, num_data) for one in outputs]
        return LossTerms({name: torch.stack([terms[name] for terms in losses]).mean() for name in losses[0]})

    def stages(self, posterior: Posterior) -> list[Stage]:
        """Return one stage for each member; one for all of them where they share a trunk."""
        found = member_stages(posterior)
        if not self.share_trunk:
            return found
        shared = list(posterior.likelihood.parameters())
        own = [parameter for part in cast(MemberLaw, posterior.law).laws for parameter in part.parameters()]
        return [Stage(f"{len(found)} members", [{"params": [*own, *shared]}], members=len(found))]


def start_member(
    network: nn.Module, names: list[str], start: Start, perturb_std: float, buffers: list[str] | None = None
) -> dict[str, Tensor]:
    """Return the tensors that a member, or a chain, begins with: parameters and batch-normalisation statistics."""
    kept = statistics_names(network) if buffers is None else buffers
    values = {name: network.get_buffer(name).clone() for name in kept}
    weights = {name: network.get_parameter(name).detach().clone() for name in names}
    if start == "perturbed":
        for weight in weights.values():
            scale = perturb_std * weight.square().mean().sqrt()
            weight.add_(torch.randn_like(weight) * scale)
    if start == "reset":
        weights, values = _initialised(network, names, kept)
    return {**{name: nn.Parameter(w) for name, w in weights.items()}, **values}


def _trunk_norms(network: nn.Module, table: Conversion) -> frozenset[str]:
    """Return the normalisation layers that keep statistics and are no member's: without parameters, by their parent."""
    converted = table.converted

    def is_own(name: str, norm: nn.Module) -> bool:
        if next(norm.parameters(recurse=False), None) is not None:
            return name in converted
        parent = name.rpartition(".")[0]
        return bool(parent) and any(other.startswith(f"{parent}.") for other in converted)

    return frozenset(name for name, norm in tracking_norms(network).items() if not is_own(name, norm))


def _freeze_trunk(network: nn.Module, names: list[str]) -> None:
    trunk = [parameter for name, parameter in network.named_parameters() if name not in set(names)]
    if not trunk:
        children = ", ".join(
            f"{name} ({sum(p.numel() for p in child.parameters()):,})" for name, child in network.named_children()
        )
        raise ValueError(
            "share_trunk=True needs a trunk, and every module is to be the members' own. Say which they train, "
            f"convert(network, method, include=[...]), as a rule the last ones. There are (parameters): {children}."
        )
    for parameter in trunk:
        parameter.requires_grad_(False)


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
