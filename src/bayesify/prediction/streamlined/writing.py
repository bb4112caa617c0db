"""Operations that write some entries of one tensor into another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bayesify.prediction.streamlined.moments import Moments, NoRuleError, centre, moment_rule, variance_of
from bayesify.prediction.streamlined.products import joint_share

__all__: list[str] = []


def _spread(x: Any, like: Tensor) -> Any:
    """Return the variance of what is written, which a number does not have."""
    return variance_of(x) if isinstance(x, Tensor) else torch.zeros((), dtype=like.dtype, device=like.device)


def _placed(name: str) -> Any:
    """Return the rule of an operation that puts entries in the place of others."""
    operation = getattr(torch, name)

    def rule(input: Any, dim: int, index: Tensor, src: Any = None, *, value: Any = None, reduce: Any = None) -> Any:
        """Put entries, and their variances, in the place of others."""
        if reduce is not None:
            return NotImplemented
        source = value if src is None else src
        given = source if isinstance(source, Tensor) else None
        mean = operation(centre(input), dim, index, centre(source))
        spread = variance_of(given) if given is not None else 0.0
        return Moments.make(mean, operation(variance_of(input), dim, index, spread), joint_share(input, source))

    return rule


for _name in ("scatter", "index_copy", "index_fill"):
    moment_rule(getattr(torch, _name), getattr(Tensor, _name), kind="exact")(_placed(_name))


def _added(name: str) -> Any:
    """Return the rule of an operation that adds entries up where they belong."""
    operation = getattr(torch, name)

    def rule(input: Any, dim: int, index: Tensor, src: Any = None, *, source: Any = None, alpha: float = 1) -> Any:
        """Add variances where entries are added; what is written in one place counts as independent."""
        more = source if src is None else src
        mean = operation(centre(input), dim, index, alpha * centre(more))
        variance = operation(variance_of(input), dim, index, alpha**2 * variance_of(more))
        return Moments.make(mean, variance, joint_share(input, more))

    return rule


for _name in ("scatter_add", "index_add"):
    moment_rule(getattr(torch, _name), getattr(Tensor, _name), kind="exact")(_added(_name))


@moment_rule(Tensor.__setitem__, kind="exact")
def _setitem(input: Any, key: Any, value: Any) -> None:
    """Write entries, and their variances."""
    if not isinstance(input, Moments):
        raise NoRuleError("Writing random entries into a tensor that is not random (x[...] = y)")
    with input.written():
        input.centre[key] = centre(value)
        input.variance[key] = _spread(value, input.variance)
    input.shared = joint_share(input, value) if isinstance(value, Moments) else input.shared


@moment_rule(torch.baddbmm, Tensor.baddbmm, kind="exact")
def _baddbmm(input: Any, batch1: Any, batch2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """Return beta x + alpha a b."""
    return beta * input + alpha * torch.bmm(batch1, batch2)
