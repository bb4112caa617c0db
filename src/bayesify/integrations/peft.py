"""peft: a draw of a Bayesian adapter, merged into the weights of the base model."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from bayesify.laws import Draw
from bayesify.layers import adapter_layers

__all__ = ["merge"]


def merge(draw: Draw) -> nn.Module:
    """Merge a draw of an adapter into the base weights: W + scale B A for LoRA.

    The result is the plain model that peft was given, with the weights of one draw: it generates, serves and exports as
    any other, and computes what the draw computes, to rounding. It has memory of its own, that of the whole model.

    Args:
        draw: `posterior.draw(seed)` of a posterior that was converted from a peft model.

    Returns:
        The model without adapter, in evaluation mode.

    Raises:
        ValueError: The network has no adapter, or the draw's randomness is not in weights, as dropout's.

    Example:
        >>> import torch, peft
        >>> from bayesify import BayesAdapter, convert
        >>> base = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"]))
        >>> draw = convert(model, BayesAdapter()).draw(seed=0)
        >>> x = torch.randn(5, 4)
        >>> torch.allclose(merge(draw)(x), draw(x), atol=1e-5)
        True
    """
    if not isinstance(draw, Draw):
        raise TypeError(f"merge takes a draw, posterior.draw(seed), but got a {type(draw).__name__}.")
    network: Any = draw.posterior.network
    if not adapter_layers(network):
        raise ValueError(
            "The network has no adapter of peft that could be merged. draw.network() is the draw as a plain network."
        )
    if not hasattr(network, "merge_and_unload"):
        raise ValueError(
            "The adapter was put into the model without a peft.PeftModel around it, which knows how to merge it. "
            "Convert peft.get_peft_model(model, config) instead."
        )
    made: Any = copy.deepcopy(draw.network())  # whose base is the posterior's own, and merging writes to it
    merged: nn.Module = made.merge_and_unload()
    return merged.eval()
