"""What has to be known of a network to evaluate many draws of it quickly; learned once, on one example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bayesify._core.trees import map_tensors, repeat_rows, slice_rows
from bayesify.laws import Key, Posterior
from bayesify.prediction.reads import reads_outside

__all__ = ["Layout", "layout_of"]

# How many elements the widest activation of a pass should have, at most: smaller passes waste calls, larger ones leave
# the cache. `python -m benchmarks.predict` shows what an arrangement costs.
CPU_ELEMENTS = 2**20
DEVICE_ELEMENTS = 2**26
LEAST_ROWS = 8


@dataclass
class Layout:
    """How a posterior's passes are arranged.

    Attributes:
        rows: How many examples one pass should have.
        folded_rows: How many examples times draws it should have after the first noise.
        folds: Whether several draws can share a pass.
        joins: Whether activations from before and after the first noise meet, so that draws must be folded in at the
            inputs.
        sites: The modules at which randomness enters.
        deterministic: The modules with no such module inside.
        opaque: Whether a random tensor is read outside the module that owns it, so that nothing can be said to lie
            before the first randomness.
    """

    rows: int
    folded_rows: int
    folds: bool
    joins: bool = False
    sites: set[nn.Module] = field(default_factory=set)
    deterministic: list[nn.Module] = field(default_factory=list)
    opaque: bool = False


def layout_of(posterior: Posterior, inputs: Any, keys: Sequence[Key]) -> Layout:
    """Return the layout of a posterior, which the first call finds out.

    Draws are folded in at the first noise, which leaves what lies before it alone. A network that joins activations
    from before and after it cannot have that: its inputs are repeated instead.
    """
    noise = posterior.noise
    if noise.layout is not None:
        known: Layout = noise.layout
        return known
    twice = repeat_rows(slice_rows(inputs, 0, 1), 2)
    widest, widest_after = _widest_activations(posterior, twice, keys[:1])
    parameter = next(posterior.parameters(), None)
    on_cpu = parameter is None or parameter.device.type == "cpu"
    budget = CPU_ELEMENTS if on_cpu else DEVICE_ELEMENTS
    layout = Layout(
        rows=max(LEAST_ROWS, budget // widest),
        folded_rows=max(LEAST_ROWS, budget // widest_after),
        folds=posterior.folds,
        sites=posterior.sites(),
    )
    if posterior.network not in layout.sites:
        layout.deterministic = [m for m in posterior.network.modules() if layout.sites.isdisjoint(m.modules())]
        layout.opaque = reads_outside(posterior, twice, keys[0])
    known_now = True
    if layout.folds and not _agrees(posterior, twice, keys[0], tiled=False):
        layout.joins, layout.folded_rows = True, layout.rows
        layout.folds = _agrees(posterior, twice, keys[0], tiled=True)
        known_now = layout.folds or _is_finite(posterior, twice, keys[0])  # outputs that are NaN agree with nothing
    if known_now:
        noise.layout = layout
    return layout


def _is_finite(posterior: Posterior, twice: Any, key: Key) -> bool:
    return bool(posterior.evaluate(twice, [key]).isfinite().all())


def _agrees(posterior: Posterior, twice: Any, key: Key, *, tiled: bool) -> bool:
    """Return whether two draws together give what each gives alone."""
    keys = [key, Key(key.seed, key.index + 1, key.member)]
    alone = torch.cat([posterior.evaluate(twice, [one]) for one in keys])
    try:
        together = posterior.evaluate(twice, keys, tiled=tiled)
    except Exception:  # the same draws run alone, so it is the arrangement that fails, with whatever error
        return False
    if not alone.is_floating_point() or together.shape != alone.shape:
        return False
    tolerance = torch.finfo(alone.dtype).eps ** 0.5 * (1 + alone.abs().max())
    return bool((together - alone).abs().max() <= tolerance)


def _widest_activations(posterior: Posterior, twice: Any, keys: Sequence[Key]) -> tuple[int, int]:
    """Return the elements per example of the widest output of a module, and of the widest from the first noise on."""
    widest, widest_after, random = 1, 1, False
    sites = posterior.sites()
    posterior.evaluate(twice, keys)  # a first draw may also pass other numbers of rows, which must not be counted

    def look(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal random
        random = random or module in sites or posterior.noise.fired

        def size(tensor: Tensor) -> None:
            nonlocal widest, widest_after
            widest = max(widest, tensor.numel() // 2)
            if random:
                widest_after = max(widest_after, tensor.numel() // 2)

        map_tensors(size, output)

    handles = [module.register_forward_hook(look) for module in posterior.network.modules()]
    try:
        posterior.evaluate(twice, keys)
    finally:
        for handle in handles:
            handle.remove()
    return widest, widest_after
