"""Random numbers that are a function of a draw's name and a place in the network."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = [
    "Distribution",
    "Key",
    "Mask",
    "Noise",
    "generator_for",
    "keyed_numbers",
    "keyed_rows",
    "numbered_keys",
    "shuffled",
    "spread_keys",
]

BLOCK = 4096  # draws with little noise get it from one generator together, up to this many numbers
FEW = 2**16  # numbers of several draws at a site that are kept for the next pass of the same draws, at most


@dataclass(frozen=True)
class Key:
    """The name of one coherent function of a posterior.

    Attributes:
        seed: The seed of the set of draws.
        index: The position of this draw in the set.
        path: Which part of a mixture it belongs to, which part of that part, and so on; empty without mixtures.
    """

    seed: int
    index: int = 0
    path: tuple[int, ...] = ()

    def inner(self) -> Key:
        """Return the key as the part sees it that the path begins with."""
        return Key(self.seed, self.index, self.path[1:])


@lru_cache(maxsize=64)
def numbered_keys(count: int, seed: int) -> tuple[Key, ...]:
    """Name the draws 0, ..., count - 1 of a seed: the same objects each time, which compare quickly."""
    return tuple(Key(seed, index) for index in range(count))


@lru_cache(maxsize=64)
def spread_keys(count: int, seed: int, parts: int) -> tuple[Key, ...]:
    """Name draws that are spread evenly over the parts of a mixture; which of them get one more, the seed decides.

    >>> [key.path for key in spread_keys(3, seed=0, parts=2)]
    [(0,), (0,), (1,)]
    """
    order = shuffled(parts, seed)
    chosen = sorted(order[index % parts] for index in range(count))
    return tuple(Key(seed, index, (part,)) for index, part in enumerate(chosen))


@dataclass(frozen=True)
class Mask:
    """Numbers that are 0 with a probability, and 1 / divisor else.

    Attributes:
        rate: The probability.
        divisor: What the others are divided by.
    """

    rate: float
    divisor: float = 1.0

    def of(self, uniform: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the mask that uniform numbers make, in a type."""
        kept = (uniform >= self.rate).to(dtype)
        return kept if self.divisor == 1 else kept / self.divisor


Distribution = Literal["normal", "uniform"] | Mask


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


def keyed_numbers(
    key: Key, site: str, shape: Sequence[int], like: Tensor, distribution: Literal["normal", "uniform"] = "normal"
) -> Tensor:
    """Return a draw's random numbers at a site, on the device of `like`, and equal on every device.

    They are made on the CPU and moved: batch-normalisation statistics are stored for the weights of a draw, which
    another device has to find again. In double precision where `like` is in it, else in single: whoever needs half
    precision rounds.

    >>> keyed_numbers(Key(0, 1), "weights", [2], torch.zeros(2))
    tensor([ 2.4039, -0.8618])
    """
    made = torch.empty(shape, dtype=torch.promote_types(like.dtype, torch.float32), device="cpu")
    generator = generator_for(key, site)
    made = made.uniform_(generator=generator) if distribution == "uniform" else made.normal_(generator=generator)
    return made.to(like.device, non_blocking=True)


def keyed_rows(keys: Sequence[Key], site: str, shape: Sequence[int], like: Tensor) -> Tensor:
    """Return several draws' normal numbers at a site, (S, *shape): row by row those of `keyed_numbers`."""
    made = torch.empty((len(keys), *shape), dtype=torch.promote_types(like.dtype, torch.float32), device="cpu")
    for row, key in zip(made, keys, strict=True):
        row.normal_(generator=generator_for(key, site))
    return made.to(like.device, non_blocking=True)


def shuffled(number: int, seed: int) -> list[int]:
    """Return 0, ..., number - 1 in an order that the seed decides, alike on every device.

    >>> shuffled(4, seed=0)
    [0, 1, 3, 2]
    """
    return torch.randperm(number, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").tolist()


class Noise:
    """The random numbers of activations: for (key, site), or fresh ones from torch's global generator.

    Small noise is made for a block of successive draws by one generator, and kept, so that twenty draws cost one call;
    the block's size depends on the shape alone, so that a draw's noise does not depend on what it is evaluated
    together with. What draws of several blocks have together is kept too, for the next pass of the same draws.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, tuple[Any, Tensor]] = {}  # the last of each site
        self._joined: dict[str, tuple[Any, Tensor]] = {}  # the last of each site, at most FEW numbers

    def __deepcopy__(self, memo: dict[int, Any]) -> Noise:
        """Return an empty one: what is kept is only for speed."""
        copied = memo[id(self)] = Noise()
        return copied

    def __reduce__(self) -> tuple[type[Noise], tuple[()]]:
        """Pickle as an empty one."""
        return (Noise, ())

    def drawn(
        self, keys: Sequence[Key], site: str, shape: list[int], distribution: Distribution, like: Tensor
    ) -> Tensor:
        """Return the numbers of draws at a site, (S, *shape), which are not to be written to."""
        block = max(1, BLOCK // max(1, math.prod(shape)))
        if block == 1:
            return torch.stack([_keyed(key, site, shape, distribution, like) for key in keys])
        kind = (tuple(shape), distribution, like.dtype, like.device)
        together = (tuple(keys), kind)
        known = self._joined.get(site)
        if known is not None and known[0] == together:
            return known[1]
        rows: list[Tensor] = []
        for (seed, number), group in groupby(keys, key=lambda key: (key.seed, key.index // block)):
            wanted = (Key(seed, number), kind)
            if self._blocks.get(site, (None,))[0] != wanted:
                self._blocks[site] = (wanted, _keyed(wanted[0], site, [block, *shape], distribution, like))
            rows.append(self._blocks[site][1][[key.index % block for key in group]])
        if len(rows) == 1:
            return rows[0]
        made = torch.cat(rows)
        if made.numel() <= FEW:
            self._joined[site] = (together, made)
        return made

    def fresh(self, shape: list[int], distribution: Distribution, like: Tensor) -> Tensor:
        """Return new numbers."""
        made = torch.empty(shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
        if isinstance(distribution, Mask):
            return distribution.of(made.uniform_(), like.dtype)
        return made.uniform_() if distribution == "uniform" else made.normal_().to(like.dtype)


def _keyed(key: Key, site: str, shape: list[int], distribution: Distribution, like: Tensor) -> Tensor:
    # Half-precision uniforms are too coarse to compare with a rate, and half-precision normals slower.
    if isinstance(distribution, Mask):
        return distribution.of(keyed_numbers(key, site, shape, like, "uniform"), like.dtype)
    made = keyed_numbers(key, site, shape, like, distribution)
    return made if distribution == "uniform" else made.to(like.dtype)
