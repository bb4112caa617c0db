"""ABNN: noise in normalisation layers, and members that differ in their parameters."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bayesify.conversion import Conversion, ConversionRow, Selection, replace_modules, require_something
from bayesify.laws import (
    LossTerms,
    Noise,
    NoiseShape,
    NormKind,
    NormMembersPosterior,
    Posterior,
    attach_noise,
    norm_kind,
    register_norm,
    tracking_norms,
)
from bayesify.methods.member_stages import member_losses, member_stages
from bayesify.methods.method import Method, Stage, register
from bayesify.methods.random_weights import draw_eta, eta_of_classes, eta_of_examples

__all__ = ["ABNN"]

_OTHERS = "BayesAdapter, MCDropout(p=0.1, insert_before='linear'), SWAG or DeepEnsemble"


@register
@dataclass(frozen=True, kw_only=True)
class ABNN(Method):
    """Noise in the normalisation layers of M members that start from one network (Franchi et al. 2024).

    A normalisation layer's gamma xhat + beta becomes gamma (1 + alpha eps) xhat + beta, eps ~ N(0, 1), in training
    and in prediction. A member minimises (1/n) sum_i -(1 + eta_{class i}) ln p(y_i | x_i) with weight decay as the
    prior, where eta, drawn once for each member, is positive for some classes: what makes members differ. Only
    normalisation parameters are trained, so the network is stored once, and a step costs no weight gradients.
    Prediction averages M members times L draws of the noise, a plain pass each.

    Attributes:
        members: The number M of members.
        samples: The number L of draws of each in a prediction, if the caller does not say.
        alpha: The standard deviation of the noise; at 0 a layer's output is the original's bit for bit.
        noise: One eps for each example and channel ("sample-channel"), for each number ("element", as the authors'
            code), or for each channel and pass ("channel"). In a draw, which is one function for all
            examples, the first and the last are the same.
        train: "norm" trains the parameters of the converted layers; "all" everything, at a full copy per member.
        statistics: "frozen" normalises with the running statistics in training too and keeps them: members then train
            on the function that they predict with. "updated" does what `train()` does, for each member on its own.
        eta: What is added to the weight of a member's classes; 0 gives every class the weight 1. For likelihoods
            without classes any positive value gives each example a random weight ~ Exp(1): the weighted
            likelihood bootstrap, which is ours and not the paper's.
        weights_from: What such a weight is a function of, so that an example keeps it: its inputs and target, the
            "examples"; or the "targets" alone, for inputs that are augmented, and so never come twice. Examples with
            the same target then share a weight, which is no bootstrap where targets repeat.
        eta_classes: How many classes get it, for each member; None takes the square root of their number.
        normalised: Divide by the sum of the weights in the batch instead of the number of examples.
        seed: Of eta.
    """

    name = "abnn"

    members: int = 3
    samples: int = 3
    alpha: float = 0.05
    noise: NoiseShape = "sample-channel"
    train: Literal["norm", "all"] = "norm"
    statistics: Literal["frozen", "updated"] = "frozen"
    eta: float = 1.0
    weights_from: Literal["examples", "targets"] = "examples"
    eta_classes: int | None = None
    normalised: bool = False
    seed: int = 0
    epochs: int = 2
    lr: float = 0.005
    weight_decay: float = 5e-4

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.members < 1 or self.samples < 1:
            raise ValueError(f"ABNN needs members and samples, but members={self.members}, samples={self.samples}.")
        if self.alpha < 0:
            raise ValueError(f"alpha is the standard deviation of the noise, but it is {self.alpha}.")
        if self.eta < 0:
            raise ValueError(f"eta is added to the weight of some classes: it cannot be negative, as {self.eta} is.")
        choices = {
            "noise": ("sample-channel", "element", "channel"),
            "train": ("norm", "all"),
            "statistics": ("frozen", "updated"),
            "weights_from": ("examples", "targets"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {list(allowed)}, but it is {getattr(self, name)!r}.")

    @classmethod
    def example(cls) -> ABNN:
        """Return a configuration that is quick on little data."""
        return cls(alpha=0.4, epochs=10, lr=0.01)

    @classmethod
    def register_type(cls, kind: type[nn.Module], *, channel_dim: int | None = None, before: str | None = None) -> None:
        """Convert normalisation layers of another type: ones that return gamma xhat + beta, beta called `bias`.

        Args:
            kind: The exact type.
            channel_dim: The dimension along which gamma varies; None takes the last.
            before: The name of a submodule that takes the scaled output, where an activation follows inside the layer.
        """
        register_norm(kind, NormKind(channel_dim, before))

    # -- building -------------------------------------------------------------------------------------------

    def build(self, network: nn.Module, selection: Selection) -> NormMembersPosterior:
        """Attach noise to the wanted layers and give each member its own tensors."""
        table = self._table(network, selection)
        noise = Noise()
        for name in table.converted:
            layer = network.get_submodule(name)
            kind = norm_kind(type(layer))
            assert kind is not None
            attach_noise(layer, kind, self.alpha, noise, name, self.noise)
        names = self._trained(network, table)
        buffers = self._statistics(network)
        members = [self._member(network, names, buffers) for _ in range(self.members)]
        network.requires_grad_(False)  # its own values are what the members start from, and nobody trains them
        posterior = NormMembersPosterior(
            network, members, self, noise=noise, keep_statistics=self.statistics == "frozen"
        )
        posterior.default_samples = self.members * self.samples
        posterior.conversion = table
        return posterior

    def _table(self, network: nn.Module, selection: Selection) -> Conversion:
        note = f"noise with alpha={self.alpha:g} per {self.noise}"

        def decide(name: str, module: nn.Module) -> str | None:
            del name
            return note if norm_kind(type(module)) is not None else _reason(module)

        _, table = replace_modules(network, decide, selection)
        rows = [ConversionRow(row.name, row.type, row.parameters, row.reason == note, row.reason) for row in table.rows]
        found = Conversion(tuple(rows))
        needs = f"normalisation layers. Networks without them can be converted with {_OTHERS}"
        require_something(found, network, "ABNN", needs)
        return found

    def _trained(self, network: nn.Module, table: Conversion) -> list[str]:
        free = {id(p): name for name, p in network.named_parameters() if p.requires_grad}
        if self.train == "all":
            return list(free.values())
        own = {id(p) for name in table.converted for p in network.get_submodule(name).parameters(recurse=False)}
        return [name for key, name in free.items() if key in own]

    def _statistics(self, network: nn.Module) -> list[str]:
        if self.statistics == "frozen":
            return []
        return [
            f"{name}.{key}" if name else key
            for name, norm in tracking_norms(network).items()
            for key, _ in norm.named_buffers(recurse=False)
        ]

    def _member(self, network: nn.Module, names: list[str], buffers: list[str]) -> dict[str, Tensor]:
        weights = {name: nn.Parameter(network.get_parameter(name).detach().clone()) for name in names}
        return {**weights, **{name: network.get_buffer(name).clone() for name in buffers}}

    # -- learning -------------------------------------------------------------------------------------------

    def objective(self, posterior: Posterior, inputs: Any, targets: Any, num_data: int) -> LossTerms:
        """Return the present member's loss, or the mean over members when none is chosen.

        The terms are mean CE and mean eta CE, whose sum is the mean of (1 + eta) CE.
        """
        del num_data
        return member_losses(posterior, lambda member: self._member_loss(posterior, member, inputs, targets))

    def _member_loss(self, posterior: Posterior, member: int, inputs: Any, targets: Tensor) -> LossTerms:
        assert isinstance(posterior, NormMembersPosterior)
        output = self.outputs(posterior, inputs)
        likelihood = posterior.likelihood
        if self.eta == 0:
            return LossTerms(nll=likelihood.nll(output, targets))
        likelihood.check(output, targets)
        nll = -likelihood.log_prob(output, targets)
        eta = self._eta(posterior, member, output, inputs, targets, nll)
        counted = likelihood.weight(targets)
        if counted is None:
            counted = torch.ones_like(nll)
        number = counted.sum() if not self.normalised else (counted * (1 + eta)).sum()
        number = number.clamp_min(torch.finfo(number.dtype).tiny if self.normalised else 1)
        return LossTerms(nll=(counted * nll).sum() / number, eta=(counted * eta * nll).sum() / number)

    def _eta(
        self, posterior: NormMembersPosterior, member: int, output: Tensor, inputs: Any, targets: Tensor, nll: Tensor
    ) -> Tensor:
        found = eta_of_classes(posterior.likelihood, output, targets)
        if found is None:
            examples = targets if self.weights_from == "targets" else (inputs, targets)
            eta = eta_of_examples(examples, len(targets), self.seed, member)
            return eta.to(nll.dtype).reshape(-1, *(1,) * (nll.ndim - 1))
        labels, classes = found
        if posterior.eta.shape[1] == 0:
            posterior.eta = draw_eta(self, len(posterior.members), classes).to(posterior.eta)
        if posterior.eta.shape[1] != classes:
            raise ValueError(
                f"The members' weights are of {posterior.eta.shape[1]} classes, and now there are {classes}. Convert "
                "the network anew for another likelihood."
            )
        return posterior.eta[member].to(nll.dtype)[labels]

    def stages(self, posterior: Posterior) -> list[Stage]:
        """Return one stage for each member."""
        stages = member_stages(posterior)
        if not any(parameter.requires_grad for stage in stages for parameter in stage.groups[0]["params"]):
            raise ValueError(
                "The converted normalisation layers have no parameters to train: they are affine-free, or frozen. Use "
                "ABNN(train='all'), or predict without fitting (epochs=0)."
            )
        return stages

    @classmethod
    def join(cls, posteriors: Sequence[Posterior]) -> NormMembersPosterior:
        """Make one posterior of several of one network, so that members can be trained in processes of their own.

        Args:
            posteriors: From one network and one configuration but for `seed` and `members`.

        Returns:
            A posterior with all members; the parts are left untouched.
        """
        parts = [part for part in posteriors if isinstance(part, NormMembersPosterior)]
        if not parts or len(parts) != len(posteriors):
            raise ValueError("join needs posteriors that ABNN made, at least one.")
        shared = [part.network.state_dict() for part in parts]
        settings = [dataclasses.replace(part.method, members=1, seed=0) for part in parts]  # type: ignore[call-arg]
        for part, state, setting in zip(parts, shared, settings, strict=True):
            same = state.keys() == shared[0].keys() and all(torch.equal(t, shared[0][n]) for n, t in state.items())
            if not same or setting != settings[0] or part.eta.shape[1] != parts[0].eta.shape[1]:
                raise ValueError("These posteriors are not of one network, or were not fitted with one configuration.")
        joined = copy.deepcopy(parts[0])
        for part in parts[1:]:
            joined.members.extend(copy.deepcopy(tree) for tree in part.members)
        joined.eta = torch.cat([part.eta for part in parts])
        joined.method = dataclasses.replace(joined.method, members=len(joined.members))  # type: ignore[call-arg]
        joined.default_samples = sum(part.default_samples for part in parts)
        return joined


def _reason(module: nn.Module) -> str | None:
    if next(module.children(), None) is None and "norm" in type(module).__name__.lower():
        return f"{type(module).__name__} is not registered; if it normalises, add it with ABNN.register_type"
    return "not a normalisation layer" if next(module.parameters(recurse=False), None) is not None else None
