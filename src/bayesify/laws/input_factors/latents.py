"""Which inputs of a layer have a factor, and how the factors fold into its weight."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from bayesify.layers import LinearLayer, layer_type, register_by_old_name

__all__ = ["Latent", "Layer", "find_layers", "is_attention", "register_layer", "why_not"]

Shape = tuple[int, ...]
Side = Literal["input", "output"]


@dataclass(frozen=True)
class Latent:
    """The factors z of one parameter: W = U diag(z).

    Attributes:
        parameter: The name of U in the network.
        size: How many factors there are.
        start: Where they are in the vector of all of them.
        parameter_view: The shape in which U and z are multiplied.
        factor_view: The shape of z in that product.
    """

    parameter: str
    size: int
    start: int
    parameter_view: Shape
    factor_view: Shape

    @property
    def span(self) -> slice:
        """Return where the factors are in the vector of all of them."""
        return slice(self.start, self.start + self.size)

    def fold(self, parameter: Tensor, factors: Tensor) -> Tensor:
        """Return U diag(z) for the vector of all factors."""
        own = factors[self.span].to(parameter.device).view(self.factor_view)
        folded = parameter.reshape(self.parameter_view) * own
        return folded.reshape(parameter.shape).to(parameter.dtype)


@dataclass(frozen=True)
class Layer:
    """A module whose inputs have factors.

    Attributes:
        name: Its name in the network.
        weights: The latents of its weight; of attention, those of query, key and value, or one that holds all three.
        bias: The latent of its bias, one factor for all of it.
        output: The latent of an attention's output projection.
        output_bias: The latent of that projection's bias.
        dim: The dimension of the activation along which the factors vary.
        side: Whether that is the layer's input, or, for embeddings, its output.
    """

    name: str
    weights: tuple[Latent, ...] = ()
    bias: Latent | None = None
    output: Latent | None = None
    output_bias: Latent | None = None
    dim: int = -1
    side: Side = "input"


def register_layer(kind: type[nn.Module], *, dim: int = -1, weight_dim: int = 1) -> None:
    """Make a type of layer known; `bayesify.register_type` is its name now."""
    register_by_old_name("register_layer", kind, LinearLayer(dim, weight_dim))


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is torch's attention, which reads its output projection without calling it."""
    return type(module) is nn.MultiheadAttention


def why_not(module: nn.Module, *, in_attention: bool) -> str | None:
    """Return why the inputs of a module have no factors; None where they can have."""
    if is_attention(module) or in_attention:
        return None
    if layer_type(module).linear is None:
        if isinstance(module, nn.Linear | nn.Embedding | nn.modules.conv._ConvNd):
            return f"{type(module).__name__} is not registered; if it is linear, add it with bayesify.register_type"
        return "not a linear layer, a convolution, an embedding or attention"
    if module._parameters.get("weight") is None:
        return "its weight is computed from other parameters"
    return None


def find_layers(network: nn.Module, names: Iterable[str], *, bias: bool) -> tuple[list[Layer], list[Latent]]:
    """Lay out the factors of the named modules in one vector.

    Modules that share a weight share its factors, so that the weight has one value in a draw.

    Args:
        network: The network.
        names: Modules for which `why_not` gives nothing.
        bias: Whether the biases have factors too.

    Returns:
        The layers that act in a pass, and the latents in the order of the vector.
    """
    names = list(names)
    made = _Latents(network)
    layers: dict[str, dict[str, Any]] = {}
    projections = {id(m.out_proj): n for n, m in network.named_modules() if isinstance(m, nn.MultiheadAttention)}
    for name in names:
        module = network.get_submodule(name)
        if id(module) in projections:
            found = layers.setdefault(projections[id(module)], {})
            found["output"] = made.columns(name, "weight")
            found["output_bias"] = made.scalar(name, "bias") if bias else None
        elif isinstance(module, nn.MultiheadAttention):
            layers.setdefault(name, {})["weights"] = made.attention(name, module)
        else:
            kind = layer_type(module).linear
            assert kind is not None
            rows = getattr(module, "groups", 1) if kind.weight_dim == 1 else None
            weight = made.rows(name, "weight") if rows is None else made.columns(name, "weight", groups=rows)
            own = made.scalar(name, "bias") if bias and kind.side == "input" else None
            layers[name] = {"weights": (weight,), "bias": own, "dim": kind.dim, "side": kind.side}
    return [Layer(name, **found) for name, found in layers.items()], list(made.by_parameter.values())


class _Latents:
    """Latents by parameter, one after the other."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.by_parameter: dict[int, Latent] = {}
        self.size = 0

    def columns(self, owner: str, name: str, groups: int = 1) -> Latent:
        """Return one factor for each input of a weight (O, I / groups, ...)."""
        weight = self._parameter(owner, name)
        outputs, inputs = weight.shape[:2]
        view = (groups, outputs // groups, inputs, weight[0, 0].numel())
        return self._latent(owner, name, groups * inputs, view, (groups, 1, inputs, 1))

    def rows(self, owner: str, name: str) -> Latent:
        """Return one factor for each input of a weight (I, ...)."""
        weight = self._parameter(owner, name)
        return self._latent(owner, name, len(weight), (len(weight), weight[0].numel()), (len(weight), 1))

    def scalar(self, owner: str, name: str) -> Latent | None:
        """Return one factor for a whole bias, if there is one."""
        found = self.network.get_submodule(owner)._parameters.get(name)
        return None if found is None else self._latent(owner, name, 1, (found.numel(),), (1,))

    def attention(self, name: str, module: nn.MultiheadAttention) -> tuple[Latent, ...]:
        """Return factors for the inputs of query, key and value, each its own."""
        if module.in_proj_weight is None:
            return tuple(self.columns(name, f"{which}_proj_weight") for which in "qkv")
        width = module.embed_dim
        return (self._latent(name, "in_proj_weight", 3 * width, (3, width, width), (3, 1, width)),)

    def _parameter(self, owner: str, name: str) -> Tensor:
        return self.network.get_parameter(f"{owner}.{name}" if owner else name)

    def _latent(self, owner: str, name: str, size: int, view: Shape, factors: Shape) -> Latent:
        parameter = self._parameter(owner, name)
        latent = Latent(f"{owner}.{name}" if owner else name, size, self.size, view, factors)
        known = self.by_parameter.setdefault(id(parameter), latent)
        if known is latent:
            self.size += size
        elif known.factor_view != factors or known.parameter_view != view:
            raise ValueError(
                f"{latent.parameter!r} and {known.parameter!r} are one weight that two layers use in different ways: "
                "it has no columns of its own. Exclude both layers."
            )
        return known
