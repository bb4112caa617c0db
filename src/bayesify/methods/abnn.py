"""ABNN: noise in normalisation layers, and members that differ in their parameters."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from bayesify.laws import (
    LossTerms,
    MemberLaw,
    NoiseShape,
    NoisyLayerLaw,
    NormSite,
    Posterior,
    tracking_norms,
)
from bayesify.layers import NormLayer, layer_type, register_by_old_name
from bayesify.methods.method import Method, Stage, member_losses, member_stages, register
from bayesify.methods.random_weights import draw_eta, eta_of_classes, eta_of_examples
from bayesify.selection import Conversion, Selection, require_something, select_modules

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
        draws_per_member: The number L of draws of each in a prediction, if the caller does not say.
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
    trains_together = True
    renamed: ClassVar[dict[str, str]] = {**Method.renamed, "samples": "draws_per_member"}

    members: int = 3
    draws_per_member: int = 3
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
        if self.members < 1 or self.draws_per_member < 1:
            raise ValueError(
                f"ABNN needs members and samples, but members={self.members}, draws_per_member={self.draws_per_member}."
            )
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
    def retrained(cls, members: int = 3, **settings: Any) -> ABNN:
        """Return members that train all parameters at training rates, with statistics of their own.

        Costs a training and a network's memory for each.

        Args:
            members: M.
            settings: Others than these.

        Example:
            >>> ABNN.retrained(2).train
            'all'
        """
        chosen: dict[str, Any] = {
            "train": "all", "statistics": "updated", "lr": 0.05, "schedule": "cosine", "epochs": 8, "alpha": 0.02,
            "draws_per_member": 1,
        }  # fmt: skip
        return cls(members=members, **{**chosen, **settings})

    @classmethod
    def register_type(cls, kind: type[nn.Module], *, channel_dim: int | None = None, before: str | None = None) -> None:
        """Make a type known; the name is old, see `bayesify.register_type`."""
        register_by_old_name("ABNN.register_type", kind, NormLayer(channel_dim, before))

    # -- building -------------------------------------------------------------------------------------------

    def build(self, network: nn.Module, selection: Selection) -> tuple[MemberLaw, Conversion]:
        """Put noise behind the wanted layers and give each member its own tensors."""
        table = self._table(network, selection)
        places = [self._site(network, name) for name in table.converted]
        names = self._trained(network, table)
        buffers = self._statistics(network)
        members = [self._member(network, names, buffers) for _ in range(self.members)]
        network.requires_grad_(False)  # its own values are what the members start from, and nobody trains them
        keep = self.statistics == "frozen"
        traced: frozenset[Any] = frozenset({"draw", "fresh"})  # noise for each example has to know the batch
        parts = [NoisyLayerLaw(network, places, own=own, keep_statistics=keep, traced=traced) for own in members]
        law = MemberLaw(network, parts)
        law.default_draws = self.members * self.draws_per_member
        return law, table

    def state(self, posterior: Posterior) -> nn.Module:
        """Return room for the members' weights of classes, which the first loss draws."""
        like = next((p for p in posterior.network.parameters() if p.is_floating_point()), torch.empty(0))
        return ClassWeights(like.new_zeros(len(cast(MemberLaw, posterior.law).parts), 0).detach())

    def _site(self, network: nn.Module, name: str) -> NormSite:
        layer = network.get_submodule(name)
        kind = layer_type(layer).norm
        assert kind is not None
        dims: tuple[int, ...] = (kind.channel_dim,) if kind.channel_dim is not None else ()
        dims = dims or tuple(range(-len(getattr(layer, "normalized_shape", (1,))), 0))
        scales = kind.scales and getattr(layer, "weight", None) is not None
        return NormSite(name, self.alpha, self.noise, dims, kind.before, scales)

    def _table(self, network: nn.Module, selection: Selection) -> Conversion:
        def decide(name: str, module: nn.Module) -> tuple[bool, str] | None:
            del name
            if layer_type(module).norm is not None:
                return True, f"noise with alpha={self.alpha:g} per {self.noise}"
            reason = _reason(module)
            return None if reason is None else (False, reason)

        found = select_modules(network, decide, selection)
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
        self, posterior: Posterior, member: int, output: Tensor, inputs: Any, targets: Tensor, nll: Tensor
    ) -> Tensor:
        found = eta_of_classes(posterior.likelihood, output, targets)
        if found is None:
            examples = targets if self.weights_from == "targets" else (inputs, targets)
            eta = eta_of_examples(examples, len(targets), self.seed, member)
            return eta.to(nll.dtype).reshape(-1, *(1,) * (nll.ndim - 1))
        labels, classes = found
        weights = self.learning(posterior)
        if weights.eta.shape[1] == 0:
            weights.eta = draw_eta(self, len(cast(MemberLaw, posterior.law).parts), classes).to(weights.eta)
        if weights.eta.shape[1] != classes:
            raise ValueError(
                f"The members' weights are of {weights.eta.shape[1]} classes, and now there are {classes}. Convert "
                "the network anew for another likelihood."
            )
        found_eta: Tensor = weights.eta[member].to(nll.dtype)[labels]
        return found_eta

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
    def join(cls, posteriors: Sequence[Posterior]) -> Posterior:
        """Make one posterior of several of one network, so that members can be trained in processes of their own.

        Args:
            posteriors: From one network and one configuration but for `seed` and `members`.

        Returns:
            A posterior with all members; the parts are left untouched.
        """
        if not posteriors or not all(isinstance(part.method, ABNN) for part in posteriors):
            raise ValueError("join needs posteriors that ABNN made, at least one.")
        shared = [part.network.state_dict() for part in posteriors]
        settings = [dataclasses.replace(part.method, members=1, seed=0) for part in posteriors]  # type: ignore[type-var]
        for state, setting in zip(shared, settings, strict=True):
            same = state.keys() == shared[0].keys() and all(torch.equal(t, shared[0][n]) for n, t in state.items())
            if not same or setting != settings[0]:
                raise ValueError("These posteriors are not of one network, or were not fitted with one configuration.")
        joined = copy.deepcopy(posteriors[0])
        parts = cast(MemberLaw, joined.law).laws
        for part in posteriors[1:]:
            memo = {id(part.network): joined.network}
            parts += [copy.deepcopy(own, memo) for own in cast(MemberLaw, part.law).laws]
        joined.law = MemberLaw(joined.network, parts)
        joined.law.condition(joined.likelihood)
        joined.law.default_draws = sum(part.default_draws for part in posteriors)
        joined.method = dataclasses.replace(joined.method, members=len(parts))  # type: ignore[type-var]
        known = [part.learning.eta for part in posteriors if isinstance(part.learning, ClassWeights)]
        whole = len(known) == len(posteriors) and len({eta.shape[1] for eta in known}) == 1
        joined.learning = ClassWeights(torch.cat(known)) if whole else None
        return joined


class ClassWeights(nn.Module):
    """How much more each class counts for each member.

    Attributes:
        eta: (M, C); (M, 0) before the first loss says C.
    """

    eta: Tensor

    def __init__(self, eta: Tensor) -> None:
        super().__init__()
        self.register_buffer("eta", eta)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        found = state_dict.get(f"{prefix}eta")
        if found is not None and found.ndim == 2 and len(found) == len(self.eta):
            self.eta = self.eta.new_zeros(found.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _reason(module: nn.Module) -> str | None:
    if next(module.children(), None) is None and "norm" in type(module).__name__.lower():
        return f"{type(module).__name__} is not registered; if it normalises, add it with bayesify.register_type"
    return "not a normalisation layer" if next(module.parameters(recurse=False), None) is not None else None
