"""Monte Carlo dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from bayesify.laws import DropoutSite, NoisyLayerLaw
from bayesify.layers import DropoutLayer, Family, layer_type, register_by_old_name
from bayesify.methods.method import Method, register
from bayesify.selection import Conversion, Selection, require_something, select_modules

__all__ = ["MCDropout"]

_FEW_CHANNELS = 8  # an image's colours are not features


@register
@dataclass(frozen=True, kw_only=True)
class MCDropout(Method):
    """Dropout masks as an approximate posterior (Gal and Ghahramani 2016).

    Only dropout layers are random, in training and in prediction: batch normalisation stays what `train()` and
    `eval()` make it. A draw costs a plain pass from the first dropout layer on; what lies before runs once.
    Dropout inside fused layers (attention weights of `nn.MultiheadAttention`, between layers of `nn.LSTM`) stays
    off, and the conversion table says so.

    Attributes:
        p: The rate of every layer; None keeps each layer's own.
        insert_before: Give layers without dropout one on their input: "linear" (entries), "conv" (whole channels,
            where there are at least 8) or "all". Needs `p`, and a network that was not trained so should be fitted
            for a few epochs.
        masks: "entries", as dropout layers do; or "features", one number for each feature, the same at every position
            of a text (Gal and Ghahramani 2016b, as in recurrent networks), so that a draw goes on from a key-value
            cache and is one function of texts of any length.
    """

    name = "mc-dropout"

    p: float | None = None
    insert_before: Literal["linear", "conv", "all"] | None = None
    masks: Literal["entries", "features"] = "entries"

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.p is not None and not 0 <= self.p <= 1:
            raise ValueError(f"p is the probability to drop, between 0 and 1, but it is {self.p}.")
        if self.insert_before is not None and self.p is None:
            raise ValueError("insert_before needs a rate: MCDropout(p=0.1, insert_before=...).")
        if self.masks not in ("entries", "features"):
            raise ValueError(f"masks are of 'entries' or 'features', but they are {self.masks!r}.")

    @classmethod
    def example(cls) -> MCDropout:
        """Return a configuration for networks without dropout."""
        return cls(p=0.2, insert_before="all", epochs=5)

    @classmethod
    def register_type(cls, kind: type[nn.Module], *, channel_dim: int | None = None) -> None:
        """Make a type known; the name is old, see `bayesify.register_type`."""
        register_by_old_name("MCDropout.register_type", kind, DropoutLayer(channel_dim))

    def build(self, network: nn.Module, selection: Selection) -> tuple[NoisyLayerLaw, Conversion]:
        """Let dropout layers drop, and others have their inputs dropped where asked."""

        def decide(name: str, module: nn.Module) -> tuple[bool, str] | None:
            del name
            found = layer_type(module)
            if found.dropout is not None:
                return True, f"masks with p={self._rate(module):g}"
            if self._wants(module):
                if found.family == "convolution" and module.in_channels < _FEW_CHANNELS:  # type: ignore[operator]
                    return False, f"{module.in_channels} input channels are too few to drop whole ones"
                return True, f"input masks with p={self.p:g}"
            reason = _reason(module)
            return None if reason is None else (False, reason)

        table = select_modules(network, decide, selection)
        require_something(
            table,
            network,
            "MCDropout",
            "dropout layers; networks without them can be given some with MCDropout(p=0.1, insert_before='linear'), or "
            "use SWAG or DeepEnsemble",
        )
        return NoisyLayerLaw(network, [self._site(network, name) for name in table.converted]), table

    def _rate(self, module: nn.Module) -> float:
        return float(module.p if self.p is None else self.p)  # type: ignore[arg-type]

    def _site(self, network: nn.Module, name: str) -> DropoutSite:
        module = network.get_submodule(name)
        found = layer_type(module)
        if found.dropout is not None:
            kind, rate, inserted = found.dropout, self._rate(module), False
        else:
            assert self.p is not None
            kind, rate, inserted = DropoutLayer(None if found.family == "linear" else 1), self.p, True
        features = self.masks == "features"
        return DropoutSite(name, rate, kind.channel_dim, kind.alpha, inserted=inserted, features=features)

    def _wants(self, module: nn.Module) -> bool:
        families: dict[str | None, tuple[Family, ...]] = {"linear": ("linear",), "conv": ("convolution",)}
        families["all"] = ("linear", "convolution")
        return layer_type(module).family in families.get(self.insert_before, ())


def _reason(module: nn.Module) -> str | None:
    inner = getattr(module, "dropout", None)
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase) and inner:
        return f"its own dropout of {inner:g} is inside a fused kernel, and stays off"
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return f"{type(module).__name__} is not registered; add it with bayesify.register_type"
    return "not a dropout layer" if next(module.parameters(recurse=False), None) is not None else None
