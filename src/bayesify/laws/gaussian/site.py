"""What a random layer knows of the pass that it is in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from bayesify.laws.gaussian.functions import normals
from bayesify.laws.passes import BatchDim

__all__ = ["Arrangement", "Estimator", "Site", "Visit", "Visits"]

Estimator = Literal["auto", "exemplar", "local", "flipout", "shared"]
_STREAMS = {"weight": 1, "bias": 2}  # the layer's product has the seed itself


@dataclass(frozen=True)
class Site:
    """A layer whose noise differs between examples.

    Attributes:
        name: The layer's name.
        random: Names of its random parameters in the network, by their name in the layer.
        calls: Where the batch is in the input of each call; None where that is unknown, and empty if no call was seen.
    """

    name: str
    random: Mapping[str, str]
    calls: tuple[BatchDim | None, ...] = ()


@dataclass
class Visits:
    """The visits of layers in one stochastic pass: a module that is called twice has the same noise in both calls.

    Attributes:
        rows: The number of examples.
        kind: The kind of noise that was asked for.
        log_stds: Logarithms of the standard deviations by name.
        ood_rows: How many of the last rows are OOD inputs, which must not enter statistics.
    """

    rows: int
    kind: Estimator
    log_stds: Mapping[str, Tensor]
    ood_rows: int = 0
    seeds: dict[str, int] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)

    def visit(self, site: Site, x: Tensor) -> Visit:
        """Return what the layer's present call needs."""
        call = self.calls[site.name]
        self.calls[site.name] += 1
        if site.name not in self.seeds:
            self.seeds[site.name] = int(torch.randint(2**62, ()))
        known = site.calls[call] if call < len(site.calls) else None
        return Visit(self, site, Arrangement.find(x, self.rows, known), self.seeds[site.name], call)


@dataclass(frozen=True)
class Visit:
    """One call of a layer in a pass."""

    present: Visits
    site: Site
    batch: Arrangement
    seed: int
    call: int

    @property
    def kind(self) -> Estimator:
        """Return the kind of noise that was asked for."""
        return self.present.kind

    def std(self, name: str) -> Tensor | None:
        """Return the standard deviation of one of the layer's parameters, or None if it is not random."""
        full = self.site.random.get(name)
        return None if full is None else self.present.log_stds[full].exp()

    def log_std(self, name: str) -> Tensor | None:
        """Return its logarithm."""
        full = self.site.random.get(name)
        return None if full is None else self.present.log_stds[full]

    @property
    def once(self) -> bool:
        """Whether the layer is known to be called once in a pass."""
        if self.call and len(self.site.calls) == 1:
            raise RuntimeError(
                f"Layer {self.site.name!r} was called once in evaluation mode and is called again now, so that its "
                "noise cannot be integrated out. Use estimator='exemplar' or estimator='flipout'."
            )
        return len(self.site.calls) == 1

    def each(self, name: str, mean: Tensor, rows: int | None = None) -> Tensor:
        """Draw a small parameter, a bias or a scale, for each example: (B, *mean)."""
        std = self.std(name)
        rows = self.batch.rows if rows is None else rows
        if std is None:
            return mean.expand(rows, *mean.shape)
        generator = torch.Generator(mean.device).manual_seed(self.seed + _STREAMS[name])
        return mean + std.to(mean.dtype) * normals([rows, *mean.shape], mean, generator)


@dataclass(frozen=True)
class Arrangement:
    """Where the examples are in an activation.

    Attributes:
        rows: How many independent draws there are: the examples, or 1 if the activation has no batch.
        dim: The batch's dimension.
    """

    rows: int
    dim: int | None

    @classmethod
    def find(cls, x: Tensor, rows: int, known: BatchDim | None) -> Arrangement:
        """Find the batch; an activation in which it is not to be seen gets one draw."""
        dim = 0 if known is None else known.dim
        if dim is None or dim >= x.ndim or rows < 1 or x.shape[dim] % rows or not x.shape[dim]:
            return cls(1, None)
        return cls(rows, dim)

    def split(self, x: Tensor) -> Tensor:
        """Turn an activation into (B, r, ...): examples first, r entries of the batch's dimension for each."""
        if self.dim is None:
            return x[None]
        first = x.movedim(self.dim, 0)
        return first.reshape(self.rows, first.shape[0] // self.rows, *first.shape[1:])

    def join(self, x: Tensor) -> Tensor:
        """Turn (B, r, ...) back."""
        if self.dim is None:
            return x[0]
        return x.flatten(0, 1).movedim(0, self.dim)
