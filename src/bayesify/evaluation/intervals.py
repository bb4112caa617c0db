"""How far chance alone may have moved a measure: intervals from resampled test sets."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from bayesify.evaluation.measures.arguments import check_count, check_share

__all__ = ["Interval", "check_level", "interval"]


@dataclass(frozen=True)
class Interval:
    """A number that was measured on some examples, and where it may lie for others like them.

    Attributes:
        value: What was measured.
        low: Lower end.
        high: Upper end.
        level: In this share of all test sets such an interval holds the truth.

    Example:
        >>> found = Interval(0.25, 0.2, 0.31, level=0.95)
        >>> 0.3 in found, 0 in found, str(found)
        (True, False, '0.25 [0.2, 0.31]')
    """

    value: float
    low: float
    high: float
    level: float

    def __contains__(self, number: float) -> bool:
        """Whether a number lies between the ends, both included."""
        return self.low <= number <= self.high

    def __str__(self) -> str:
        """Return the value and the ends."""
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"

    def to_dict(self) -> dict[str, float | None]:
        """Return plain values; a number that is not finite becomes None."""
        return {name: number if math.isfinite(number) else None for name, number in vars(self).items()}


def interval(value: float, replicates: Tensor, level: float, floors: Tensor | None = None) -> Interval:
    """Return the percentile interval: the quantiles (1 - level) / 2 and (1 + level) / 2 of the replicates.

    Efron & Tibshirani, "An Introduction to the Bootstrap", 1993, section 13.3. It needs no derivative, stays in the
    range of the measure, and is the same for single measures and differences. BCa intervals have ends that are missed
    more evenly, and were hardly more often right on these measures. The value is always inside.

    Args:
        value: The measure on the data.
        replicates: The measure on resampled data (R,); those that are not a number are left out.
        level: Share of test sets for which the interval should hold the truth.
        floors: Numbers (R,) whose low quantile is the lower end, where the replicates are too large.

    Returns:
        The interval.

    Example:
        >>> import torch
        >>> str(interval(0.5, torch.linspace(0, 1, 101), level=0.9))
        '0.5 [0.05, 0.95]'
    """
    check_level(level, len(replicates))
    tail = (1 - level) / 2
    low = _quantile(replicates if floors is None else floors.clamp(min=0), tail)
    return Interval(value, min(low, value), max(_quantile(replicates, 1 - tail), value), level)


def check_level(level: float, num_replicates: int) -> None:
    """Raise where a level is no share, or there are too few replicates for its ends."""
    level = check_share(level, "level")
    least = math.ceil(round(2 / (1 - level), 6))
    if check_count(num_replicates, "num_replicates") < least:
        raise ValueError(
            f"{num_replicates} replicates are too few for the ends of intervals of level {level}; take {least}."
        )


def _quantile(values: Tensor, share: float) -> float:
    """Return a quantile with linear interpolation between neighbours, which may be infinite."""
    ordered = values[~values.isnan()].sort().values.tolist()
    if not ordered:
        return math.nan
    place = share * (len(ordered) - 1)
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    if below == above or math.isinf(below):  # between minus infinity and a number there is no other
        return float(below)
    return float(below + (place - math.floor(place)) * (above - below))
