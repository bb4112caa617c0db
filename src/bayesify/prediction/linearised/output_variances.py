"""Which variances a linearised pass is asked for: of every output, of a margin, or of where logits move most."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.laws import Component
from bayesify.likelihoods import Likelihood
from bayesify.prediction.linearised.linearisation import LinearisedPass
from bayesify.prediction.outputs import independent_variances

__all__ = ["MOST_CLASSES", "Head", "all_variances", "margin_variances", "principal_moments"]

MOST_CLASSES = 64  # of which a covariance is formed
LITTLE = 1e-3
# r and w of `principal_moments`; docs/methods/streamlined.md says where they are from.
RIVALS = 0.05
TEN = 10  # classes, for which r and the one direction were chosen
WIDER = 1.1
FEWEST = 0.05  # of a class's variance is kept
TOGETHER = 10  # functions of the outputs at most share a backward pass
STEPS = 10  # of power iteration; any direction will do, and the widest is the best


def all_variances(found: LinearisedPass, likelihood: Likelihood) -> Tensor:
    """Return the variance of every output, by a backward pass for a few at a time; of logits, centred over classes.

    Softmax does not see a shift of all logits, so that the variance of centred logits is what counts, and it depends on
    covariances that single logits' variances do not show. It is returned as that of independent logits.
    """
    outputs = found.outputs
    classes = likelihood.softmax_dim(outputs.ndim)
    event = outputs.shape[1:]
    # A few functions at a time: all of them together would be as many numbers as there are outputs, squared.
    columns = _basis(event, None if classes is None else classes % outputs.ndim - 1, outputs)
    values, left = [], event.numel()
    while left:
        some = torch.stack(list(islice(columns, math.ceil(left / math.ceil(left / TOGETHER)))))
        left -= len(some)
        values.append(found.variances(some[:, None].expand(-1, *outputs.shape), last=not left))
    variance = torch.cat(values).mT.reshape(outputs.shape)
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


def principal_moments(
    found: LinearisedPass, component: Component, head: Head, directions: int = 1
) -> tuple[Tensor | None, Tensor | None]:
    """Return logits' variances, or their covariance, from the exact variance of a few functions of them.

    Logits z = W h + b have the covariance W S W' + L, S the features' and L what W and b themselves cause, which is
    known. A feature is the noisier the larger it is, and a trained network moves what it is unsure of more than the
    rest: the covariance is nearly k N + L with

        N = M / tr M + r F / tr F,    M = W diag |h| W',    F = diag p - p p',

    W centred over classes and p the probabilities at the mean. d_1, ..., d_K are orthonormal directions, and v_i the
    exact first-order variances of d_i.z without L. They are where logits move most, by a factor w more than N says, so
    that k = sum_i v_i / (w sum_i d_i' N d_i).

    Two logits decide what a prediction is unsure of, and all of them how far it moves. One direction is therefore the
    sum of the top two's difference and of where W W' is widest, of C > 10 classes (10 / C)^(1/2) times the latter.
    Several are the difference of the top two, where W W' is widest, and where M is, each orthogonal to those before.
    The covariance is k A N A + L with A = I + sum_i (a_i - 1) d_i d_i' and a_i^2 = v_i / (k d_i' N d_i), so that it has
    what was found in each of them.
    For two classes that is exact. With many classes variances alone are kept. Classes that are alike move together, and
    independent ones would disagree more: of the probable ones the variances are made smaller, or larger, so that the
    information is to first order that of the covariance, tr(F C) / 2.
    """
    assert head.features is not None
    h = head.features
    random = [name for name in ("weight", "bias") if _is_own(component, head, name)]
    tensors = {**component.fixed, **component.means} if "weight" in random else component.fixed
    weight = tensors.get(f"{head.name}.weight", head.module.weight).detach()
    centred = weight - weight.mean(0)
    size = h.abs()
    size = torch.where(size.amax(-1, keepdim=True) > 0, size, 1)
    number = min(directions, centred.shape[0] - 1)
    chosen = _directions(centred, size, found.outputs, number)
    shape = _Shape(centred, size, found.outputs)
    rests, spreads, own = [], [], torch.zeros_like(found.outputs)
    for index, direction in enumerate(chosen):
        whole = found.variance(direction, last=index == number - 1)
        own, along = _own(component, head, random, direction)
        rests.append((whole - along).clamp_min(0))
        spreads.append(shape.along(direction))
    tiny = torch.finfo(own.dtype).tiny
    scale = torch.stack(rests).sum(0) / (WIDER * torch.stack(spreads).sum(0)).clamp_min(tiny)
    if centred.shape[0] > MOST_CLASSES:
        variances, wanted = scale[:, None] * shape.variances(), scale * shape.information()
        for direction, rest, spread in zip(chosen, rests, spreads, strict=True):
            more = rest - scale * spread
            variances = variances + more[:, None] * direction.square()
            wanted = wanted + more * shape.unsure_along(direction)
        return own + shape.informed(independent_variances(variances.clamp_min(0)), wanted), None
    stretch = torch.eye(centred.shape[0], dtype=own.dtype, device=own.device)
    for direction, rest, spread in zip(chosen, rests, spreads, strict=True):
        factor = (rest / (scale * spread).clamp_min(tiny)).sqrt() - 1
        stretch = stretch + (factor[:, None] * direction)[..., None] * direction[:, None]
    return None, stretch @ (scale[:, None, None] * shape.matrix()) @ stretch + torch.diag_embed(own)


def _rivals(classes: int) -> float:
    """Return r for so many classes: M is spread over all of them, and F over a few, however many there are.

    >>> _rivals(10), _rivals(1000)
    (0.05, 0.0005)
    """
    return RIVALS * min(1.0, TEN / classes)


class _Shape:
    """N = M / tr M + r F / tr F of `principal_moments`.

    F is divided by p_2, the second largest probability, and written for moves relative to the largest one's:
    F / p_2 = E K E' with K = diag q - p_2 q q', q_j = p_j / p_2 but 0 for the largest t, and E = I - e_t 1'. So it
    has a shape also where p_2 is nothing beside 1.
    """

    def __init__(self, centred: Tensor, size: Tensor, outputs: Tensor) -> None:
        values, places = outputs.topk(2, -1)
        self.centred, self.top = centred, torch.zeros_like(outputs).scatter(1, places[:, :1], 1.0)
        self.second = outputs.softmax(-1).gather(1, places[:, 1:])
        self.others = (outputs - values[:, 1:]).clamp_max(0).exp() * (1 - self.top)
        tiny = torch.finfo(outputs.dtype).tiny
        self.size = size / (size @ centred.square().sum(0)).clamp_min(tiny)[:, None]
        self.rivals = _rivals(len(centred)) / self._unsure().sum(-1, keepdim=True).clamp_min(tiny)

    def _unsure(self) -> Tensor:
        """Return the diagonal of F / p_2."""
        q, number = self.others, self.others.sum(-1, keepdim=True)
        return q - self.second * q.square() + self.top * (number - self.second * number.square())

    def along(self, direction: Tensor) -> Tensor:
        """Return d' N d, (B,)."""
        known = ((direction @ self.centred).square() * self.size).sum(-1)
        return known + self.rivals[:, 0] * self.unsure_along(direction)

    def unsure_along(self, direction: Tensor) -> Tensor:
        """Return d' F d / p_2, (B,)."""
        moves = direction - (direction * self.top).sum(-1, keepdim=True)
        moved = self.others * moves
        return (moved * moves).sum(-1) - self.second[:, 0] * moved.sum(-1).square()

    def information(self) -> Tensor:
        """Return tr(F N) / p_2, (B,), without a matrix of classes: sums over features, and over classes."""
        q, second, number = self.others, self.second, self.others.sum(-1, keepdim=True)
        top, sums = self.top @ self.centred, q @ self.centred
        squares = q @ self.centred.square() - 2 * top * sums + number * top.square()
        features = squares - second * (sums - number * top).square()
        rest, square = 1 - second * number, q.square().sum(-1, keepdim=True)
        classes = square - 2 * second * q.pow(3).sum(-1, keepdim=True) + (second * square).square()
        classes = classes + 2 * square * rest.square() + (number * rest).square()
        return (features * self.size).sum(-1) + (self.rivals * classes)[:, 0]

    def informed(self, variances: Tensor, wanted: Tensor) -> Tensor:
        """Change the variances of probable classes, so that independent logits have a given tr(F C) / p_2."""
        unsure = self._unsure()
        tiny = torch.finfo(unsure.dtype).tiny
        share = unsure / unsure.amax(-1, keepdim=True).clamp_min(tiny)
        weight = unsure * variances
        change = (wanted - weight.sum(-1)) / (weight * share).sum(-1).clamp_min(tiny)
        return variances * (1 + change[:, None] * share).clamp_min(FEWEST)

    def variances(self) -> Tensor:
        """Return the diagonal of N, (B, C)."""
        return self.size @ self.centred.square().mT + self.rivals * self._unsure()

    def matrix(self) -> Tensor:
        """Return N, (B, C, C)."""
        q, top = self.others, self.top
        inner = torch.diag_embed(q) - self.second[..., None] * q[..., None] * q[:, None]
        rows = inner - top[..., None] * inner.sum(1, keepdim=True)
        unsure = rows - rows.sum(2, keepdim=True) * top[:, None]
        return (self.centred * self.size[:, None]) @ self.centred.mT + self.rivals[..., None] * unsure


