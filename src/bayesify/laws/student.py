"""Outputs whose variance the network says itself: one pass has a distribution over functions' outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayesify._core.random import keyed_numbers
from bayesify.laws.components import Component, Dense
from bayesify.laws.law import Law, Rescaling, register_law
from bayesify.laws.passes import Pass, Patch
from bayesify.laws.trace import Trace

__all__ = ["StudentLaw"]


@register_law
class StudentLaw(Law):
    """Gaussian outputs f(x) + s(x) o e, e ~ N(0, I), with ln s(x)^2 = A phi(x) + a.

    f is the network and phi(x) what its last linear layer sees, so that mean and variance take one plain pass and one
    more product with a matrix of the last layer's size. A draw is the function of one e, the same for every input.
    Predictions without draws are closed forms: what likelihoods make of Gaussian outputs.

    Args:
        network: The network.
        layer: The name of its last linear layer, whose output is the network's.
        std: s at the start, for every input.

    Attributes:
        head: phi to ln s^2.
    """

    name = "student"
    settings: ClassVar[dict[str, Any]] = {"layer": str, "names": list[str]}

    def __init__(self, network: nn.Module, *, layer: str, std: float = 0.3) -> None:
        super().__init__(network)
        module = network.get_submodule(layer)
        if not isinstance(module, nn.Linear):
            raise ValueError(
                f"A student has its variances from the inputs of the last linear layer, and {layer!r} is a "
                f"{type(module).__name__}. Name a linear layer whose output is the network's."
            )
        self.layer = layer
        weight = module.weight
        self.head = nn.Linear(module.in_features, module.out_features, device=weight.device, dtype=weight.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.constant_(self.head.bias, 2 * math.log(std))

    def sites(self) -> set[nn.Module]:
        """Return the last linear layer."""
        return {self.network.get_submodule(self.layer)}

    def variance(self, features: Tensor) -> Tensor:
        """Return s(x)^2, (..., C), for what the last layer sees, (..., D)."""
        made: Tensor = self.head(features)
        return made.exp()

    def independent_rows(self, trace: Trace | None) -> bool:
        """Return that a fresh pass draws for each row."""
        del trace
        return True

    def patch(self, p: Pass) -> Patch:
        """Return a last layer whose output has noise."""
        own = self.own.as_dict()
        if p.kind == "mean":
            return Patch(own)
        module = self.network.get_submodule(self.layer)
        forward = module.forward

        def noisy(*args: Any, **kwargs: Any) -> Tensor:
            output: Tensor = forward(*args, **kwargs)
            std = self.variance(args[0] if args else kwargs["input"]).sqrt()
            size = output.shape[-1:]
            noise = keyed_numbers(p.keys[0], self.layer, size, std) if p.keys else torch.randn_like(std)
            return output + std * noise.to(std.dtype)

        return Patch(own, {module: noisy})

    def components(self, trace: Trace | None = None) -> list[Component]:
        """Return one component, whose outputs are Gaussian."""
        del trace
        return [Component(fixed=self.own.as_dict(), dense=Dense(self.layer, self.output_gaussian))]

    @torch.no_grad()
    def output_gaussian(self, output: Tensor, features: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return mean and variance of the outputs.

        Args:
            output: Of the mean network.
            features: The last layer's inputs, (B, T, D).
        """
        return output, self.variance(features).reshape(output.shape), None

    def rescaling(self) -> Rescaling:
        """Return what multiplies s."""
        before = self.head.bias.detach().clone()

        def rescale(factor: float) -> None:
            with torch.no_grad():
                self.head.bias.copy_(before if factor == 1 else before + 2 * math.log(factor))

        return rescale

    def config(self) -> dict[str, Any]:
        """Return the settings."""
        return {"layer": self.layer, "names": []}

    @classmethod
    def build(cls, network: nn.Module, config: Mapping[str, Any]) -> StudentLaw:
        """Make room for the head."""
        return cls(network, layer=config["layer"])

    def described(self) -> str:
        """Return what the law is called in sentences."""
        return "A student"
