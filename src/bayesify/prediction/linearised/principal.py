"""The covariance of all logits from one backward pass, through what the last linear layer tells of its shape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayesify._core.trees import call, slice_rows
from bayesify.laws import Posterior
from bayesify.prediction.components import Component
from bayesify.prediction.linearised.linearisation import LinearisedPass
from bayesify.prediction.outputs import independent_variances

__all__ = ["Head", "look", "principal_variances"]

STEPS = 10  # of power iteration; any direction will do, and the widest is the best


@dataclass
class Head:
    """A linear layer z = W h + b whose outputs are the network's.

    Attributes:
        name: Where it is.
        module: The layer.
        features: Its input in the last pass, (B, D).
    """

    name: str
    module: nn.Linear
    features: Tensor | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note the input of the layer in the passes inside."""
        handle = self.module.register_forward_pre_hook(self._look)
        try:
            yield
        finally:
            handle.remove()

    def _look(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        del module
        self.features = args[0].detach()


def look(posterior: Posterior, law: Component, inputs: Any) -> tuple[Tensor, Head | None]:
    """Return the outputs for one example, and the linear layer that makes them, if there is one."""
    made: list[tuple[str, Any, Tensor]] = []
    handles = [
        module.register_forward_hook(lambda m, _, out, name=name: made.append((name, m, out)))
        for name, module in posterior.network.named_modules()
        if isinstance(module, nn.Linear)
    ]
    tensors = {**law.fixed, **law.means}
    try:
        with (
            posterior.noise.lock,
            posterior.noise.mode(silent=True),
            law.place(posterior.network, tensors),
            torch.no_grad(),
        ):
            outputs = posterior.read(call(posterior.network, slice_rows(inputs, 0, 1)))
    finally:
        for handle in handles:
            handle.remove()
    if not made or outputs.ndim != 2 or not torch.equal(made[-1][2], outputs):
        return outputs, None
    return outputs, Head(*made[-1][:2])


def principal_variances(found: LinearisedPass, law: Component, head: Head) -> Tensor:
    """Return logits' variances from the exact variance of one function of them.

    Logits z = W h + b have the covariance W S W' + L, S the features' and L what W and b themselves cause, which is
    known. A feature is the noisier the larger it is: S is taken as k diag |h|. The number k comes from the exact
    first-order variance of d.z, d being the direction in which W diag |h| W' is widest, with W centred over classes.
    Exact for two classes, where there is one direction alone.
    """
    assert head.features is not None
    h = head.features
    random = [name for name in ("weight", "bias") if _is_own(law, head, name)]
    tensors = {**law.fixed, **law.means} if "weight" in random else law.fixed
    weight = tensors.get(f"{head.name}.weight", head.module.weight).detach()
    centred = weight - weight.mean(0)
    size = h.abs()
    size = torch.where(size.amax(-1, keepdim=True) > 0, size, 1)
    top = torch.zeros_like(found.outputs).scatter_(1, found.outputs.argmax(-1, keepdim=True), 1)
    direction = top - 1 / top.shape[-1]
    for _ in range(STEPS):
        direction = nn.functional.normalize(((direction @ centred) * size) @ centred.mT, dim=-1)
    whole = found.variance(direction, last=True)
    own, along = _own(law, head, random, direction)
    rest = (whole - along).clamp_min(0)
    shape = ((direction @ centred).square() * size).sum(-1)
    scale = rest / shape.clamp_min(torch.finfo(shape.dtype).tiny)
    return own + independent_variances(scale[:, None] * (size @ centred.square().mT))


def _own(law: Component, head: Head, random: list[str], direction: Tensor) -> tuple[Tensor, Tensor]:
    """Return L, as variances of independent logits, and d' L d."""
    h = head.features
    assert h is not None
    rotated = law.rotations.get(f"{head.name}.weight")
    if rotated is not None:  # L = V_B diag(q) V_B'
        met = nn.functional.linear(h, rotated.kernel(head.module.weight.shape), rotated.offset)
        left, inner = rotated.left[0], rotated.inner(met.square())[..., 0, :]
        centred = (left - left.mean(0)).square()
        return independent_variances(inner @ centred.mT), ((direction @ left).square() * inner).sum(-1)
    own = torch.zeros_like(direction)
    if "weight" in random:
        own = own + h.square() @ law.variances[f"{head.name}.weight"].mT
    if "bias" in random:
        own = own + law.variances[f"{head.name}.bias"]
    return own, (direction.square() * own).sum(-1)


def _is_own(law: Component, head: Head, name: str) -> bool:
    """Return whether a tensor of the layer is random itself."""
    found, own = law.variances.get(f"{head.name}.{name}"), getattr(head.module, name)
    return found is not None and own is not None and found.shape == own.shape
