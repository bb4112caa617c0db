"""Noise in normalisation layers as the random part of a network."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bayesify.laws.noise import Noise, NoiseTerms

__all__ = ["NoiseShape", "NormKind", "NormNoise", "attach_noise", "detach_noise", "norm_kind", "register_norm"]

NoiseShape = Literal["sample-channel", "element", "channel"]


@dataclass(frozen=True)
class NormKind:
    """What has to be known of a type of normalisation layer.

    Attributes:
        channel_dim: The dimension of the output along which the scale varies; None takes the last ones, as many as
            the layer's `normalized_shape` has.
        before: The name of a submodule that takes the normalised and scaled output, for layers that also apply an
            activation; None where it is the layer's own output.
    """

    channel_dim: int | None
    before: str | None = None


_FEATURES = NormKind(None)
_CHANNELS = NormKind(1)
_KINDS: dict[type[nn.Module], NormKind] = {
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm), _FEATURES),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm), _CHANNELS),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _CHANNELS),
}
_OWN = set(_KINDS)  # whose output is known to be weight xhat + bias
# By package and name, so that nothing is imported that the user has not. A star stands for any beginning.
_KNOWN: dict[tuple[str, str], NormKind] = {
    ("transformers", "*RMSNorm"): _FEATURES,
    **{
        ("transformers", f"{name}LayerNorm"): _FEATURES  # without a mean: the root mean square under another name
        for name in ("T5", "UMT5", "Pix2Struct", "Pop2Piano", "SwitchTransformers", "Udop")
    },
    **{("torchvision", name): _CHANNELS for name in ("LayerNorm2d", "FrozenBatchNorm2d")},
    **{("timm", name): _FEATURES for name in ("LayerNorm", "LayerNormFp32", "RmsNorm", "RmsNormFp32")},
    **{
        ("timm", name): _CHANNELS
        for name in ("GroupNorm", "GroupNorm1", "LayerNorm2d", "LayerNorm2dFp32", "RmsNorm2d", "RmsNorm2dFp32")
    },
    **{
        ("timm", name): NormKind(1, before="drop")
        for name in ("BatchNormAct2d", "GroupNormAct", "GroupNorm1Act", "LayerNormAct2d", "LayerNormAct2dFp32")
    },
    **{("timm", name): NormKind(None, before="drop") for name in ("LayerNormAct", "LayerNormActFp32")},
}


def norm_kind(kind: type[nn.Module]) -> NormKind | None:
    """Return what is known of a type, or None where it is no known normalisation layer.

    >>> norm_kind(nn.GroupNorm).channel_dim, norm_kind(nn.Linear)
    (1, None)
    """
    if kind in _KINDS:
        return _KINDS[kind]
    package, name = kind.__module__.partition(".")[0], kind.__name__
    for (owner, pattern), found in _KNOWN.items():
        if package == owner and (name == pattern or (pattern[0] == "*" and name.endswith(pattern[1:]))):
            return found
    return None


def register_norm(kind: type[nn.Module], found: NormKind) -> None:
    """Make a type of normalisation layer known."""
    _KINDS[kind] = found


class NormNoise(nn.Module):
    """Noise on what a normalisation layer scaled: u = gamma (1 + alpha eps) xhat + beta, eps ~ N(0, 1).

    Computed from the layer's own output y = gamma xhat + beta as u = y (1 + alpha eps) - alpha eps beta: a scale and a
    shift. A draw has one eps for all examples, so with noise per channel it is the network with the scales
    gamma (1 + alpha eps), and torch's own layers are run with those where a draw is evaluated by itself: at the cost of
    a plain pass. A fresh pass has eps for each example, or with "channel" for the batch.

    Args:
        alpha: The standard deviation of the noise.
        noise: The posterior's noise.
        site: The layer's name.
        shape: "sample-channel" and "channel" have one eps for each channel, "element" one for each number.
        channel_dims: The dimensions along which gamma varies.
    """

    def __init__(
        self, alpha: float, noise: Noise, site: str, *, shape: NoiseShape, channel_dims: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.alpha = alpha
        self.noise = noise
        self.site = site
        self.shape = shape
        self.channel_dims = channel_dims
        self.kept: list[nn.Parameter] = []  # gamma, while the layer has another

    def forward(self, y: Tensor, beta: Tensor | None) -> Tensor:
        """Add noise to a normalised output; beta is the layer's shift."""
        if self.alpha == 0:
            return y
        return self.noise.perturb(
            y,
            partial(self._combine, self._aligned(beta, y.ndim)),
            site=self.site,
            law="normal",
            channel_dim=None if self.shape == "element" else self.channel_dims,
            per_example=self.shape != "channel",
        )

    def noise_terms(self, y: Tensor, beta: Tensor | None) -> NoiseTerms:
        """Return u = y + alpha (y - beta) e."""
        beta = self._aligned(beta, y.ndim)
        shift = 0.0 if beta is None else -self.alpha * beta
        return NoiseTerms(1.0, self.alpha, shift, None if self.shape == "element" else self.channel_dims)

    def _aligned(self, beta: Tensor | None, ndim: int) -> Tensor | None:
        if beta is not None and self.channel_dims == (1,):
            return beta.reshape(-1, *(1,) * (ndim - 2))
        return beta

    def scaled(self, gamma: Tensor) -> Tensor | None:
        """Return gamma (1 + alpha eps) where one draw is evaluated by itself, else None."""
        if self.alpha == 0 or self.shape == "element":
            return None
        wide = torch.promote_types(gamma.dtype, torch.float32)
        eps = self.noise.alone(self.site, list(gamma.shape), "normal", gamma)
        return None if eps is None else (gamma * (1 + self.alpha * eps.to(wide))).to(gamma.dtype)

    def _combine(self, beta: Tensor | None, y: Tensor, eps: Tensor) -> Tensor:
        # One plus a small number has no room for it in half precision.
        wide = torch.promote_types(y.dtype, torch.float32)
        scaled = self.alpha * eps.to(wide)
        # Two operations with one broadcast factor each: torch's fused ones (lerp, addcmul) are several times slower. A
        # norm's output is its own, so without gradients it is changed in place: new memory would cost more than that.
        fits = y.dtype == wide and all(e in (1, s) for e, s in zip(eps.shape, y.shape, strict=True))
        u = y * (1 + scaled) if torch.is_grad_enabled() or not fits else y.mul_(1 + scaled)
        if beta is not None:
            u = u.sub_(scaled * beta.to(wide))
        return u.to(y.dtype)

    def extra_repr(self) -> str:
        """Show the scale and the shape."""
        return f"alpha={self.alpha}, {self.shape}"


