"""Which activations are functions of the same random numbers, entry by entry, so that they are not independent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesify.prediction.overrides import name_of
from bayesify.prediction.streamlined.elementwise import branch_of, elementwise, is_pointwise, is_total
from bayesify.prediction.streamlined.moments import Moments, same_size, settings

__all__ = ["Lineage", "descend", "look_at", "together"]

Function = Callable[[Tensor], Tensor]

LONGEST = 64  # operations that are composed: all are run again where two functions of one root meet


@dataclass(eq=False, frozen=True)
class Root:
    """A random tensor that others are made of.

    Attributes:
        centre: Its mean.
        variance: Its variance.
        writes: How many activations had been written into when it was looked at: after another, it may have changed.
    """

    centre: Tensor
    variance: Tensor
    writes: int


@dataclass(frozen=True)
class Lineage:
    """An activation as a function of single entries of a root.

    Attributes:
        root: The root.
        function: From values of the root to those of the activation.
        index: A tensor without data whose strides say which entry of the root each entry is made of; None if they lie
            alike.
        view: How the entries lie among those of the root; None if they lie alike.
        size: How many operations the function has.
        careful: Whether the function may have no value for some numbers.
    """

    root: Root
    function: Function
    index: Tensor | None = None
    view: Function | None = None
    size: int = 0
    careful: bool = False


def _of(x: Moments) -> Lineage:
    """Return the lineage of an activation, which is a root itself if it has no other."""
    known: Lineage | None = x.lineage
    if known is None or known.root.writes != settings().writes:
        known = Lineage(Root(x.centre, x.variance, settings().writes), lambda z: z)
        x.lineage = known
    return known


def descend(func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], made: Any) -> None:
    """Note what an activation is a function of, after an operation on single entries of one random tensor."""
    if not isinstance(made, Moments) or made.lineage is not None or options.get("inplace") or not is_pointwise(func):
        return
    pairs = [value for value in args if isinstance(value, Moments)]
    if len(pairs) != 1 or pairs[0] is made or pairs[0].shape != made.shape:
        return
    if any(isinstance(value, Moments) for value in options.values()):
        return
    line = _of(pairs[0])
    if line.size < LONGEST:
        made.lineage = _composed(func, args, options, [line])


def look_at(x: Moments, made: Moments, operation: Function, of_index: Callable[[Tensor], Tensor | None] | None) -> None:
    """Note what an activation is a function of, after an operation that only looks at its entries in another way.

    Args:
        x: Before the operation.
        made: After it.
        operation: On the values.
        of_index: On the index, None where its entries no longer lie at fixed steps; None if no entry moves.
    """
    line = _of(x)
    if line.size >= LONGEST:
        return
    inner = line.function

    def function(z: Tensor) -> Tensor:
        return operation(inner(z))

    if of_index is None:
        made.lineage = Lineage(line.root, function, line.index, line.view, line.size + 1, line.careful)
        return
    index = of_index(torch.empty(line.root.centre.shape, device="meta") if line.index is None else line.index)
    if index is None:
        return
    before = line.view

    def view(z: Tensor) -> Tensor:
        return operation(z if before is None else before(z))

    made.lineage = Lineage(line.root, function, index, view, line.size + 1, line.careful)


def together(func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Moments | None:
    """Return the moments of an operation on several functions of one root, and None if that is not what they are.

    x * sigmoid(x) is one function of x: its moments are those of any other.
    """
    pairs = [value for value in args if isinstance(value, Moments)]
    if len(pairs) < 2 or not is_pointwise(func) or any(isinstance(value, Moments) for value in options.values()):
        return None
    lines = [_of(pair) for pair in pairs]
    first = lines[0]
    if not all(line.root is first.root and _alike(line, first) for line in lines[1:]):
        return None
    shape = pairs[0].shape
    others = [value.shape for value in args if isinstance(value, Tensor) and not isinstance(value, Moments)]
    if not all(_fits(other, shape) for other in others):
        return None
    whole = _composed(func, args, options, lines)
    branch = branch_of(func, args)
    if name_of(func).strip("_") in ("div", "truediv", "true_divide", "rdiv", "rtruediv") and isinstance(
        args[1], Moments
    ):
        of_pole = lines[-1].function
        branch = lambda z: of_pole(z).sign()  # noqa: E731
    root = Moments.make(first.root.centre, first.root.variance, pairs[0].shared)
    made = elementwise(whole.function, root, careful=whole.careful, branch=branch, view=whole.view)
    if whole.size <= LONGEST:
        made.lineage = whole
    return made


def _composed(
    func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], lines: list[Lineage]
) -> Lineage:
    first = lines[0]
    places = [index for index, value in enumerate(args) if isinstance(value, Moments)]
    # What is kept must not hold the pairs: they know what they were made of, and that in turn.
    plain = [None if index in places else value for index, value in enumerate(args)]
    functions = [line.function for line in lines]

    def function(z: Tensor) -> Tensor:
        whole = list(plain)
        for index, one in zip(places, functions, strict=True):
            whole[index] = one(z)
        return torch.as_tensor(func(*whole, **options))

    size = 1 + sum(line.size for line in lines)
    careful = any(line.careful for line in lines) or not is_total(func)
    return Lineage(first.root, function, first.index, first.view, size, careful)


def _fits(shape: torch.Size, whole: torch.Size) -> bool:
    """Return whether a tensor broadcasts to a shape, which stays as it is."""
    if len(shape) > len(whole):
        return False
    return all(same_size(one, 1) or same_size(one, other) for one, other in zip(shape[::-1], whole[::-1], strict=False))


def _alike(one: Lineage, other: Lineage) -> bool:
    """Return whether entries in the same place are made of the same entry of the root."""
    a, b = (
        torch.empty(line.root.centre.shape, device="meta") if line.index is None else line.index
        for line in (one, other)
    )
    if a is b or (one.index is None and other.index is None):
        return True
    if a.ndim != b.ndim:
        return False
    sizes = zip((*a.shape, *a.stride(), a.storage_offset()), (*b.shape, *b.stride(), b.storage_offset()), strict=True)
    return all(same_size(first, second) for first, second in sizes)
