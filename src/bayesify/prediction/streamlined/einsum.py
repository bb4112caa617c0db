"""Einstein sums, as sums over single indices, linear maps and products of two."""

from __future__ import annotations

from collections import Counter
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bayesify.prediction.streamlined.moments import Moments, centre, moment_rule, same_size
from bayesify.prediction.streamlined.products import joint_share

__all__: list[str] = []

Term = tuple[Tensor, str]  # a tensor, and a letter for each of its dimensions


@moment_rule(torch.einsum, kind="exact")
def _einsum(equation: Any, *operands: Any) -> Any:
    """Return the moments of a sum of products, two operands after two.

    Indices of one operand alone are summed first. After that each entry of an operand meets one of the other in a
    sum, so that with entries a (mean a, variance u) and b (mean b, variance w), Var = sum a^2 w + u (b^2 + w), exactly;
    of more than two operands, what the first two have in common in different sums is dropped.
    """
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not isinstance(equation, str):
        return NotImplemented
    terms, output = _parsed(equation, operands)
    if any(max(Counter(letters).values(), default=1) > 1 for _, letters in terms) or not _same_sizes(terms):
        return NotImplemented  # a diagonal, or a side of one that stands for many
    first = terms[0]
    for index, other in enumerate(terms[1:], 2):
        later = set(output).union(*(letters for _, letters in terms[index:]))
        first = _contracted(first, other, "".join(dict.fromkeys(x for x in first[1] + other[1] if x in later)))
    return _ordered(_summed(first, output), output)


def _parsed(equation: str, operands: tuple[Tensor, ...]) -> tuple[list[Term], str]:
    """Return each operand with its letters, and those of the output; dots become letters of their own."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    parts = inputs.split(",")
    free = [letter for letter in ascii_letters if letter not in equation]
    widths = [x.ndim - len(part.replace("...", "")) for part, x in zip(parts, operands, strict=True)]
    widest = max((width for part, width in zip(parts, widths, strict=True) if "..." in part), default=0)
    dots = "".join(free[:widest])
    named = [part.replace("...", dots[widest - width :]) for part, width in zip(parts, widths, strict=True)]
    if not arrow:
        counts = Counter("".join(parts).replace(".", ""))
        output = "..." + "".join(sorted(letter for letter, count in counts.items() if count == 1))
    return list(zip(operands, named, strict=True)), output.replace("...", dots)


def _same_sizes(terms: list[Term]) -> bool:
    sizes: dict[str, int] = {}
    pairs = [(letter, size) for x, letters in terms for letter, size in zip(letters, x.shape, strict=True)]
    return all(same_size(sizes.setdefault(letter, size), size) for letter, size in pairs)


def _summed(term: Term, kept: str) -> Term:
    """Sum over the indices that nothing else has."""
    x, letters = term
    gone = [index for index, letter in enumerate(letters) if letter not in kept]
    return (x.sum(gone) if gone else x), "".join(letter for letter in letters if letter in kept)


def _ordered(term: Term, output: str) -> Tensor:
    x, letters = term
    return x if letters == output else x.permute([letters.index(letter) for letter in output])


def _contracted(one: Term, other: Term, output: str) -> Term:
    """Return the sum of products of two operands."""
    one, other = _summed(one, output + other[1]), _summed(other, output + one[1])
    if not any(isinstance(x, Moments) for x, _ in (one, other)):
        return torch.einsum(f"{one[1]},{other[1]}->{output}", one[0], other[0]), output
    inner = "".join(letter for letter in one[1] if letter in other[1])
    if inner and not set(inner) & set(output):
        x, weight = (one, other) if output[:1] in one[1] else (other, one)
        return _linear(x, weight, inner)
    equation = f"{one[1]},{other[1]}->{output}"
    a, b = centre(one[0]), centre(other[0])
    variance: Any = 0.0
    if isinstance(other[0], Moments):
        variance = torch.einsum(equation, a.square(), other[0].variance)
    if isinstance(one[0], Moments):
        second = b.square() + other[0].variance if isinstance(other[0], Moments) else b.square()
        variance = variance + torch.einsum(equation, one[0].variance, second)
    return Moments.make(torch.einsum(equation, a, b), variance, joint_share(one[0], other[0])), output


def _linear(x: Term, weight: Term, inner: str) -> Term:
    """Return a product of matrices as a linear map, whose rule knows what positions have in common."""
    rows, columns = (("".join(letter for letter in letters if letter not in inner)) for _, letters in (x, weight))
    left, right = _ordered(x, rows + inner), _ordered(weight, columns + inner)
    sizes = right.shape[: len(columns)]
    left, right = left.flatten(len(rows)), right.flatten(len(columns))
    right = right.flatten(0, -2) if columns else right[None]
    made = functional.linear(left if rows else left[None], right)
    made = torch.unflatten(made, -1, tuple(sizes)) if columns else made.squeeze(-1)
    return (made if rows else made.squeeze(0)), rows + columns
