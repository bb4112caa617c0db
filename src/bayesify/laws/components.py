"""Laws as Gaussians, for predictions without draws: what is random in a component of a mixture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn

from bayesify.laws.kronecker import Rotated
from bayesify.laws.passes import BatchDim, Pass, Patch, Refusal
from bayesify.laws.trace import Trace

__all__ = ["Component", "Dense", "NoiseTerms", "NoisySite"]


@dataclass(frozen=True)
class NoiseTerms:
    """A noisy layer in one line: y = scale x + (std_scale x + std_shift) e, with e of mean zero and variance one.

    Attributes:
        scale: Multiplies the input.
        std_scale: Multiplies the input in the standard deviation.
        std_shift: Is added there; a tensor that broadcasts against the input, or a number.
        channel_dims: The dimensions along which e varies, beside the batch; None if each entry has its own.
    """

    scale: float
    std_scale: float
    std_shift: Tensor | float = 0.0
    channel_dims: tuple[int, ...] | None = None


class NoisySite:
    """A place in a network where activations meet noise.

    Subclasses say where (`around`), and which noise (`act` in a pass, `terms` without draws).

    Attributes:
        name: The layer's name.
    """

    name: str

    @property
    def by_position(self) -> bool:
        """Whether a draw has other noise at each position of a text."""
        return False

    @property
    def scales_weight(self) -> bool:
        """Whether a draw of the noise is another `weight` of the layer, and nothing else."""
        return False

    def around(self, network: nn.Module, act: Callable[..., Tensor]) -> tuple[nn.Module, Callable[..., Any]]:
        """Return a module, and a forward of it in which `act` is applied to the activation that meets noise.

        `act(x, *more)` gets the tensors that `terms` needs beside the activation.
        """
        raise NotImplementedError

    def act(self, p: Pass, x: Tensor, *more: Any) -> Tensor:
        """Let an activation meet the noise of a pass."""
        raise NotImplementedError

    def terms(self, x: Tensor, *more: Any) -> NoiseTerms:
        """Return the noise that an activation meets, in one line."""
        raise NotImplementedError

    def in_pass(self, network: nn.Module, p: Pass) -> tuple[nn.Module, Callable[..., Any]]:
        """Return a module, and its forward in a pass with noise."""
        return self.around(network, partial(self.act, p))

    def at_mean(self, network: nn.Module) -> tuple[nn.Module, Callable[..., Any]] | None:
        """Return a module, and its forward without noise, where that is not the module's own."""
        del network
        return None

    def batch(self, p: Pass) -> BatchDim | None:
        """Return where the batch is in the activation of the present call; None where that is unknown."""
        raise NotImplementedError

    def batches(self, trace: Trace) -> list[BatchDim | None]:
        """Return where the batch is in the activation of each call."""
        raise NotImplementedError

    def again(self, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return the arguments of the layer with new noise, where it is alike when it runs again; else None."""
        del args
        return None

    def rescaled(self, factor: float) -> NoisySite | Refusal:
        """Return the place with noise whose standard deviation, relative to the activation, is a factor times this."""
        del factor
        return Refusal(f"The noise at {self.name!r} has no width that could be changed.")

    def scaled(self, p: Pass, gamma: Tensor) -> Tensor | None:
        """Return a scale with the noise of each of the pass's draws in it, (S, ...); None where noise is not such."""
        del p, gamma
        return None


Place = Callable[[Mapping[str, Tensor]], Patch]


@dataclass(frozen=True)
class Dense:
    """One linear layer that comes last, with the whole covariance of its weights.

    Attributes:
        layer: Its name.
        gaussian: Returns mean, and variance or covariance, of the network's outputs, for the mean network's outputs
            and the layer's inputs (B, T, D).
    """

    layer: str
    gaussian: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None, Tensor | None]]


@dataclass(frozen=True)
class Component:
    """A Gaussian of a mixture: some of the network's tensors are Gaussians, and some layers are noisy.

    Attributes:
        means: Means of the random tensors, by their names in the network.
        variances: Their variances, entry by entry.
        fixed: Tensors that take the place of the network's own without being random.
        noisy: The places with noise.
        place: Makes a patch of the random tensors by name, where they do not simply take the places of the network's.
        rotated: Which of the random tensors have correlated entries, and how; all others are independent.
        columns: Directions (K, *tensor) in which all random tensors move together, w = mean + std z + sum_k u_k
            columns_k with one standard normal u_k for all of them; for every random tensor, or none.
        dense: The only random layer, where it comes last, with its whole covariance.
        weight: The component's share of the mixture, in proportion to the others'.
        part: Which part of a mixture it is of, as the first number of a draw's path says.
    """

    means: dict[str, Tensor] = field(default_factory=dict)
    variances: dict[str, Tensor] = field(default_factory=dict)
    fixed: dict[str, Tensor] = field(default_factory=dict)
    noisy: tuple[NoisySite, ...] = ()
    place: Place | None = None
    rotated: tuple[Rotated, ...] = ()
    columns: dict[str, Tensor] = field(default_factory=dict)
    dense: Dense | None = None
    weight: float = 1.0
    part: int = 0

    def patch(
        self, network: nn.Module, tensors: Mapping[str, Tensor], act: Callable[[NoisySite], Callable[..., Tensor]]
    ) -> Patch:
        """Return what a pass on these tensors, in the place of the means, puts into the network.

        Args:
            network: The network.
            tensors: What stands for the random tensors, by name.
            act: What an activation meets at a noisy place.
        """
        made = Patch(tensors) if self.place is None else self.place(tensors)
        forwards = dict(site.around(network, act(site)) for site in self.noisy)
        return Patch({**self.fixed, **made.tensors}, {**made.forwards, **forwards})

    def at_mean(self, network: nn.Module) -> Patch:
        """Return what a pass at the mean of tensors and noise puts into the network."""
        return self.patch(network, self.means, _mean_of_noise)

    def scaled(self, scales: Mapping[str, float]) -> Component:
        """Return the component with some tensors' variances multiplied by numbers."""
        variances = {name: v * scales.get(name, 1.0) for name, v in self.variances.items()}
        rotated = tuple(one.scaled(scales.get(one.weight, 1.0)) for one in self.rotated)
        columns = {name: column * scales.get(name, 1.0) ** 0.5 for name, column in self.columns.items()}
        return replace(self, variances=variances, rotated=rotated, columns=columns)

    @cached_property
    def rotations(self) -> dict[str, Rotated]:
        """Return what makes each correlated tensor, by the tensors' names."""
        return {name: one for one in self.rotated for name in one.names}


def _mean_of_noise(site: NoisySite) -> Callable[..., Tensor]:
    def act(x: Tensor, *more: Any) -> Tensor:
        scale = site.terms(x, *more).scale
        return x if scale == 1 else scale * x

    return act
