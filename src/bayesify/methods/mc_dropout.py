"""Monte Carlo dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from bayesify.conversion import (
    Conversion,
    ConversionRow,
    Selection,
    replace_modules,
    require_something,
)
from bayesify.laws import AlphaDropoutNoise, DropoutNoise, Noise, NoisePosterior
from bayesify.methods.method import Method, register

__all__ = ["MCDropout"]

_LINEAR = (nn.Linear,)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_FEW_CHANNELS = 8  # an image's colours are not features
_DROPOUTS: dict[type[nn.Module], tuple[type[DropoutNoise], int | None]] = {
    nn.Dropout: (DropoutNoise, None),
    nn.Dropout1d: (DropoutNoise, 1),
    nn.Dropout2d: (DropoutNoise, 1),
    nn.Dropout3d: (DropoutNoise, 1),
    nn.AlphaDropout: (AlphaDropoutNoise, None),
    nn.FeatureAlphaDropout: (AlphaDropoutNoise, 1),
}


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
    """

    name = "mc-dropout"

    p: float | None = None
    insert_before: Literal["linear", "conv", "all"] | None = None

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.p is not None and not 0 <= self.p <= 1:
            raise ValueError(f"p is the probability to drop, between 0 and 1, but it is {self.p}.")
        if self.insert_before is not None and self.p is None:
            raise ValueError("insert_before needs a rate: MCDropout(p=0.1, insert_before=...).")

    @classmethod
    def example(cls) -> MCDropout:
        """Return a configuration for networks without dropout."""
        return cls(p=0.2, insert_before="all", epochs=5)

    @classmethod
    def register_type(cls, kind: type[nn.Module], *, channel_dim: int | None = None) -> None:
        """Convert modules of another type, which must have a rate `p`, like `nn.Dropout`.

        Args:
            kind: The exact type.
            channel_dim: None drops entries; a dimension drops whole slices along it.
        """
        _DROPOUTS[kind] = (DropoutNoise, channel_dim)

    def build(self, network: nn.Module, selection: Selection) -> NoisePosterior:
        """Replace dropout layers, and put new ones where asked."""
        noise = Noise()

        def decide(name: str, module: nn.Module) -> nn.Module | str | None:
            if type(module) in _DROPOUTS:
                kind, channel_dim = _DROPOUTS[type(module)]
                rate = module.p if self.p is None else self.p
                layer = kind(float(rate), noise, name, channel_dim=channel_dim)  # type: ignore[arg-type]
                layer.conversion_note = f"masks with p={float(rate):g}"  # type: ignore[arg-type, assignment]
                return layer
            if self._wants(module):
                if isinstance(module, _CONVOLUTIONS) and module.in_channels < _FEW_CHANNELS:
                    return f"{module.in_channels} input channels are too few to drop whole ones"
                return f"input masks with p={self.p:g}"  # becomes a row; the layer itself stays
            return _reason(module)

        network, table = replace_modules(network, decide, selection)
        rows = []
        for row in table.rows:
            module = network.get_submodule(row.name) if not row.converted else None
            if module is not None and self._wants(module) and row.reason.startswith("input masks"):
                self._insert(module, row.name, noise)
                row = ConversionRow(row.name, row.type, row.parameters, True, row.reason)
            rows.append(row)
        table = Conversion(tuple(rows))
        require_something(
            table,
            network,
            "MCDropout",
            "dropout layers; networks without them can be given some with MCDropout(p=0.1, insert_before='linear'), or "
            "use SWAG or DeepEnsemble",
        )
        posterior = NoisePosterior(network, self)
        posterior.noise = noise
        posterior.conversion = table
        return posterior

    def _wants(self, module: nn.Module) -> bool:
        kinds: tuple[type[nn.Module], ...] = ()
        if self.insert_before in ("linear", "all"):
            kinds += _LINEAR
        if self.insert_before in ("conv", "all"):
            kinds += _CONVOLUTIONS
        return type(module) in kinds

    def _insert(self, module: nn.Module, name: str, noise: Noise) -> None:
        assert self.p is not None
        channel_dim = None if isinstance(module, _LINEAR) else 1
        module.add_module("input_dropout", DropoutNoise(self.p, noise, f"{name}#input", channel_dim=channel_dim))
        module.register_forward_pre_hook(_drop_input)


def _drop_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (module.get_submodule("input_dropout")(args[0]), *args[1:])


def _reason(module: nn.Module) -> str | None:
    inner = getattr(module, "dropout", None)
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase) and inner:
        return f"its own dropout of {inner:g} is inside a fused kernel, and stays off"
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return f"{type(module).__name__} is not registered; add it with MCDropout.register_type"
    return "not a dropout layer" if next(module.parameters(recurse=False), None) is not None else None
