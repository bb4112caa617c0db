"""Every generator that training draws from: kept, seeded, saved and put back."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["generators", "global_generators_kept", "random_state", "restore_random_state", "seed_part"]

Loader = Iterable[Any] | None


def generators(*loaders: Loader) -> list[torch.Generator]:
    """Return the generators that loaders and their samplers own, each once.

    >>> own = torch.Generator()
    >>> data = torch.utils.data.TensorDataset(torch.zeros(4))
    >>> generators(torch.utils.data.DataLoader(data, shuffle=True, generator=own)) == [own]
    True
    """
    found: dict[int, torch.Generator] = {}
    for loader in loaders:
        sampler = getattr(loader, "sampler", None)
        batch_sampler = getattr(loader, "batch_sampler", None)
        for owner in (loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
            own = getattr(owner, "generator", None)
            if isinstance(own, torch.Generator):
                found[id(own)] = own
    return list(found.values())


def seed_part(seed: int, stage: int, epoch: int, rank: int) -> int:
    """Seed the global generators of torch, Python and NumPy for a part of a run, and return the number they got.

    Args:
        seed: Of the run.
        stage: Which stage; -1 for measurements, which belong to none.
        epoch: Which epoch of it; -1 for what comes before the first.
        rank: Of the process; 0 for what is the same in all.
    """
    text = f"{seed}/{stage}/{epoch}/{rank}".encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big")
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)
    return number


def random_state(*loaders: Loader) -> dict[str, Any]:
    """Return the state of every generator that training draws from."""
    kind, words, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "devices": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "loaders": [own.get_state() for own in generators(*loaders)],
        "python": random.getstate(),
        "numpy": (kind, np.asarray(words).astype(np.int64), *rest),
    }


def restore_random_state(state: dict[str, Any], *loaders: Loader) -> None:
    """Put every generator back."""
    torch.set_rng_state(state["torch"])
    if state["devices"]:
        torch.cuda.set_rng_state_all(state["devices"])
    for own, saved in zip(generators(*loaders), state["loaders"], strict=True):
        own.set_state(saved)
    random.setstate(state["python"])
    kind, words, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(words).astype(np.uint32), *rest))


@contextmanager
def global_generators_kept() -> Iterator[None]:
    """Put the global generators back in the end, whatever happens."""
    before = random_state()
    try:
        yield
    finally:
        restore_random_state(before)
