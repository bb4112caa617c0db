"""Which variances a linearised pass is asked for: of every output, of a margin, or of where logits move most."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.laws import Component
from bayesify.likelihoods import Likelihood
from bayesify.prediction.linearised.linearisation import LinearisedPass
from bayesify.prediction.outputs import independent_variances

__all__ = ["Head", "all_variances", "margin_variances", "principal_variances"]

STEPS = 10  # of power iteration; any direction will do, and the widest is the best


def all_variances(found: LinearisedPass, likelihood: Likelihood) -> Tensor:
    """Return the variance of every output, by one backward pass each; of logits, after centring over classes.

    Softmax does not see a shift of all logits, so that the variance of centred logits is what counts, and it depends on
    covariances that single logits' variances do not show. It is returned as that of independent logits.
    """
    outputs = found.outputs
    classes = likelihood.softmax_dim(outputs.ndim)
    event = outputs.shape[1:]
    columns = list(_basis(event, None if classes is None else classes % outputs.ndim - 1, outputs))
    values = []
    for index, column in enumerate(columns):
        values.append(found.variance(column.expand_as(outputs), last=index == len(columns) - 1))
    variance = torch.stack(values, -1).view(outputs.shape[0], *event)
    if classes is None:
        return variance
    return independent_variances(variance.movedim(classes, -1)).movedim(-1, classes)


def _basis(event: torch.Size, classes: int | None, like: Tensor) -> Iterator[Tensor]:
    """Yield the function of an example's outputs that picks each of them, or each centred logit."""
    for index in range(event.numel()):
        column = torch.zeros(event, dtype=like.dtype, device=like.device)
        column.view(-1)[index] = 1
        yield column if classes is None else column - column.mean(classes, keepdim=True)


def margin_variances(found: LinearisedPass, likelihood: Likelihood) -> Tensor:
    """Return logits' variances from one backward pass: equal for all classes, right for the top two's difference.

    With independent logits of variance v, the difference of two has 2 v. Regression with one output is exact.
    """
    outputs = found.outputs
    if likelihood.softmax_dim(outputs.ndim) is None:
        return found.variance(torch.ones_like(outputs), last=True).view(-1, *(1,) * (outputs.ndim - 1))
    top = outputs.topk(2, -1).indices
    margin = torch.zeros_like(outputs).scatter_(1, top[:, :1], 1.0).scatter_(1, top[:, 1:], -1.0)
    return (found.variance(margin, last=True) / 2)[:, None].expand_as(outputs)


# -- through what the last linear layer tells of the logits' covariance ----------------------------------------------


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


def principal_variances(found: LinearisedPass, component: Component, head: Head) -> Tensor:
    """Return logits' variances from the exact variance of one function of them.

    Logits z = W h + b have the covariance W S W' + L, S the features' and L what W and b themselves cause, which is
    known. A feature is the noisier the larger it is: S is taken as k diag |h|. The number k comes from the exact
    first-order variance of d.z, d being the direction in which W diag |h| W' is widest, with W centred over classes.
    Exact for two classes, where there is one direction alone.
    """
    assert head.features is not None
    h = head.features
    random = [name for name in ("weight", "bias") if _is_own(component, head, name)]
    tensors = {**component.fixed, **component.means} if "weight" in random else component.fixed
    weight = tensors.get(f"{head.name}.weight", head.module.weight).detach()
    centred = weight - weight.mean(0)
    size = h.abs()
    size = torch.where(size.amax(-1, keepdim=True) > 0, size, 1)
    top = torch.zeros_like(found.outputs).scatter_(1, found.outputs.argmax(-1, keepdim=True), 1)
    direction = top - 1 / top.shape[-1]
    for _ in range(STEPS):
        direction = nn.functional.normalize(((direction @ centred) * size) @ centred.mT, dim=-1)
    whole = found.variance(direction, last=True)
    own, along = _own(component, head, random, direction)
    rest = (whole - along).clamp_min(0)
    shape = ((direction @ centred).square() * size).sum(-1)
    scale = rest / shape.clamp_min(torch.finfo(shape.dtype).tiny)
    return own + independent_variances(scale[:, None] * (size @ centred.square().mT))


def _own(component: Component, head: Head, random: list[str], direction: Tensor) -> tuple[Tensor, Tensor]:
    """Return L, as variances of independent logits, and d' L d."""
    h = head.features
    assert h is not None
    rotated = component.rotations.get(f"{head.name}.weight")
    if rotated is not None:  # L = V_B diag(q) V_B'
        met = nn.functional.linear(h, rotated.kernel(head.module.weight.shape), rotated.offset)
        left, inner = rotated.left[0], rotated.inner(met.square())[..., 0, :]
        centred = (left - left.mean(0)).square()
        return independent_variances(inner @ centred.mT), ((direction @ left).square() * inner).sum(-1)
    own = torch.zeros_like(direction)
    if "weight" in random:
        own = own + h.square() @ component.variances[f"{head.name}.weight"].mT
    if "bias" in random:
        own = own + component.variances[f"{head.name}.bias"]
    return own, (direction.square() * own).sum(-1)


def _is_own(component: Component, head: Head, name: str) -> bool:
    """Return whether a tensor of the layer is random itself."""
    found, own = component.variances.get(f"{head.name}.{name}"), getattr(head.module, name)
    return found is not None and own is not None and found.shape == own.shape
