"""The table of layer types: what methods and predictors have to know of each."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from torch import nn

__all__ = [
    "DropoutLayer",
    "Family",
    "LayerType",
    "LinearLayer",
    "NormLayer",
    "layer_type",
    "layer_types",
    "register_by_old_name",
    "register_type",
]

Family = Literal[
    "linear",
    "convolution",
    "transposed convolution",
    "embedding",
    "batch norm",
    "instance norm",
    "group norm",
    "layer norm",
    "rms norm",
]


@dataclass(frozen=True)
class DropoutLayer:
    """A layer that drops parts of its input at a rate `p`, an attribute of its.

    Attributes:
        channel_dim: None drops entries; a dimension drops whole slices along it.
        alpha: Keep mean zero and variance one behind SELU, as `nn.AlphaDropout` does.
    """

    channel_dim: int | None = None
    alpha: bool = False


@dataclass(frozen=True)
class NormLayer:
    """A layer that normalises, and returns gamma xhat + beta; beta is its `bias`.

    Attributes:
        channel_dim: The dimension of the output along which the scale varies; None takes the last ones, as many as
            the layer's `normalized_shape` has.
        before: The name of a submodule that takes the normalised and scaled output, for layers that also apply an
            activation; None where it is the layer's own output.
        scales: Whether gamma is its `weight` and nothing else, so that another weight is another scale.
    """

    channel_dim: int | None = None
    before: str | None = None
    scales: bool = False


@dataclass(frozen=True)
class LinearLayer:
    """A layer whose output is linear in its input and in its `weight`.

    Attributes:
        dim: The dimension of its activation that holds features or channels.
        weight_dim: The weight's dimension that runs over them: 0 or 1.
        side: Whether that activation is the input, or, of tables that are looked up in, the output.
    """

    dim: int = -1
    weight_dim: int = 1
    side: Literal["input", "output"] = "input"

    def __post_init__(self) -> None:
        """Check the dimension."""
        if self.weight_dim not in (0, 1):
            raise ValueError(
                f"weight_dim is the first (0) or the second (1) dimension of the weight, not {self.weight_dim}."
            )


@dataclass(frozen=True)
class LayerType:
    """What is known of a type of layer; nothing, where no field is set.

    Attributes:
        family: Which of torch's layers it computes the same as, with the same attributes: what its gradients for each
            example are, and how it runs with noise for each.
        dropout: How it drops, if it does.
        norm: How it normalises, if it does.
        linear: How it multiplies its input, if it does.
        batched: Whether several sets of its weights run as one batched product, faster than one after another.
    """

    family: Family | None = None
    dropout: DropoutLayer | None = None
    norm: NormLayer | None = None
    linear: LinearLayer | None = None
    batched: bool = False


def layer_type(layer: nn.Module | type[Any]) -> LayerType:
    """Return what is known of a layer, or of a type, by exactly its type; of other packages' by package and name.

    >>> layer_type(nn.GroupNorm).norm
    NormLayer(channel_dim=1, before=None, scales=True)
    >>> layer_type(nn.ReLU()) == LayerType()
    True
    """
    kind = layer if isinstance(layer, type) else type(layer)
    if kind in _TYPES:
        return _TYPES[kind]
    package, name = kind.__module__.partition(".")[0], kind.__name__
    for (owner, pattern), found in _NAMES.items():
        if package == owner and (name == pattern or (pattern[0] == "*" and name.endswith(pattern[1:]))):
            return found
    return LayerType()


def layer_types() -> Mapping[type[nn.Module], LayerType]:
    """Return the table of all types that are matched by themselves."""
    return MappingProxyType(_TYPES)


def register_type(
    kind: type[nn.Module], *facts: DropoutLayer | NormLayer | LinearLayer, like: type[nn.Module] | None = None
) -> None:
    """Make a type of layer known, to every method and predictor.

    Types are matched exactly: a subclass may compute something else, so that it is registered by itself.

    Args:
        kind: The type.
        facts: What it is: one or more of `DropoutLayer` (for `MCDropout`), `NormLayer` (for `ABNN`) and `LinearLayer`
            (for `IBNN`), from `bayesify.layers`.
        like: A known type that computes the same from the same attributes, as `nn.Linear` does what a subclass with
            another initialisation does. Everything that is known of it holds then.

    Example:
        >>> class Scale(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
        ...
        ...     def forward(self, x):
        ...         return self.weight * x / x.norm(dim=-1, keepdim=True) + self.bias
        >>> class Quick(nn.Linear):
        ...     pass
        >>> import bayesify, torch
        >>> bayesify.register_type(Scale, bayesify.layers.NormLayer())
        >>> bayesify.register_type(Quick, like=nn.Linear)
        >>> bayesify.convert(nn.Sequential(Quick(3, 4), Scale()), bayesify.ABNN()).conversion.converted
        ('1',)
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"register_type takes a type of module, such as nn.LayerNorm, not {kind!r}.")
    known = layer_type(kind if like is None else like)
    if like is not None and known == LayerType():
        raise ValueError(f"Nothing is known of {like.__name__}, so no other type can be like it. Say what it is.")
    if like is None and not facts:
        raise ValueError(
            f"Say what {kind.__name__} is: register_type({kind.__name__}, like=nn.LayerNorm), or by a DropoutLayer, "
            "NormLayer or LinearLayer."
        )
    fields = {DropoutLayer: "dropout", NormLayer: "norm", LinearLayer: "linear"}
    changes: dict[str, Any] = {fields[type(fact)]: fact for fact in facts}
    _TYPES[kind] = replace(known, **changes)


