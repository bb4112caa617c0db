"""Where every random number of a posterior comes from.

A posterior and its stochastic layers share one `Noise`. A layer never asks whether it is training, predicting
or drawing: it asks `Noise.perturb` to combine its activation with noise, and the mode decides which noise:

- fresh: independent noise for every example, from torch's global generator (one stochastic pass);
- mean: none;
- drawn: noise that is a function of (seed, draw, layer) alone. The same draw gives the same function on every
  input, whatever the batch, the order of calls, or how many draws are evaluated together.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bayesify.laws.modes import ModeStack
from bayesify.laws.recomputation import Guard, in_backward, refuse

__all__ = ["BatchDim", "Key", "Noise", "NoiseTerms", "ShapeError", "generator_for", "keyed_numbers", "shuffled"]

Law = Literal["normal", "uniform"]
BLOCK = 4096  # draws with little noise get it from one generator together, up to this many numbers


class ShapeError(ValueError):
    """A tensor does not have the batch where it must be."""


@dataclass(frozen=True)
class Key:
    """The name of one coherent function of a posterior.

    Attributes:
        seed: The seed of the set of draws.
        index: The position of this draw in the set.
        member: The member it belongs to, for posteriors that have members.
    """

    seed: int
    index: int = 0
    member: int | None = None


def generator_for(key: Key, site: str, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator whose stream depends on the draw, the site and the kind of device only.

    Its seed is a hash of (seed, index, site), so that sites and draws are independent of the order in which they are
    visited. Torch's CPU generator keeps the low 32 bits of a seed: among N streams two are the same with a probability
    of about N^2 / 2^33, a hundredth for 100 draws of 100 tensors.

    The streams of two devices differ: what a key names comes from `keyed_numbers`.
    """
    text = f"{key.seed}/{key.index}/{site}".encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
    return torch.Generator(device=device).manual_seed(number)


def keyed_numbers(key: Key, site: str, shape: Sequence[int], like: Tensor, law: Law = "normal") -> Tensor:
    """Return a draw's random numbers at a site, on the device of `like`, and equal on every device.

    They are made on the CPU and moved: batch-normalisation statistics are stored for the weights of a draw, which
    another device has to find again. In double precision where `like` is in it, else in single: whoever needs half
    precision rounds.

    >>> keyed_numbers(Key(0, 1), "weights", [2], torch.zeros(2))
    tensor([ 2.4039, -0.8618])
    """
    made = torch.empty(shape, dtype=torch.promote_types(like.dtype, torch.float32), device="cpu")
    generator = generator_for(key, site)
    made = made.uniform_(generator=generator) if law == "uniform" else made.normal_(generator=generator)
    return made.to(like.device, non_blocking=True)


