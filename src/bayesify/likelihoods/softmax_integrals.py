"""What softmax does to Gaussian logits on average: integrals at points that are always the same."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from bayesify._core.maths import exact_top

__all__ = ["Averages", "average_logs", "average_softmax", "covariance_root", "line", "number_of_points"]

MOST, ENOUGH, LEAST = 512, 128, 16  # points: of few classes, of many, of a map's pixel
WIDTH = 1.5  # of the first coordinate, in standard deviations: what decides a confident prediction are its tails
LINE = 128  # points for two classes, from -6.5 to 6.5 standard deviations; none at the mean, where steps are
TOGETHER = 2**16  # numbers of an example at a time
AT_ONCE = 2**19  # numbers at a time; fewer cost more in calls than a nearer cache saves
SMALLEST = 1e-30
# Exponentials that single precision cannot hold take a processor twenty times as long as others.
LOWEST = -80.0
FEW_CLASSES = 32
BIT = math.log(2)  # nats
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Averages:
    """Averages over Gaussian logits.

    Attributes:
        log_probs: ln E[p], (N, C).
        entropy: E[H[p]], (N,).
        squares: E[p.p], (N,).
        votes: How probable it is that a class has the largest logit, (N, C).
        pooled: ln E[p^a]^(1/a), (N, C), which is not normalised; for a = 1 the same as `log_probs`.
    """

    log_probs: Tensor
    entropy: Tensor
    squares: Tensor
    votes: Tensor
    pooled: Tensor


def number_of_points(classes: int, positions: int = 1) -> int:
    """Return how many points an example takes that has so many positions (tokens, pixels) with so many classes.

    Of ten classes 256 have the mutual information to 2 % (root mean square over predictions of all kinds) and
    probabilities to .0008; 512 have half of these errors, for twice the time.

    >>> [number_of_points(3), number_of_points(10), number_of_points(1000), number_of_points(21, positions=256 * 256)]
    [512, 256, 128, 16]
    """
    wanted = min(max(ENOUGH, 2**12 // classes), 2**17 // (classes * positions))
    return _power_of_two(wanted)


def _power_of_two(wanted: int) -> int:
    """Return the largest up to a number, from `LEAST` to `MOST`."""
    return min(MOST, max(LEAST, 1 << max(0, wanted.bit_length() - 1)))


def average_softmax(mean: Tensor, root: Tensor, *, positions: int = 1, exponent: float = 1.0) -> Averages:
    """Average functions of softmax(l) over l = mean + root z, z standard normal.

    Two classes are an integral over one number, by 128 equal steps: exact to rounding. Else the points are a scrambled
    Sobol sequence through the normal quantile, turned for each example so that the first coordinate is the direction
    in which the most probable class gains or loses most, and wider there, with weights that make up for it: rare draws
    that overturn a confident prediction have their share of the points. There is no seed, and no state.

    Args:
        mean: (N, C).
        root: Standard deviations of independent logits (N, C), or a root of their covariance (N, C, R).
        positions: How many of the rows belong to one example, which decides how many points each gets.
        exponent: a of the power mean; 0 is exp E[ln p].
    """
    classes, rows = mean.shape[-1], mean.shape[0]
    root, turn, z, shares = _points(mean, root, number_of_points(classes, positions))
    some = max(1, AT_ONCE // (classes * min(len(shares), max(1, TOGETHER // classes))))
    if not isinstance(rows, int) or rows <= some:  # a symbol, while a program is traced: all rows go together
        return _average(mean, root, turn, z, shares, exponent)
    parts = []
    for start in range(0, rows, some):
        few = slice(start, start + some)
        parts.append(_average(mean[few], root[few], None if turn is None else turn[few], z, shares, exponent))
    return Averages(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Averages)))


def average_logs(mean: Tensor, root: Tensor, *, positions: int = 1) -> tuple[Tensor, Tensor]:
    """Return ln E[p] and E[p ln p], (N, C) each, of p = softmax(mean + root z), with gradients in mean and root.

    At points like those of `average_softmax`, up to 512. Memory is that of all of them, N x C x S numbers.

    >>> log_mean, log_square = average_logs(torch.tensor([[1.0, 0.0, 0.0]]), torch.zeros(1, 3))
    >>> torch.allclose(log_square, log_mean.exp() * log_mean)
    True

    Args:
        mean: (N, C).
        root: Standard deviations of independent logits (N, C), or a root of their covariance (N, C, R).
        positions: As in `average_softmax`.
    """
    root, turn, z, shares = _points(mean, root, _power_of_two(2**17 // (mean.shape[-1] * positions)))
    log_probs = functional.log_softmax(_moved(mean, root, turn, z), 1)
    probs = log_probs.clamp_min(LOWEST).exp()
    return (probs @ shares).clamp_min(SMALLEST).log(), (probs * log_probs) @ shares


def _points(mean: Tensor, root: Tensor, number: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return the root, what turns the points of each example (to which no gradient belongs), points and weights."""
    turn = None
    if mean.shape[-1] == 2:
        difference = root if root.ndim == 2 else root[:, 0] - root[:, 1]
        half = difference.square().sum(-1, keepdim=True).sqrt() / 2
        root = torch.stack([half, -half], 1)
        points, weights = line()
    else:
        turn = _turn(mean.detach(), root.detach())
        points, weights = _cloud(root.shape[-1], number)
    z, shares = (torch.from_numpy(array).to(mean) for array in (points, weights))
    return root, turn, z, shares


