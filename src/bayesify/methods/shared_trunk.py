"""Members that share a trunk: what is the same for all of them is computed once in a training step too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bayesify.laws import Key, Posterior
from bayesify.prediction.layout import layout_of
from bayesify.prediction.prefix import shared_prefix

__all__ = ["all_outputs"]


def all_outputs(posterior: Posterior, inputs: Any, members: Sequence[int]) -> list[Tensor]:
    """Return the outputs (B, ...) of each member on the same inputs, with their gradients.

    Costs one pass of what comes before the members' first own tensor, and a pass of the rest for each.

    Args:
        posterior: A mixture whose members have no noise.
        inputs: B examples.
        members: Which members.
    """
    keys = [Key(0, index, (index,)) for index in members]
    prefix = shared_prefix(layout_of(posterior, inputs, keys), len(keys))
    try:
        return [posterior.evaluate(inputs, [key], prefix=prefix)[0] for key in keys]
    finally:
        if prefix is not None:
            prefix.forget()
