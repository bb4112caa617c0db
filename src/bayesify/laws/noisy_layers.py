"""Layers that are noisy: dropout masks, noise in normalisation, noise on inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from bayesify._core.random import Key, Noise
from bayesify.laws.components import Component, NoisySite
from bayesify.laws.law import Rescaling
from bayesify.laws.noise_scale import ScaledNoise
from bayesify.laws.passes import Arranged, BatchDim, Kind, Pass, Patch, Refusal
from bayesify.laws.patching import forbid_fused_layers
from bayesify.laws.stacking import Stack, Stacking
from bayesify.laws.trace import Trace

__all__ = ["NoisyLayerLaw"]


class NoisyLayerLaw(ScaledNoise):
    """A network some of whose activations meet noise.

    A draw of it is a draw of every layer's noise, and one function for all examples. A fresh pass has noise for each.
    Several draws fold into one batch.

    Args:
        network: The network.
        places: Where the noise is.
        own: Tensors in which the law's network differs from the shared one.
        keep_statistics: Whether normalisation uses its running statistics in training too, and leaves them alone.
        traced: The kinds of passes in which noise has to know where the batch is.
    """

    name = "noisy-layers"
    stacks = True
    made = False

    def __init__(
        self,
        network: nn.Module,
        places: Sequence[NoisySite],
        *,
        own: Mapping[str, Tensor] | None = None,
        keep_statistics: bool = False,
        traced: frozenset[Kind] = frozenset({"draw"}),
    ) -> None:
        super().__init__(network, own)
        self._settings = tuple(places)
        self._scaled: tuple[Tensor, int, tuple[NoisySite, ...]] | None = None
        self._noise = Noise()
        self.keep_statistics = keep_statistics
        self.traced = traced
        forbid_fused_layers(network, self._noisy())

    @property
    def places(self) -> tuple[NoisySite, ...]:
        """Where the noise is, as wide as `noise_scale` makes it; found once for each value of that."""
        scale = self.noise_scale
        if scale is None:
            return self._settings
        if self._scaled is None or self._scaled[0] is not scale or self._scaled[1] != scale._version:
            factor = scale.item()
            wider = [place.rescaled(factor) for place in self._settings]
            self._scaled = (scale, scale._version, tuple(one for one in wider if not isinstance(one, Refusal)))
        return self._scaled[2]

    def rescaling(self) -> Rescaling | Refusal:
        """Return what rescales the noise of every place."""
        probe = [place.rescaled(2.0) for place in self.places]
        refused = [one for one in probe if isinstance(one, Refusal)]
        if refused:
            return refused[0]
        if all(one == place for one, place in zip(probe, self.places, strict=True)):
            return Refusal(
                "The rates of all dropout layers are 0 or 1, or alpha is 0, and no multiple differs. Convert anew."
            )
        return super().rescaling()

    def _noisy(self) -> set[nn.Module]:
        return {place.around(self.network, _unused)[0] for place in self.places}

    def sites(self) -> set[nn.Module]:
        """Return the noisy layers, and those that own a tensor of the law's."""
        return super().sites() | self._noisy()

    def together(self, trace: Trace | None) -> Arranged:
        """Return "stack" where draws are scales of layers.

        Else "rows", unless a layer mixes examples even in evaluation mode, or noise acts without a batch.
        """
        if self.stacking(trace) is not None:
            return "stack"
        norms = (m for m in self.network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
        if any(norm.running_mean is None for norm in norms):
            return "one"
        known = () if trace is None else [place.batches(trace) for place in self.places]
        return "one" if any(BatchDim(None) in batches for batches in known) else "rows"

    @property
    def continues(self) -> Literal[True] | Refusal:
        """True where noise is the same at every position."""
        found = next((place.name for place in self.places if place.by_position), None)
        if found is None:
            return True
        return Refusal(
            f"A draw has other noise at each position (as in {found!r}), which depends on where a pass begins, and a "
            "key-value cache goes on from another pass. Convert with noise that is the same at every position: "
            "MCDropout(masks='features'), ABNN(noise='sample-channel')."
        )

    def independent_rows(self, trace: Trace | None) -> bool:
        """Return True: fresh noise is drawn for each row."""
        del trace
        return True

    def patch(self, p: Pass) -> Patch:
        """Return the noisy layers' forwards."""
        if p.kind == "mean":
            forwards = dict(filter(None, (place.at_mean(self.network) for place in self.places)))
        else:
            forwards = dict(place.in_pass(self.network, p) for place in self.places)
        return Patch(self.own.as_dict(), forwards)

    def weights(self, key: Key) -> dict[str, Tensor] | Refusal:
        """Return a draw as weights, where all noise is in the scales of layers."""
        p = Pass("draw", (key,), rows=1)
        found = {**self.own.as_dict()}
        for place in self.places:
            name = f"{place.name}.weight".removeprefix(".")
            module = self.network.get_submodule(place.name)
            gamma = found.get(name, module._parameters.get("weight"))
            scaled = None if gamma is None else place.scaled(p, gamma)
            if scaled is None:
                return Refusal("its randomness is in layers, and not in the network's weights alone")
            found[name] = scaled[0].detach()
        return found

    # -- several draws, where each is other scales of layers ------------------------------------------------------

    def stacking(self, trace: Trace | None) -> Stacking | None:
        """Return how layers have several draws' scales, where noise is in these alone and a layer is called once."""
        if not all(place.scales_weight and self._scale_name(place) for place in self.places):
            return None
        if trace is not None and any(len(trace.calls.get(place.name, ())) != 1 for place in self.places):
            return None  # noise of its own in each call
        return super().stacking(trace)

    def varying(self) -> list[str]:
        """Return the names of the scales."""
        return [self._scale_name(place) for place in self.places]

    def stacked(self, keys: Sequence[Key]) -> dict[str, Stack]:
        """Return the scales of several draws by name."""
        p = Pass("draw", tuple(keys), rows=1, noise=self._noise)
        found: dict[str, Stack] = {}
        for place in self.places:
            name = self._scale_name(place)
            scaled = place.scaled(p, self.tensor(name))
            assert scaled is not None
            found[name] = scaled
        return found

    def _scale_name(self, place: NoisySite) -> str:
        """Return the name of a layer's scale; empty where it has none."""
        held = self.network.get_submodule(place.name)._parameters.get("weight")
        return "" if held is None else f"{place.name}.weight".removeprefix(".")

    def recomputed(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return the arguments with new masks, where noise differs between all entries.

        Checkpointing puts torch's generator back before, so that the masks are the same as in the pass.
        """
        for place in self.places:
            if place.around(self.network, _unused)[0] is module:
                return place.again(args)
        return None

    def components(self, trace: Trace | None = None) -> list[Component]:
        """Return one component, with noise and without random tensors."""
        del trace
        return [Component(fixed=self.own.as_dict(), noisy=self.places)]


def _unused(x: Tensor, *more: Any) -> Tensor:
    del more
    return x
