"""What a backward pass adds up: for each example, the variance that the random parts of a network cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesify._core.maths import rank_one_factors
from bayesify.laws import BatchDim
from bayesify.laws.gaussian.site import Arrangement
from bayesify.layers import Convolution, Factors
from bayesify.prediction.linearised.sketch import Sketch

__all__ = ["Factors", "Ledger", "Part"]

Part = tuple[str, int, torch.Size, tuple[int, ...]]


@dataclass(frozen=True)
class Batch:
    """Where the batch is in the input of a call.

    Attributes:
        dim: The dimension and how often it holds the batch; None if that is unknown.
        expand: Whether the input has one row for all examples, and has to be repeated for each.
    """

    dim: BatchDim | None
    expand: bool = False


class Ledger:
    """The account of one pass.

    A random tensor w with variances s^2 adds sum_p s_p^2 (d out_b / d w_p)^2 to example b. The derivative is a sum over
    all places where w is used. A tensor that is used once is squared at once; the derivatives of one that is used
    several times are kept until all of them are there. Directions that all tensors share add sum_k (d out_b / d u_k)^2,
    where the derivative by u_k is a sum over all tensors.

    Args:
        rows: The number of examples.
        batches: Where the batch is in each call, in their order; None while that is being found out.
        like: A tensor with the device and type of the result.
        known: Factors of variances, which all passes of a plan share.
        signs: How many vectors of random signs stand for a layer's input channels; 0 adds up all of them.
        sketches: What was made of them, likewise shared.
        columns: Directions (K, *tensor) that all random tensors share, by the tensors' names.
        several: Whether there will be many backward passes, so that what depends on inputs alone is worth keeping.
    """

    def __init__(
        self,
        rows: int,
        batches: list[Batch] | None,
        like: Tensor,
        known: dict[Part, Factors] | None = None,
        *,
        signs: int = 0,
        sketches: dict[tuple[Part, int], Sketch] | None = None,
        columns: Mapping[str, Tensor] | None = None,
        several: bool = False,
    ) -> None:
        self.known = {} if known is None else known
        self.signs = signs
        self.sketches = {} if sketches is None else sketches
        self.columns = {} if columns is None else columns
        self.several = several
        self.rows = rows
        self.batches = batches
        self.anchor = like.new_zeros(()).requires_grad_()
        self.uses: Counter[Part] = Counter()
        self.parts: dict[str, set[Part]] = {}
        self.looped: set[str] = set()
        self.calls: list[tuple[torch.Size, tuple[str, ...]]] = []
        self.clear(like)

    def clear(self, like: Tensor, number: int = 1) -> None:
        """Begin a new backward pass of so many functions together, whose result has the type of a tensor."""
        self.number, self.turn = number, 0
        self.total = torch.zeros(number, self.rows, dtype=like.dtype, device=like.device)
        self.along: dict[int, Tensor] = {}  # (B, K), by turn
        self.gradients: dict[tuple[int, Part], tuple[Tensor, Tensor]] = {}

    # -- forward ------------------------------------------------------------------------------------------------

    def visit(self, x: Tensor, names: Iterable[str]) -> Batch:
        """Note a call, and return where the batch is in its input."""
        index = len(self.calls)
        self.calls.append((x.shape, tuple(names)))
        if self.batches is None or index >= len(self.batches):
            return Batch(BatchDim(0))
        return self.batches[index]

    def arrange(self, x: Tensor, batch: Batch) -> Arrangement:
        """Return how an input is split into examples."""
        found = Arrangement.find(x, self.rows, batch.dim)
        if found.dim is None and self.batches is not None:
            raise ValueError(
                f"A random layer saw an activation of shape {tuple(x.shape)} in a batch of {self.rows} examples, and "
                "which of its dimensions is the batch is unknown. Use how='sampling'."
            )
        return found

    def use(self, name: str, variance: Tensor) -> Part:
        """Note that a tensor, or a part of it, is used."""
        part: Part = (name, int(variance.storage_offset()), variance.shape, variance.stride())
        known = self.parts.setdefault(name, set())
        if any(other != part and _overlap(other, part) for other in known):
            self.looped.add(name)  # the same numbers in two arrangements
        known.add(part)
        self.uses[part] += 1
        return part

    def factors_of(self, part: Part, variance: Tensor) -> Factors:
        """Return what the variances of a matrix are a product of, looked for once."""
        if part not in self.known:
            self.known[part] = rank_one_factors(variance)
        return self.known[part]

    def sketch_of(self, part: Part, variance: Tensor, operation: Convolution | None) -> Sketch:
        """Return what stands for a weight's input channels, made once."""
        found = self.sketches.get((part, self.signs))
        if found is None:
            name, offset = part[:2]
            found = Sketch.make(variance, operation, self.signs, f"{name}/{offset}")
            if not torch.compiler.is_compiling():
                self.sketches[part, self.signs] = found
        return found

    def columns_of(self, part: Part) -> Tensor | None:
        """Return the shared directions of a part, (K, *part): the part of them that it is of its variances."""
        if part[0] not in self.columns:
            return None
        _, offset, shape, stride = part
        whole = self.columns[part[0]].flatten(1)
        whole = whole if whole.stride(1) == 1 else whole.contiguous()
        size = (whole.shape[0], *shape)
        return whole.as_strided(size, (whole.stride(0), *stride), whole.storage_offset() + offset)

    # -- backward -----------------------------------------------------------------------------------------------

    def once(self, part: Part) -> bool:
        """Whether a part is used in one place alone."""
        return self.uses[part] == 1

    def turns(self) -> Iterator[int]:
        """Let what is added be of one function after the other."""
        for turn in range(self.number):
            self.turn = turn
            yield turn

    def add(self, squares: Tensor) -> None:
        """Add what a part causes, (B,)."""
        total = self.total if self.number == 1 else self.total[self.turn]  # a program for others has no views
        total += squares

    def add_all(self, squares: Tensor) -> None:
        """Add what a part causes in each of the functions, (N, B)."""
        self.total += squares

    def add_along(self, products: Tensor) -> None:
        """Add a part's derivatives along the shared directions, (B, K)."""
        known = self.along.get(self.turn)
        self.along[self.turn] = products if known is None else known + products

    def add_gradient(self, part: Part, gradient: Tensor, variance: Tensor) -> None:
        """Add the derivative by a part in one of its places, (B, *part)."""
        if self.once(part):
            self._square(part, gradient.clone(), variance)
        elif (self.turn, part) in self.gradients:
            self.gradients[self.turn, part][0].add_(gradient)
        else:
            self.gradients[self.turn, part] = (gradient.clone(), variance)

    def add_gradients(self, part: Part, gradients: Tensor, variance: Tensor) -> None:
        """Add the derivatives of each of the functions, (N, B, *part)."""
        if self.once(part) and part[0] not in self.columns:
            self.add_all(gradients.flatten(2).square() @ variance.reshape(-1))
            return
        for turn in self.turns():
            self.add_gradient(part, gradients[turn], variance)

    def settle(self) -> tuple[Tensor, Tensor | None]:
        """Square what was kept, and return the sums (N, B), and the derivatives along shared directions (N, B, K)."""
        for (turn, part), (gradient, variance) in self.gradients.items():
            self.turn = turn
            self._square(part, gradient, variance)
        self.gradients = {}
        return self.total, torch.stack([self.along[turn] for turn in self.turns()]) if self.along else None

    def _square(self, part: Part, gradient: Tensor, variance: Tensor) -> None:
        columns = self.columns_of(part)
        if columns is not None:
            self.add_along(gradient.flatten(1) @ columns.flatten(1).mT)
        self.add(gradient.square_().flatten(1) @ variance.reshape(-1))


def _overlap(one: Part, other: Part) -> bool:
    a, b = _extent(one), _extent(other)
    return a[0] < b[1] and b[0] < a[1]


def _extent(part: Part) -> tuple[int, int]:
    _, offset, shape, stride = part
    reach: Any = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return offset, offset + reach + 1