def _average(mean: Tensor, root: Tensor, turn: Tensor | None, z: Tensor, shares: Tensor, exponent: float) -> Averages:
    classes = mean.shape[-1]
    probs, votes, powers = torch.zeros_like(mean), torch.zeros_like(mean), torch.zeros_like(mean)
    entropy, squares = torch.zeros_like(mean[:, 0]), torch.zeros_like(mean[:, 0])
    together = max(1, TOGETHER // classes)
    centre, width = mean / BIT, root / BIT  # logits in bits: 2^l takes half the time of e^l
    for part, share in zip(torch.split(z, together, -1), torch.split(shares, together), strict=True):
        logits = _moved(centre, width, turn, part)
        # From the largest one on; for an average of logarithms a difference of 1e4 is nothing, in any precision.
        logits.sub_(logits.amax(1, keepdim=True)).clamp_min_((LOWEST if exponent else -1e4) / BIT)
        each = logits.exp2() if exponent else logits.clamp_min(LOWEST / BIT).exp2_()
        below = logits * BIT if exponent != 1 else None
        # In two buffers: a third costs as much as half of all this, and a comparison that has to become numbers more.
        surprise = logits.mul_(each).sum(1).mul_(BIT)
        top = logits.copy_(each).floor_()
        votes = votes + _along(top, share)
        # Without the largest: 1 + 1e-9 is 1, and what a confident prediction is unsure of would be lost.
        others = top.sum(1).sub_(1).sub_(top.sub_(each).sum(1))
        each.div_((1 + others)[:, None])
        probs = probs + _along(each, share)
        entropy = entropy + torch.mv(others.log1p().sub_(surprise.div_(1 + others)), share)
        squares = squares + torch.mv(each.square_().sum(1), share)
        if below is not None:
            powers = powers + _along(_power(below.sub_(others.log1p_()[:, None]), exponent), share)
    # Below what the type can add up, the value at the mean keeps the order.
    floor = functional.log_softmax(mean, -1).clamp_max(math.log(SMALLEST))
    log_probs = torch.where(probs > SMALLEST, probs.clamp_min(SMALLEST).log(), floor)
    log_probs = exact_top(functional.log_softmax(log_probs, -1))
    if exponent == 0:
        pooled = powers
    elif exponent == 1:
        pooled = log_probs
    else:
        pooled = torch.where(
            powers > SMALLEST, powers.clamp_min(SMALLEST).log() / exponent, functional.log_softmax(mean, -1)
        )
    return Averages(log_probs, entropy, squares, votes, pooled)


def _along(each: Tensor, share: Tensor) -> Tensor:
    """Return the weighted average over points, (N, C) of (N, C, S)."""
    return torch.mv(each.flatten(0, 1), share).view(each.shape[:2])


def _power(log_probs: Tensor, exponent: float) -> Tensor:
    """Return p^a, or ln p for a = 0, in place."""
    return log_probs if exponent == 0 else log_probs.mul_(exponent).clamp_min_(LOWEST).exp_()


def _moved(mean: Tensor, root: Tensor, turn: Tensor | None, z: Tensor) -> Tensor:
    """Return mean + root (I - 2 u u') z, (N, C, S)."""
    if root.ndim == 3:
        turned = root if turn is None else root - 2 * (root @ turn[..., None]) * turn[:, None]
    else:
        assert turn is not None
        if root.shape[-1] > FEW_CLASSES:  # else one product is faster than two broadcasts
            moved = torch.addcmul(mean[..., None], root[..., None], z)
            return moved.addcmul_((root * turn)[..., None], (turn @ z)[:, None], value=-2)
        turned = torch.diag_embed(root) - 2 * (root * turn)[..., None] * turn[:, None]
    # The mean goes along with a coordinate that is always 1: to add it would be another round.
    weights = torch.cat([turned, mean[..., None]], -1).flatten(0, 1)
    return (weights @ torch.cat([z, torch.ones_like(z[:1])])).view(*mean.shape, -1)


def _turn(mean: Tensor, root: Tensor) -> Tensor:
    """Return u, (N, R): the reflection I - 2 u u' takes the first axis to where a draw most probably has another top.

    That is the difference of the top logit and an average of the others, in which each counts by how near it is, in
    standard deviations of the difference; the logistic distribution's variance is nearly 2.5 Gaussian ones.
    """
    top = torch.zeros_like(mean).scatter(-1, mean.argmax(-1, keepdim=True), 1.0)
    gap = (mean * top).sum(-1, keepdim=True) - mean
    if root.ndim == 2:
        spread = (root * top).square().sum(-1, keepdim=True) + root.square()
    else:
        spread = ((root * top[..., None]).sum(1, keepdim=True) - root).square().sum(-1)
    along = top - (-gap.square() / (2 * spread + 5) - 1e30 * top).softmax(-1)
    along = along * root if root.ndim == 2 else (along[:, None] @ root)[:, 0]
    along = functional.normalize(along, dim=-1)
    first = torch.eye(1, along.shape[-1], dtype=along.dtype, device=along.device)
    return functional.normalize(first + torch.where(along[:, :1] > 0, along, -along), dim=-1)


def covariance_root(covariance: Tensor) -> Tensor:
    """Return R with R R' = covariance, (..., C, C), which may be singular: Cholesky's method, column by column.

    Written out, since a program for other machines has no operation for it.

    >>> covariance_root(torch.tensor([[4.0, 2.0], [2.0, 1.0]]))
    tensor([[2., 0.],
            [1., 0.]])
    """
    size = covariance.shape[-1]
    left = covariance
    least = torch.finfo(left.dtype).eps * size * covariance.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True)
    columns = []
    for index in range(size):
        pivot = left[..., :1, 0]
        column = left[..., 0] * torch.where(pivot > least, pivot.clamp_min(0).rsqrt(), 0)
        columns.append(functional.pad(column, (index, 0)))
        left = (left - column[..., None] * column[..., None, :])[..., 1:, 1:]
    return torch.stack(columns, -1)


