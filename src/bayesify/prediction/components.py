"""What is random in a posterior, as the predictors that need no draws have to know it.

A posterior is a mixture of components. In each, some of the network's tensors are Gaussians, independent or a rotation
of independent ones, and some layers are noisy. Another kind of posterior takes part by `gaussian_components.register`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, singledispatch

from torch import Tensor, nn

from bayesify.laws import (
    GaussianPosterior,
    InputMixturePosterior,
    KroneckerLaplacePosterior,
    MembersPosterior,
    MixturePosterior,
    NoisePosterior,
    PointPosterior,
    Posterior,
    SWAGPosterior,
)
from bayesify.laws.dropout import noisy_layers
from bayesify.laws.swap import find_slots, swapped
from bayesify.laws.tensors import tensor_of
from bayesify.prediction.kronecker import Rotated

__all__ = ["Component", "gaussian_components"]

Place = Callable[[nn.Module, Mapping[str, Tensor]], AbstractContextManager[None]]


@contextmanager
def _in_place(network: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    with swapped(find_slots(network, tensors), tensors):
        yield


@dataclass(frozen=True)
class Component:
    """One component of a posterior.

    Attributes:
        means: Means of the random tensors, by their names in the network.
        variances: Their variances, entry by entry.
        fixed: Tensors that take the place of the network's own without being random.
        noisy: The layers with noise of their own; each has `noise_terms`, see `NoiseTerms`.
        place: What lets the network meet the tensors for a while, by name; else they take the places of its own.
        rotated: Which of the random tensors have correlated entries, and how; all others are independent.
        weight: The component's share of the posterior, in proportion to the others'.
    """

    means: dict[str, Tensor] = field(default_factory=dict)
    variances: dict[str, Tensor] = field(default_factory=dict)
    fixed: dict[str, Tensor] = field(default_factory=dict)
    noisy: tuple[nn.Module, ...] = ()
    place: Place = _in_place
    rotated: tuple[Rotated, ...] = ()
    weight: float = 1.0

    def scaled(self, scales: Mapping[str, float]) -> Component:
        """Return the law with some tensors' variances multiplied by numbers."""
        variances = {name: v * scales.get(name, 1.0) for name, v in self.variances.items()}
        rotated = tuple(one.scaled(scales.get(one.weight, 1.0)) for one in self.rotated)
        return replace(self, variances=variances, rotated=rotated)

    @cached_property
    def rotations(self) -> dict[str, Rotated]:
        """Return what makes each correlated tensor, by the tensors' names."""
        return {name: one for one in self.rotated for name in one.names}


@singledispatch
def gaussian_components(posterior: Posterior) -> list[Component]:
    """Return the components of a posterior."""
    raise ValueError(
        f"The weights of a {type(posterior).__name__} are samples, or made by a network, and no Gaussians that can be "
        "carried through a network, so its predictions need draws: use how='sampling'. Samples of weights have means "
        "and variances that can be carried: distill(sample_bank(posterior, 100), 'swag', latent=0). Another kind of "
        "posterior is made known with bayesify.gaussian_components.register."
    )


@gaussian_components.register
def _(posterior: PointPosterior) -> list[Component]:
    return [Component()]


@gaussian_components.register
def _(posterior: GaussianPosterior) -> list[Component]:
    parameters = dict(posterior.network.named_parameters(remove_duplicate=False))
    log_stds = posterior.log_std.as_dict()
    means = {name: parameters[name].detach() for name in log_stds}
    variances = {name: (2 * log_std.detach()).exp().to(means[name].dtype) for name, log_std in log_stds.items()}
    return [Component(means, variances)]


@gaussian_components.register
def _(posterior: KroneckerLaplacePosterior) -> list[Component]:
    if not bool(posterior.complete):
        return [Component()]  # nothing is random before the data were seen
    names = set(posterior.names)
    means = {name: p.detach() for name, p in posterior.network.named_parameters() if name in names}
    variances = {name: posterior.variance(name).to(means[name].dtype) for name in posterior.curvature.as_dict()}
    rotated = []
    for weight, block in posterior.blocks.items():
        parts = (tensor_of(posterior.left, weight), tensor_of(posterior.right, weight), posterior.variance(weight))
        left, right, variance = (part.to(means[weight].dtype) for part in parts)
        rotated.append(Rotated(weight, block.bias, left, right, variance))
        variances |= rotated[-1].marginal(means[weight].shape)
    return [Component(means, {name: variances[name] for name in means}, rotated=tuple(rotated))]


@gaussian_components.register
def _(posterior: SWAGPosterior) -> list[Component]:
    if posterior.rank:
        raise ValueError(
            f"This SWAG posterior has weights that are correlated through {posterior.rank} deviations, and only draws "
            "know of that. Use how='sampling', or the diagonal alone: SWAG(rank=0)."
        )
    posterior.keys(None, 0)  # refuses stale statistics
    variances = posterior.codec.split(posterior.variance() * posterior.scale**2)
    return [Component(posterior.codec.split(posterior.average), variances, posterior.statistics_of(0))]


@gaussian_components.register
def _(posterior: MixturePosterior) -> list[Component]:
    if posterior.statistics.as_dict():
        raise ValueError(
            "The batch-normalisation statistics of a mixture belong to its draws, and its components have none. Use "
            "how='sampling'."
        )
    split, shares = posterior.codec.split, posterior.shares.tolist()
    parts = zip(posterior.means, posterior.stds.square(), shares, strict=True)
    return [Component(split(mean), split(variance), weight=share) for mean, variance, share in parts if share > 0]


@gaussian_components.register
def _(posterior: NoisePosterior) -> list[Component]:
    return [Component(noisy=_in_order(posterior.network))]


@gaussian_components.register
def _(posterior: MembersPosterior) -> list[Component]:
    if isinstance(posterior.network, Posterior):
        raise ValueError(
            "These members are posteriors themselves. Use how='sampling', or predict with each member's posterior."
        )
    noisy = _in_order(posterior.network)
    return [Component(fixed=posterior.member_tensors(member), noisy=noisy) for member in range(len(posterior.members))]


@gaussian_components.register
def _(posterior: InputMixturePosterior) -> list[Component]:
    means, variances = posterior.component_means.detach(), posterior.component_stds.detach().square()
    return [
        Component(posterior.by_parameter(one), posterior.by_parameter(other), place=posterior.multiplied)
        for one, other in zip(means, variances, strict=True)
    ]


def _in_order(network: nn.Module) -> tuple[nn.Module, ...]:
    noisy = noisy_layers(network)
    unknown = [type(module).__name__ for module in noisy if not hasattr(module, "noise_terms")]
    if unknown:
        raise ValueError(
            f"A noisy layer of type {unknown[0]} has no noise_terms, so that draws are needed: how='sampling'."
        )
    return tuple(module for module in network.modules() if module in noisy)