def register_by_old_name(old: str, kind: type[nn.Module], fact: DropoutLayer | NormLayer | LinearLayer) -> None:
    """Do the same for a caller who used one of the names that this had before, and say so."""
    warnings.warn(
        f"{old} will go in the next version. Use bayesify.register_type({kind.__name__}, {fact}), with "
        f"{type(fact).__name__} from bayesify.layers.",
        DeprecationWarning,
        stacklevel=3,
    )
    register_type(kind, fact)


_LAST, _CHANNELS = NormLayer(scales=True), NormLayer(1, scales=True)


def _convolution(dims: int, family: Family, weight_dim: int) -> LayerType:
    return LayerType(family, linear=LinearLayer(-dims - 1, weight_dim))


_TYPES: dict[type[nn.Module], LayerType] = {
    nn.Linear: LayerType("linear", linear=LinearLayer(), batched=True),
    nn.Embedding: LayerType("embedding", linear=LinearLayer(side="output")),
    nn.Conv1d: _convolution(1, "convolution", 1),
    nn.Conv2d: _convolution(2, "convolution", 1),
    nn.Conv3d: _convolution(3, "convolution", 1),
    nn.ConvTranspose1d: _convolution(1, "transposed convolution", 0),
    nn.ConvTranspose2d: _convolution(2, "transposed convolution", 0),
    nn.ConvTranspose3d: _convolution(3, "transposed convolution", 0),
    nn.BatchNorm1d: LayerType("batch norm", norm=_CHANNELS, batched=True),
    # Vectorised convolutions are grouped ones, slower than one after another: what follows them need not be batched.
    nn.BatchNorm2d: LayerType("batch norm", norm=_CHANNELS),
    nn.BatchNorm3d: LayerType("batch norm", norm=_CHANNELS),
    nn.SyncBatchNorm: LayerType(norm=_CHANNELS),
    nn.InstanceNorm1d: LayerType("instance norm", norm=_CHANNELS),
    nn.InstanceNorm2d: LayerType("instance norm", norm=_CHANNELS),
    nn.InstanceNorm3d: LayerType("instance norm", norm=_CHANNELS),
    nn.GroupNorm: LayerType("group norm", norm=_CHANNELS),
    nn.LayerNorm: LayerType("layer norm", norm=_LAST, batched=True),
    nn.RMSNorm: LayerType("rms norm", norm=_LAST),
    nn.Dropout: LayerType(dropout=DropoutLayer()),
    nn.Dropout1d: LayerType(dropout=DropoutLayer(1)),
    nn.Dropout2d: LayerType(dropout=DropoutLayer(1)),
    nn.Dropout3d: LayerType(dropout=DropoutLayer(1)),
    nn.AlphaDropout: LayerType(dropout=DropoutLayer(alpha=True)),
    nn.FeatureAlphaDropout: LayerType(dropout=DropoutLayer(1, alpha=True)),
}

# By package and name, so that nothing is imported that the user has not. A star stands for any beginning.
_FEATURES_ONLY, _CHANNELS_ONLY = LayerType(norm=NormLayer()), LayerType(norm=NormLayer(1))
_FEATURES_INSIDE, _CHANNELS_INSIDE = (LayerType(norm=NormLayer(dim, before="drop")) for dim in (None, 1))
_NAMES: dict[tuple[str, str], LayerType] = {
    ("transformers", "Conv1D"): LayerType(linear=LinearLayer(-1, 0)),
    ("transformers", "*RMSNorm"): _FEATURES_ONLY,
    **{
        ("transformers", f"{name}LayerNorm"): _FEATURES_ONLY  # the root mean square under another name
        for name in ("T5", "UMT5", "Pix2Struct", "Pop2Piano", "SwitchTransformers", "Udop")
    },
    **{("torchvision", name): _CHANNELS_ONLY for name in ("LayerNorm2d", "FrozenBatchNorm2d")},
    ("timm", "Linear"): LayerType("linear", linear=LinearLayer(), batched=True),  # torch's, but for scripts
    **{("timm", name): _FEATURES_ONLY for name in ("LayerNorm", "LayerNormFp32", "RmsNorm", "RmsNormFp32")},
    **{
        ("timm", name): _CHANNELS_ONLY
        for name in ("GroupNorm", "GroupNorm1", "LayerNorm2d", "LayerNorm2dFp32", "RmsNorm2d", "RmsNorm2dFp32")
    },
    **{
        ("timm", name): _CHANNELS_INSIDE
        for name in ("BatchNormAct2d", "GroupNormAct", "GroupNorm1Act", "LayerNormAct2d", "LayerNormAct2dFp32")
    },
    **{("timm", name): _FEATURES_INSIDE for name in ("LayerNormAct", "LayerNormActFp32")},
}
