"""How passes are arranged: how many examples in one, how many draws beside them, and what runs once for all draws.

All of it follows from a trace of the network, and is found out once for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from bayesify._core.modes import all_modules, first_parameter
from bayesify._core.trees import repeat_rows, slice_rows
from bayesify.laws import Key, Posterior, Trace
from bayesify.laws.stacking import Stacking
from bayesify.laws.tensors import batch_norms

__all__ = ["Layout", "layout_of", "rows_per_pass"]

# How many elements the widest activation of a pass should have, at most: smaller passes waste calls, larger ones leave
# the cache. `python -m benchmarks.predict` shows what an arrangement costs.
CPU_ELEMENTS = 2**20
DEVICE_ELEMENTS = 2**26
LEAST_ROWS = 8
# How many weights are put side by side in one pass, at most: as many as are kept for the next prediction.
STACKED = 2**24
# Of a draw, beyond which convolutions with one weight are as fast as one with groups.
FEW_ROWS = 4


@dataclass
class Layout:
    """How the passes of draws are arranged.

    Attributes:
        rows: How many examples one pass should have.
        folded_rows: How many examples times draws it should have after the first noise.
        folds: Whether several draws can share a pass.
        joins: Whether activations from before and after the first noise meet, so that draws must be folded in at the
            inputs.
        sites: The modules at which randomness enters.
        deterministic: The modules with no such module inside.
        opaque: Whether a tensor of a random module is read outside of it, so that nothing can be said to lie before the
            first randomness.
        stacking: How layers have tensors for each draw; None where draws are rows of a batch.
    """

    rows: int
    folded_rows: int
    folds: bool
    joins: bool = False
    sites: set[nn.Module] = field(default_factory=set)
    deterministic: list[nn.Module] = field(default_factory=list)
    opaque: bool = False
    stacking: Stacking | None = None

    def draws_at_once(self, rows: int) -> int:
        """Return how many draws of so many examples one pass should have, at most."""
        if not self.folds:
            return 1
        most = max(1, self.folded_rows // rows)
        if self.stacking is None:
            return most
        if self.stacking.convolves and rows > FEW_ROWS:
            return 1
        return min(most, max(1, STACKED // self.stacking.size))


def rows_per_pass(posterior: Posterior, trace: Trace, rows: int) -> int:
    """Return how many of some examples one pass should have; all of them where nothing is known, or if they are few."""
    if trace.failure is not None or rows <= LEAST_ROWS:
        return max(1, rows)
    widest: int = trace.conclude("widest", lambda: trace.widest()[0])
    return max(LEAST_ROWS, _budget(posterior) // widest)


def layout_of(posterior: Posterior, inputs: Any, keys: Sequence[Key], trace: Trace | None = None) -> Layout:
    """Return the layout for such inputs, which the first call finds out.

    Draws are folded in at the first noise, which leaves what lies before it alone. A network that joins activations
    from before and after it cannot have that: its inputs are repeated instead. Whether two draws together give what
    each gives alone is tried, in three passes on two copies of a row, or four.

    Args:
        posterior: The posterior.
        inputs: The inputs.
        keys: The draws.
        trace: `posterior.trace(inputs)`, where it is known.
    """
    trace = trace or posterior.trace(inputs)
    several = len(keys) > 1
    # A batch norm that learns has statistics of one draw's rows. A bank that was empty has samples later.
    modules: list[nn.Module] = trace.conclude("modules", lambda: all_modules(posterior.network))
    training = any(m.training for m in modules)
    learning = training and any(m.training for m in batch_norms(posterior.network).values())
    key = ("layout", posterior.law.functions, several, learning)
    if key in trace.memo:
        known: Layout = trace.memo[key]
        return known
    layout, certain = _layout(posterior, trace, alone=learning), True
    if layout.folds and several:
        certain = _try_folding(posterior, layout, repeat_rows(slice_rows(inputs, 0, 1), 2), keys)
    if certain:
        trace.memo[key] = layout
    return layout


def _budget(posterior: Posterior) -> int:
    parameter = first_parameter(posterior)
    return CPU_ELEMENTS if parameter is None or parameter.device.type == "cpu" else DEVICE_ELEMENTS


def _layout(posterior: Posterior, trace: Trace, *, alone: bool) -> Layout:
    network, law = posterior.network, posterior.law
    if trace.failure is not None:
        return Layout(rows=1, folded_rows=1, folds=False, opaque=True)
    sites = law.sites()
    widest, widest_after = trace.widest(name for name, module in network.named_modules() if module in sites)
    budget = _budget(posterior)
    layout = Layout(
        rows=max(LEAST_ROWS, budget // widest),
        folded_rows=max(LEAST_ROWS, budget // widest_after),
        folds=not alone and law.together(trace) != "one",
        sites=sites,
        stacking=None if alone else law.stacking(trace),
    )
    if network not in sites:
        layout.deterministic = [m for m in network.modules() if sites.isdisjoint(m.modules())]
        layout.opaque = any(
            trace.is_read_outside(tensor)
            for site in sites
            for whole in [isinstance(site, nn.MultiheadAttention)]  # which reads its projection without calling it
            for tensor in (*site.parameters(recurse=whole), *site.buffers(recurse=whole))
        )
    return layout


def _try_folding(posterior: Posterior, layout: Layout, twice: Any, keys: Sequence[Key]) -> bool:
    """Find out how draws fold, if they do; return whether that is certain."""
    first = keys[0]
    keys = [first, replace(first, index=first.index + 1) if layout.stacking is None else keys[-1]]
    try:
        alone = torch.cat([posterior.evaluate(twice, [one]) for one in keys])
    except Exception:  # on rows that nobody gave; if it is not the rows, the user's own pass will say so
        layout.folds = False
        return True
    if _agrees(posterior, twice, keys, alone, tiled=False):
        return True
    layout.joins, layout.folded_rows = True, layout.rows
    layout.folds = _agrees(posterior, twice, keys, alone, tiled=True)
    return layout.folds or bool(alone.isfinite().all())  # outputs that are NaN agree with nothing


def _agrees(posterior: Posterior, twice: Any, keys: Sequence[Key], alone: Tensor, *, tiled: bool) -> bool:
    """Return whether two draws together give what each gives alone."""
    try:
        together = posterior.evaluate(twice, keys, tiled=tiled)
    except Exception:  # the same draws run alone, so it is the arrangement that fails, with whatever error
        return False
    if not alone.is_floating_point() or together.shape != alone.shape:
        return False
    tolerance = torch.finfo(alone.dtype).eps ** 0.5 * (1 + alone.abs().max())
    return bool((together - alone).abs().max() <= tolerance)
