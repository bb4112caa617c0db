"""Random weights of classes and of examples: what makes ABNN's members differ."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify._core.maths import IGNORED
from bayesify._core.random import Key, generator_for
from bayesify._core.trees import map_tensors
from bayesify.likelihoods import Likelihood

if TYPE_CHECKING:
    from bayesify.methods.abnn import ABNN

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
    labels, number = likelihood.labels(targets), likelihood.num_classes(output)
    return None if labels is None or number is None else (labels.where(labels != IGNORED, 0), number)


def eta_of_examples(examples: Any, rows: int, seed: int, member: int) -> Tensor:
    """Return a member's eta of each example, (B,), 1 + eta ~ Exp(1), as a function of the bits of its tensors.

    An example so keeps its weight over the epochs, whatever the order of the data. Only equal examples share theirs;
    zeros at the end of a row, such as padding, do not count.

    Args:
        examples: Inputs and targets of any structure; tensors without a row for each example are not looked at.
        rows: B.
        seed: Of the method.
        member: Whose eta.

    >>> inputs, targets = torch.tensor([[1.0], [2.0], [1.0]]), torch.tensor([5.0, 5.0, 5.0])
    >>> one, other, again = eta_of_examples((inputs, targets), 3, seed=0, member=0).tolist()
    >>> one == again, one == other
    (True, False)
    """
    text = f"{seed}/{member}".encode()
    state = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big", signed=True)
    found: list[Tensor] = []
    map_tensors(lambda t: found.append(t) if t.ndim and len(t) == rows else None, examples)
    digest = torch.stack([_digest(tensor, index) for index, tensor in enumerate(found)]).sum(0)
    mixed = _mix(_mix(digest) ^ state)
    uniform = ((mixed >> 11) & ((1 << 53) - 1)).double() * 2.0**-53
    return -torch.log1p(-uniform) - 1


def _digest(tensor: Tensor, index: int) -> Tensor:
    """Return sum_j c_j b_j modulo 2^64 of each row's bits b, (B,), with odd coefficients c; a sum has no order."""
    numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = numbers.detach().double().reshape(len(tensor), -1)
    bits = (flat + 0.0).view(torch.int64)  # adding zero makes -0 and 0 one number
    bits = bits ^ _shifted(bits, 32)  # the low bits of short numbers are zero, and a product never moves bits down
    places = torch.arange(flat.shape[1], device=flat.device) + (index << 40)
    return (bits * (_mix(places) | 1)).sum(1)


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