def attach_noise(module: nn.Module, kind: NormKind, alpha: float, noise: Noise, site: str, shape: NoiseShape) -> None:
    """Put noise behind a normalisation layer, which stays as it is: its tensors keep their names."""
    dims: tuple[int, ...] = (kind.channel_dim,) if kind.channel_dim is not None else (-1,)
    if kind.channel_dim is None:
        dims = tuple(range(-len(getattr(module, "normalized_shape", (1,))), 0))
    module.add_module("output_noise", NormNoise(alpha, noise, site, shape=shape, channel_dims=dims))
    if type(module) in _OWN and getattr(module, "weight", None) is not None:
        module.register_forward_pre_hook(_scale)
        module.register_forward_hook(_after_scale, always_call=True)
    elif kind.before is None:
        module.register_forward_hook(_after)
    else:
        module.get_submodule(kind.before).register_forward_pre_hook(partial(_inside, module))


def detach_noise(module: nn.Module) -> bool:
    """Take the noise away again where it is a scale of the layer's own; return whether the module has none then."""
    noise = module._modules.get("output_noise")
    if not isinstance(noise, NormNoise):
        return True
    own = [key for key, hook in module._forward_pre_hooks.items() if hook is _scale]
    if noise.alpha != 0 and (noise.shape == "element" or not own):
        return False
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook in (_scale, _after_scale, _after)]:
            del hooks[key]
            module._forward_hooks_always_called.pop(key, None)
    del module._modules["output_noise"]
    return True


def _scale(module: nn.Module, args: Any) -> None:
    del args
    noise = module.get_submodule("output_noise")
    assert isinstance(noise, NormNoise)
    gamma = module._parameters["weight"]
    assert gamma is not None
    scaled = noise.scaled(gamma)
    if scaled is not None:
        noise.kept.append(gamma)
        module._parameters["weight"] = scaled  # type: ignore[assignment]


def _after_scale(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
    noise = module.get_submodule("output_noise")
    assert isinstance(noise, NormNoise)
    if noise.kept:
        module._parameters["weight"] = noise.kept.pop()
        return None
    return None if output is None else _after(module, args, output)  # None: the layer raised an error


def _after(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    del args
    return _noisy(module, output)


def _inside(norm: nn.Module, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    del module
    return (_noisy(norm, args[0]),)


def _noisy(module: nn.Module, output: Tensor) -> Tensor:
    noisy: Tensor = module.get_submodule("output_noise")(output, getattr(module, "bias", None))
    return noisy
