"""Prediction by averaging draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from bayesify._core.trees import batch_rows
from bayesify.laws import Key, Posterior, Trace
from bayesify.likelihoods import Stream
from bayesify.prediction.layout import Layout, layout_of
from bayesify.prediction.prefix import shared_prefix
from bayesify.prediction.views import ONE, Seen, Views

__all__ = ["add_draws", "add_views"]


def add_draws(posterior: Posterior, inputs: Any, keys: Sequence[Key], stream: Stream) -> None:
    """Evaluate draws on the same inputs and add their outputs to a stream.

    Draws are folded into the batch while it is small and looped over when it is large; what runs before the first
    randomness runs once. Memory does not grow with the number of draws.
    """
    with posterior.lock:
        trace = posterior.trace(inputs)
        _add(posterior, inputs, keys, stream, layout_of(posterior, inputs, keys, trace), trace)


def add_views(
    posterior: Posterior, inputs: Any, views: Views, plan: Sequence[tuple[int, Sequence[Key]]], stream: Stream
) -> None:
    """Evaluate draws on views of the inputs, as `Views.plan` has it; see `add_draws`."""
    for index, keys in plan:
        if views is ONE:
            add_draws(posterior, inputs, keys, stream)
        else:
            seen = Seen(stream, views[index], index, posterior.likelihood, inputs)
            add_draws(posterior, views[index](inputs), keys, seen)


def _add(posterior: Posterior, inputs: Any, keys: Sequence[Key], stream: Stream, layout: Layout, trace: Trace) -> None:
    passes = _passes(posterior, layout, batch_rows(inputs), keys)
    tiled = layout.joins and max(map(len, passes)) > 1
    prefix = shared_prefix(layout, 1 if tiled else len(passes))
    apart = posterior.likelihood.calibrates_parts or stream.keeps_parts
    done = 0
    try:
        for some in passes:
            outputs = posterior.evaluate(inputs, some, tiled=tiled, prefix=prefix, trace=trace)
            for part, rows in _parts(some, apart=apart):
                stream.add(outputs[rows], part=part)
            done += len(some)
    except Exception as error:
        if tiled or max(map(len, passes)) == 1:
            raise
        # These inputs may join what the first example did not: an attention mask, say, that it did not need.
        joined = replace(layout, joins=True, folded_rows=layout.rows)
        try:
            _add(posterior, inputs, keys[done:], stream, joined, trace)
        except Exception:
            raise error from None  # it is not the arrangement that fails, and others' inputs may well be right
        layout.joins, layout.folded_rows = True, layout.rows
    finally:
        if prefix is not None:
            prefix.forget()


def _passes(posterior: Posterior, layout: Layout, rows: int, keys: Sequence[Key]) -> list[Sequence[Key]]:
    """Return which draws go through the network together: as many as keep a pass in the cache, equally many in each."""
    most = layout.draws_at_once(rows)
    apart = layout.stacking is None and not posterior.law.mixes
    groups = [list(group) for _, group in groupby(keys, key=lambda key: key.path)] if apart else [list(keys)]
    found: list[Sequence[Key]] = []
    for group in groups:
        each = math.ceil(len(group) / math.ceil(len(group) / most))
        found += [group[start : start + each] for start in range(0, len(group), each)]
    return found


def _parts(keys: Sequence[Key], *, apart: bool) -> list[tuple[int, slice]]:
    """Return the parts of a mixture that draws are of, and which; all as one where they need not be told apart."""
    if not apart:
        return [(0, slice(None))]
    found, start = [], 0
    for part, group in groupby(keys, key=lambda key: key.path[0] if key.path else 0):
        stop = start + len(list(group))
        found.append((part, slice(start, stop)))
        start = stop
    return found
