"""Random weights of classes and of examples: what makes ABNN's members differ."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bayesify.likelihoods import Bernoulli, Categorical, Likelihood
from bayesify.posteriors._noise import Key, generator_for

if TYPE_CHECKING:
    from bayesify.methods._abnn import ABNN

__all__ = ["draw_eta", "eta_of_classes", "eta_of_examples"]


def draw_eta(method: ABNN, members: int, classes: int) -> Tensor:
    """Draw which distinct classes count more for each member, (M, C): eta for those, 0 for the others.

    A member's row depends on the seed and its index alone.
    """
    number = math.isqrt(classes) if method.eta_classes is None else method.eta_classes
    if not 0 < number <= classes:
        raise ValueError(f"eta_classes={number}, but there are {classes} classes.")
    eta = torch.zeros(members, classes)
    for member in range(members):
        generator = generator_for(Key(method.seed, member), "eta", torch.device("cpu"))
        eta[member, torch.randperm(classes, generator=generator)[:number]] = method.eta
    return eta


def eta_of_classes(likelihood: Likelihood, output: Tensor, targets: Tensor) -> tuple[Tensor, int] | None:
    """Return the class of each position and the number of classes; None where a likelihood has no classes.

    Positions that do not count are given class 0.
    """
    if isinstance(likelihood, Categorical):
        counted = targets.long() != likelihood.ignore_index
        return targets.long().where(counted, 0), likelihood.classes_last(output).shape[-1]
    if isinstance(likelihood, Bernoulli):
        return (targets > 0.5).long(), 2
    return None


def eta_of_examples(targets: Tensor, seed: int, member: int) -> Tensor:
    """Return a member's eta of each example, (B,), 1 + eta ~ Exp(1), as a function of its target's bits.

    An example so keeps its weight over the epochs, whatever the order of the data and the changes made to its inputs.
    Examples with the same target share theirs.
    """
    text = f"{seed}/{member}".encode()
    state = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big", signed=True)
    bits = targets.detach().double().flatten(1) if targets.ndim > 1 else targets.detach().double()[:, None]
    bits = (bits + 0.0).contiguous().view(torch.int64)  # adding zero makes -0 and 0 one number
    mixed = torch.full_like(bits[:, 0], state)
    for column in bits.unbind(1):
        mixed = _mix(mixed ^ column)
    uniform = ((mixed >> 11) & ((1 << 53) - 1)).double() * 2.0**-53
    return -torch.log1p(-uniform) - 1


def _mix(x: Tensor) -> Tensor:
    """Spread every bit over all (the finaliser of splitmix64); integers of 64 bits wrap around."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # without the copies of the sign


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