def _directions(centred: Tensor, size: Tensor, outputs: Tensor, number: int) -> list[Tensor]:
    """Return unit vectors (B, C), orthogonal to each other, of which the variances are asked for."""
    top = outputs.topk(2, -1).indices
    margin = torch.zeros_like(outputs).scatter_(1, top[:, :1], 1.0).scatter_(1, top[:, 1:], -1.0) / math.sqrt(2)
    common = _common(centred).expand_as(outputs)
    if number == 1:
        # What all classes do together grows with their number, and what two of them do does not.
        common = common * min(1.0, math.sqrt(TEN / len(centred)))
        agreeing = torch.where((margin * common).sum(-1, keepdim=True) < 0, -common, common)
        return [nn.functional.normalize(margin + agreeing, dim=-1)]
    places = outputs.topk(number + 1, -1).indices.unbind(-1)[2:]
    found = [margin, _rest(common + LITTLE * _single(outputs, places[0]), [margin])]  # were they the same, not nothing
    for place in places[1:]:
        found.append(_widest(centred, size, _single(outputs, place), found))
    return found


def _single(outputs: Tensor, place: Tensor) -> Tensor:
    """Return the direction (B, C) of one class of each example."""
    return torch.zeros_like(outputs).scatter_(1, place[:, None], 1) - 1 / outputs.shape[-1]


def _rest(direction: Tensor, known: list[Tensor]) -> Tensor:
    """Return what of a direction is orthogonal to others, of length one."""
    for _ in range(2):  # once more, for what rounding left
        for other in known:
            direction = direction - (direction * other).sum(-1, keepdim=True) * other
        direction = nn.functional.normalize(direction, dim=-1)
    return direction


def _common(centred: Tensor) -> Tensor:
    """Return a direction (C,) in which W W' is wide, by the power method."""
    largest = centred.square().sum(0).argmax().reshape(1)
    direction = centred.index_select(1, largest)[:, 0]  # a number as an index could not be traced for an export
    for _ in range(3 * STEPS):
        direction = nn.functional.normalize(centred @ (direction @ centred), dim=0)
    return direction


def _widest(centred: Tensor, size: Tensor, direction: Tensor, known: list[Tensor]) -> Tensor:
    """Return a direction (B, C) beside the known ones in which M = W diag |h| W' is wide, by the power method."""
    for _ in range(STEPS):
        direction = _rest(((direction @ centred) * size) @ centred.mT, known)
    return direction


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
