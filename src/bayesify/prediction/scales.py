"""Numbers that variances are multiplied by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

__all__ = ["Scale", "check_scales"]

Scale = float | Mapping[str, float]


def check_scales(scales: Mapping[str, float], layers: Sequence[str]) -> None:
    """Raise where a layer has no scale, or a scale is no such number."""
    unknown = [layer for layer in scales if layer not in layers]
    if unknown:
        raise ValueError(f"There is no layer {unknown[0]!r} with Gaussian weights; there are {list(layers)}.")
    if any(not 0 <= scale < math.inf for scale in scales.values()):
        raise ValueError(f"Scales of variances must be at least 0 and finite, but they are {dict(scales)}.")