@lru_cache(maxsize=8)
def _cloud(dims: int, number: int) -> tuple[Array, Array]:
    """Return points (R, S) and weights (S,)."""
    with torch.device("cpu"):
        if dims <= torch.quasirandom.SobolEngine.MAXDIM:
            sobol = torch.quasirandom.SobolEngine(dims, scramble=True, seed=7)  # type: ignore[no-untyped-call]
            uniform = sobol.draw(number, dtype=torch.float64).T.clamp(1e-9, 1 - 1e-9)
        else:
            uniform = torch.rand(dims, number, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        z = torch.special.ndtri(uniform)
        ranks = uniform[0].argsort().argsort()
        z[0] = WIDTH * torch.special.ndtri((ranks + 0.5) / number)
        weights = ((z[0] / WIDTH).square() / 2 - z[0].square() / 2).exp()
        weights /= weights.sum()
        z -= (z @ weights)[:, None]
        z /= (z.square() @ weights).sqrt()[:, None]
        return z.contiguous().numpy(), weights.numpy()  # an archive wants whole tensors


@lru_cache(maxsize=1)
def line() -> tuple[Array, Array]:
    """Return equal steps of one number, (1, S), and their weights."""
    z = np.linspace(-6.5, 6.5, LINE)
    weights = np.exp(-(z**2) / 2)
    return z.reshape(1, -1).copy(), weights / weights.sum()
