"""One pass of a network: which draws it is of, and what it puts in the network's place.

A `Pass` is made for each call and handed down to whatever needs to know of it. A law answers it with a `Patch`. Both
are forgotten when the pass is over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from bayesify._core.random import Distribution, Key, Noise

if TYPE_CHECKING:
    from bayesify.laws.trace import Trace

__all__ = ["Arranged", "BatchDim", "Kind", "Pass", "Patch", "Refusal", "ShapeError"]

Kind = Literal["mean", "draw", "fresh"]
Arranged = Literal["one", "rows", "stack"]


class Refusal(str):
    """Why something cannot be had, and the nearest thing that can; false, so that it can stand where True could.

    >>> bool(Refusal("Members that were trained apart have no mean."))
    False
    """

    __slots__ = ()

    def __bool__(self) -> bool:
        """Return False."""
        return False


class ShapeError(ValueError):
    """A tensor does not have the batch where it must be."""


@dataclass(frozen=True)
class BatchDim:
    """Where the batch is in an activation.

    Attributes:
        dim: The dimension; None for an activation without a batch, such as an embedding of positions.
        times: r where the dimension has r entries for each example, (B r, ...).
    """

    dim: int | None
    times: int = 1


@dataclass(frozen=True)
class Patch:
    """All that differs from the network in one pass.

    Attributes:
        tensors: What stands in the place of the network's own parameters and buffers, by name; batch normalisation
            writes into them. (S, ...) where S draws are stacked.
        forwards: Another forward for some modules: kernels with noise for each example, masks, factors.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    forwards: Mapping[nn.Module, Callable[..., Any]] = field(default_factory=dict)