def shuffled(number: int, seed: int) -> list[int]:
    """Return 0, ..., number - 1 in an order that the seed decides, alike on every device.

    >>> shuffled(4, seed=0)
    [0, 1, 3, 2]
    """
    return torch.randperm(number, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").tolist()


@dataclass(frozen=True)
class BatchDim:
    """Where the batch is in the activations of a site.

    Attributes:
        dim: The dimension; None for an activation without a batch, such as an embedding of positions.
        times: r where the dimension has r entries for each example, (B r, ...).
    """

    dim: int | None
    times: int = 1


@dataclass(frozen=True)
class NoiseTerms:
    """A noisy layer in one line: y = scale x + (std_scale x + std_shift) e, with e of mean zero and variance one.

    Predictors that need no draws ask a noisy layer for this, by `layer.noise_terms(*args)` with the arguments of its
    forward.

    Attributes:
        scale: Multiplies the input.
        std_scale: Multiplies the input in the standard deviation.
        std_shift: Is added there; a tensor that broadcasts against the input, or a number.
        channel_dims: The dimensions along which e varies, beside the batch; None if each entry has its own.
    """

    scale: float
    std_scale: float
    std_shift: Tensor | float = 0.0
    channel_dims: tuple[int, ...] | None = None


class Noise:
    """The noise of one posterior: its mode, and the random numbers of its layers.

    All of it is transient: copies and pickles of a posterior start in the fresh mode. A lock is held during each
    pass, which has the network to itself; modes are those of who runs it, see `ModeStack`.
    """

    def __init__(self) -> None:
        self.modes = ModeStack()
        self.fired = False
        self._rows = 0
        self._folded = False
        self._pass_mode: tuple[bool, tuple[Key, ...]] | None = None  # silent, keys; looked for once in a pass
        self._runner: int | None = None  # the thread of the present pass
        self.modes_learned = False  # whether there may be gradients of another mode than the fresh one
        self.guard = Guard(self.runs_here)
        # Where the batch is, by site; None before the first draw. Sites that are not in it go by shape.
        self.batch_dims: dict[str, BatchDim] | None = None
        self._shapes: dict[str, torch.Size] | None = None
        self._calls: Counter[str] = Counter()
        self.slots: dict[str, list[tuple[dict[str, Any], str]]] = {}  # where the network holds its random tensors
        self._blocks: dict[str, tuple[Any, Tensor]] = {}  # the last block of each site, at most BLOCK numbers
        self.layout: Any = None  # what the predictor learned about the network; only speed depends on it
        self.predictors: dict[str, Any] = {}  # the predictors without draws, likewise

    def __deepcopy__(self, memo: dict[int, Any]) -> Noise:
        """Return a new, fresh noise: modes are never copied."""
        copy = Noise()
        memo[id(self)] = copy
        return copy

    def __reduce__(self) -> tuple[type[Noise], tuple[()]]:
        """Pickle as a new, fresh noise."""
        return (Noise, ())

    @property
    def lock(self) -> Any:
        """Return the lock that a pass holds."""
        return self.modes.lock

    @property
    def silent(self) -> bool:
        """Whether there is no noise now."""
        return bool(self.modes.present("silent", False))

    @property
    def keys(self) -> tuple[Key, ...]:
        """Return the present draws; none in a fresh pass."""
        found: tuple[Key, ...] = self.modes.present("keys", ())
        return found

    @property
    def member(self) -> int | None:
        """Return the present member; None where none is chosen."""
        found: int | None = self.modes.present("member", None)
        return found

    @property
    def foreign(self) -> int:
        """Return how many of the last rows are foreign inputs, which must not enter statistics."""
        return int(self.modes.present("foreign", 0))

    @property
    def assigned(self) -> Tensor | None:
        """Return the component of each row of a fresh pass, where there are components and they were given."""
        found: Tensor | None = self.modes.present("assigned", None)
        return found

    def mode(self, *, silent: bool = False, keys: tuple[Key, ...] = ()) -> AbstractContextManager[None]:
        """Set the mode for a while: silent, drawn (keys), or fresh (neither)."""
        return self.modes.enter(silent=silent, keys=keys)

    def of_member(self, member: int | None) -> AbstractContextManager[None]:
        """Fix the member for a while."""
        return self.modes.enter(member=member)

    def foreign_rows(self, count: int) -> AbstractContextManager[None]:
        """Mark the last rows of the passes inside as foreign."""
        return self.modes.enter(foreign=count)

    def of_components(self, assigned: Tensor) -> AbstractContextManager[None]:
        """Give the rows of the passes inside these components."""
        return self.modes.enter(assigned=assigned)

    @contextmanager
    def one_pass(self, rows: int, *, folded: bool = False) -> Iterator[None]:
        """Mark a pass over `rows` examples; `folded` says that the inputs hold every draw already.

        A pass inside a pass (a posterior made of a posterior) belongs to the outer one.
        """
        with self.lock:
            before = (self._rows, self._folded, self.fired, self._runner, self._pass_mode)
            self._runner, self._pass_mode = threading.get_ident(), (self.silent, self.keys)
            inner = self._rows > 0
            if not inner:
                self._rows, self._folded, self.fired = rows, folded, False
                self._calls.clear()
            if any(self._pass_mode) and torch.is_grad_enabled():
                self.modes_learned = True
            try:
                yield
            finally:
                if inner:
                    before = (self._rows, self._folded, self.fired, *before[3:])
                self._rows, self._folded, self.fired, self._runner, self._pass_mode = before

    @property
    def rows(self) -> int:
        """Return the number of examples of the present pass; 0 outside of one."""
        return self._rows

    @property
    def in_pass(self) -> bool:
        """Whether a pass is under way."""
        return self._rows > 0

    def runs_here(self) -> bool:
        """Return whether the present thread is inside a pass."""
        return self._runner == threading.get_ident()

    @contextmanager
    def recorded_shapes(self) -> Iterator[dict[str, torch.Size]]:
        """Note the shapes of the activations that reach each site."""
        with self.lock:
            before, self._shapes = self._shapes, {}
            try:
                yield self._shapes
            finally:
                self._shapes = before

    def perturb(
        self,
        x: Tensor,
        combine: Callable[[Tensor, Tensor], Tensor],
        *,
        site: str,
        law: Law,
        channel_dim: int | tuple[int, ...] | None = None,
        per_example: bool = True,
    ) -> Tensor:
        """Combine an activation with noise.

        Args:
            x: The activation, (B, ...). Also (B r, ...), as windowed attention makes, (T, B, ...), and, for one
                draw at a time, an activation without a batch.
            combine: `combine(x, noise)`, elementwise; the noise broadcasts against x.
            site: The layer's name in its posterior.
            law: Standard normal, or uniform on [0, 1).
            channel_dim: None for noise per element, else the dimensions of x, beside the batch, along which the
                noise varies.
            per_example: Whether a fresh pass has noise of its own for each example; a draw never has.

        Returns:
            A tensor of x's shape; (S B, ...) where S draws are evaluated together and x held one copy.
        """
        if in_backward() and not self.runs_here():
            self._check_repeatable(site, channel_dim)
        site = self._called(site)
        if self._shapes is not None:
            self._shapes[site] = x.shape
        silent, keys = self._present()
        if silent:
            return x
        self.fired = True
        if not keys and channel_dim is None:
            return combine(x, _random(list(x.shape), law, x, None))
        shared = not keys and not per_example
        if shared or (self.batch_dims or {}).get(site) == BatchDim(None):
            return self._perturb_without_batch(x, combine, site, law, channel_dim)
        draws, rows = max(len(keys), 1), self._rows
        batch_dim, copies = self._find_batch(x, site, draws)
        before, after = x.shape[:batch_dim], x.shape[batch_dim + 1 :]
        inner = x.shape[batch_dim] // (copies * rows)
        grid = x.reshape(*before, copies, rows, inner, *after)
        shape = [*before, 1, 1, inner, *after]
        if channel_dim is not None:
            shape = [1] * len(shape)
            for channel in _positions(channel_dim, x.ndim):
                shape[channel if channel < batch_dim else channel + 2] = x.shape[channel]
        if keys:
            noise = self._drawn(site, shape, law, x).movedim(0, batch_dim).flatten(batch_dim, batch_dim + 1)
            self._folded = True
        else:
            shape[batch_dim + 1] = rows
            noise = _random(shape, law, x, None)
        return combine(grid, noise).reshape(*before, draws * rows * inner, *after)

    def alone(self, site: str, shape: list[int], law: Law, like: Tensor) -> Tensor | None:
        """Return the noise of a site where one draw is evaluated by itself, so that a layer can take other tensors.

        None in every other mode: `perturb` has to be called then.
        """
        silent, keys = self._present()
        if silent or len(keys) != 1 or self._shapes is not None:
            return None
        self.fired = True
        return self._drawn(self._called(site), shape, law, like)[0]

    def _check_repeatable(self, site: str, channel_dim: int | tuple[int, ...] | None) -> None:
        """Raise unless noise that is asked for again in the backward pass is what it was.

        Masks of single entries are in a fresh pass: checkpointing puts torch's generator back before.
        """
        if channel_dim is not None:
            refuse(f"Layer {site!r}", "where its noise cannot be told apart by example")
        if self.modes_learned:
            refuse(f"Layer {site!r}", "where it is not known any more whether a draw or the mean was asked for")

    def _present(self) -> tuple[bool, tuple[Key, ...]]:
        return self._pass_mode or (self.silent, self.keys)

    def _called(self, site: str) -> str:
        # A layer that forward uses in several places has noise of its own in each.
        self._calls[site] += 1
        return site if self._calls[site] == 1 else f"{site}#{self._calls[site]}"

    def _perturb_without_batch(
        self,
        x: Tensor,
        combine: Callable[[Tensor, Tensor], Tensor],
        site: str,
        law: Law,
        channel_dim: int | tuple[int, ...] | None,
    ) -> Tensor:
        _, keys = self._present()
        if len(keys) > 1:
            raise ShapeError(f"Layer {site!r} acts on something without a batch, so draws cannot share a pass.")
        shape = list(x.shape)
        if channel_dim is not None:
            channels = _positions(channel_dim, x.ndim)
            shape = [size if dim in channels else 1 for dim, size in enumerate(shape)]
        noise = self._drawn(site, shape, law, x)[0] if keys else _random(shape, law, x, None)
        return combine(x, noise)

    def _drawn(self, site: str, shape: list[int], law: Law, like: Tensor) -> Tensor:
        """Return the noise of the present draws, (S, *shape).

        Small noise is made for a block of successive draws by one generator, and kept, so that twenty draws cost one
        call; the block's size depends on the shape alone, so that a draw's noise does not depend on what it is
        evaluated together with.
        """
        _, keys = self._present()
        block = max(1, BLOCK // max(1, math.prod(shape)))
        if block == 1:
            return torch.stack([_random(shape, law, like, (key, site)) for key in keys])
        rows = []
        for key in keys:
            first = Key(key.seed, key.index // block)
            wanted = (first, tuple(shape), law, like.dtype, like.device)
            if self._blocks.get(site, (None,))[0] != wanted:
                made = _random([block, *shape], law, like, (first, site))
                self._blocks[site] = (wanted, made)
            rows.append(self._blocks[site][1][key.index % block])
        return torch.stack(rows)

    def _find_batch(self, x: Tensor, site: str, draws: int) -> tuple[int, int]:
        """Return the batch's dimension in an activation, and how many copies of the batch, one per draw, it holds."""
        copies = (draws, 1) if self._folded else (1,)
        known = (self.batch_dims or {}).get(site, BatchDim(None))
        dims = range(min(x.ndim, 2)) if known.dim is None or known.dim >= x.ndim else [known.dim]
        # An exact match first: a length that happens to be a multiple of the batch size is not the batch.
        for exact in (True, False):
            for number in copies:
                for dim in dims:
                    size, wanted = x.shape[dim], number * self._rows * (known.times if exact else 1)
                    if wanted and (size == wanted if exact else size % wanted == 0):
                        return dim, number
        layer = site.partition("#")[0]
        raise ShapeError(
            f"Layer {layer!r} saw an activation of shape {tuple(x.shape)} in a batch of {self._rows} examples, and "
            f"which of its dimensions is the batch is unknown. Exclude the layer: convert(..., exclude={layer!r})."
        )


def _positions(dims: int | tuple[int, ...], ndim: int) -> list[int]:
    return [dim % ndim for dim in (dims if isinstance(dims, tuple) else (dims,))]


def _random(shape: list[int], law: Law, like: Tensor, draw: tuple[Key, str] | None) -> Tensor:
    """Return the noise of a draw at a site, or fresh noise."""
    # Half-precision uniforms are too coarse to compare with a rate, and half-precision normals slower.
    if draw is not None:
        noise = keyed_numbers(*draw, shape, like, law)
    else:
        noise = torch.empty(shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
        noise = noise.uniform_() if law == "uniform" else noise.normal_()
    return noise if law == "uniform" else noise.to(like.dtype)