@dataclass
class Pass:
    """One pass.

    Attributes:
        kind: "mean", without noise; "draw", the coherent functions that `keys` name; "fresh", new noise, which differs
            between examples wherever the law has such.
        keys: The draws; several only as `Law.together` allows.
        part: Of a mixture, the part; or the part of each row, (B,). None leaves the choice to the law.
        rows: How many examples there are.
        ood_rows: How many of the last rows are OOD inputs, which must not enter the statistics of normalisation.
        trace: What is known of the network for such inputs; None where nothing is.
        folded: Whether activations hold all draws already, (S B, ...); they do from the first noise on.
        noise: Where the random numbers of activations come from.
        example: A tensor of the inputs with these rows. Their number is then read from it, so that a network that is
            compiled is not compiled anew for every number.
    """

    kind: Kind = "fresh"
    keys: tuple[Key, ...] = ()
    part: int | Tensor | None = None
    rows: int = 0
    ood_rows: int = 0
    trace: Trace | None = None
    folded: bool = False
    noise: Noise = field(default_factory=Noise)
    calls: dict[str, int] = field(default_factory=partial(defaultdict, int))
    example: Tensor | None = None

    @property
    def batch_size(self) -> int:
        """How many examples there are, as the inputs say it."""
        return self.rows if self.example is None else self.example.shape[0]

    def inner(self) -> Pass:
        """Return the pass as the chosen part of a mixture sees it."""
        return replace(self, part=None, keys=tuple(key.inner() for key in self.keys))

    @property
    def key(self) -> Key:
        """Return the only draw of the pass."""
        (key,) = self.keys
        return key

    def called(self, site: str) -> str:
        """Count a call of a site, and return its name: a layer that is used in several places has noise in each."""
        self.calls[site] += 1
        return site if self.calls[site] == 1 else f"{site}#{self.calls[site]}"

    def perturb(
        self,
        x: Tensor,
        combine: Callable[[Tensor, Tensor], Tensor],
        *,
        site: str,
        distribution: Distribution,
        batch: BatchDim | None = None,
        channel_dim: int | tuple[int, ...] | None = None,
        per_example: bool = True,
    ) -> Tensor:
        """Combine an activation with noise.

        Args:
            x: The activation, (B, ...). Also (B r, ...), as windowed attention makes, (T, B, ...), and, for one
                draw at a time, an activation without a batch.
            combine: `combine(x, noise)`, elementwise; the noise broadcasts against x.
            site: The layer's name, as `called` returned it.
            distribution: Standard normal, uniform on [0, 1), or a mask.
            batch: Where the batch is in it; None goes by its shape.
            channel_dim: None for noise per element, else the dimensions of x, beside the batch, along which the
                noise varies.
            per_example: Whether a fresh pass has noise of its own for each example; a draw never has.

        Returns:
            A tensor of x's shape; (S B, ...) where S draws are evaluated together and x held one copy.
        """
        if self.kind == "mean":
            return x
        if not self.keys and channel_dim is None:
            return combine(x, self.noise.fresh(list(x.shape), distribution, x))
        if (not self.keys and not per_example) or batch == BatchDim(None):
            return self._without_batch(x, combine, site, distribution, channel_dim)
        draws, rows = max(len(self.keys), 1), self.batch_size
        batch_dim, copies = self.find_batch(x, site, draws, batch)
        before, after = x.shape[:batch_dim], x.shape[batch_dim + 1 :]
        inner = x.shape[batch_dim] // (copies * rows)
        grid = x.reshape(*before, copies, rows, inner, *after)
        shape = [*before, 1, inner, *after]
        if channel_dim is not None:
            shape = [1] * len(shape)
            for channel in _positions(channel_dim, x.ndim):
                shape[channel if channel < batch_dim else channel + 1] = x.shape[channel]
        if self.keys:
            noise = self.noise.drawn(self.keys, site, shape, distribution, x)
            noise = noise if batch_dim == 0 else noise.movedim(0, batch_dim)
            self.folded = True
        else:
            shape[batch_dim] = rows
            noise = self.noise.fresh(shape, distribution, x).unsqueeze(batch_dim)
        return combine(grid, noise).reshape(*before, draws * rows * inner, *after)

    def _without_batch(
        self,
        x: Tensor,
        combine: Callable[[Tensor, Tensor], Tensor],
        site: str,
        distribution: Distribution,
        channel_dim: int | tuple[int, ...] | None,
    ) -> Tensor:
        if len(self.keys) > 1:
            raise ShapeError(f"Layer {site!r} acts on something without a batch, so draws cannot share a pass.")
        shape = list(x.shape)
        if channel_dim is not None:
            channels = _positions(channel_dim, x.ndim)
            shape = [size if dim in channels else 1 for dim, size in enumerate(shape)]
        if self.keys:
            return combine(x, self.noise.drawn(self.keys, site, shape, distribution, x)[0])
        return combine(x, self.noise.fresh(shape, distribution, x))

    def find_batch(self, x: Tensor, site: str, draws: int, known: BatchDim | None) -> tuple[int, int]:
        """Return the batch's dimension in an activation, and how many copies of the batch, one per draw, it holds."""
        copies = (draws, 1) if self.folded else (1,)
        rows = self.batch_size
        found = known or BatchDim(None)
        dims = range(min(x.ndim, 2)) if found.dim is None or found.dim >= x.ndim else [found.dim]
        # An exact match first: a length that happens to be a multiple of the batch size is not the batch.
        for exact in (True, False):
            for number in copies:
                for dim in dims:
                    size, wanted = x.shape[dim], number * rows * (found.times if exact else 1)
                    if wanted and (size == wanted if exact else size % wanted == 0):
                        return dim, number
        layer = site.partition("#")[0]
        raise ShapeError(
            f"Layer {layer!r} saw an activation of shape {tuple(x.shape)} in a batch of {self.rows} examples, and "
            f"which of its dimensions is the batch is unknown. Exclude the layer: convert(..., exclude={layer!r})."
        )


def _positions(dims: int | tuple[int, ...], ndim: int) -> list[int]:
    return [dim % ndim for dim in (dims if isinstance(dims, tuple) else (dims,))]
