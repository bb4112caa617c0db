"""A warning that names the module where numbers become NaN."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bayesify._core.trees import call, map_tensors, slice_rows
from bayesify.laws import Posterior
from bayesify.likelihoods.prediction import Prediction

__all__ = ["first_nan", "warn_of_nan"]


def warn_of_nan(posterior: Posterior, inputs: Any, parts: Sequence[Prediction], *, stacklevel: int) -> None:
    """Warn of NaN that inputs without NaN were predicted with, and say which module makes the first of them.

    Args:
        posterior: The posterior.
        inputs: The batch that was predicted.
        parts: Its predictions.
        stacklevel: Of the caller who made the inputs.
    """
    answers = [part.first_field() for part in parts if part.answers]
    # A sum is NaN where one of its numbers is, and seldom else.
    if not any(math.isnan(answer.sum().item()) for answer in answers):
        return
    if not any(bool(answer.isnan().any()) for answer in answers):
        return
    wrong = torch.cat([_rows_of_nan(answer) for answer in answers])
    rows = wrong.nonzero()[:, 0]
    one = slice_rows(inputs, int(rows[0]), int(rows[0]) + 1)
    if _has_nan(one):
        return  # what goes in comes out
    warnings.warn(
        f"The prediction is NaN for {len(rows)} of {len(wrong)} inputs that are not. {_blame(posterior, one)}",
        UserWarning,
        stacklevel=stacklevel,
    )


def _blame(posterior: Posterior, inputs: Any) -> str:
    """Say which module makes the first NaN: in the network itself, in a member, or in a draw."""
    network = posterior.network
    name = first_nan(network, inputs)
    if name is not None:
        return f"{_module(name)} is the first that makes NaN out of numbers: check its weights."
    for key in posterior.keys(None, 0):
        name = first_nan(network, inputs, partial(posterior.evaluate, inputs, [key]))
        if name is not None and key.path:
            return (
                f"{_module(name)} of member {key.path[0]} is the first that makes NaN out of numbers: check its "
                "weights, or leave the member out."
            )
        if name is not None:
            return (
                f"{_module(name)} is the first that makes NaN, in draws alone: the noise is too wide for it. Fit the "
                "posterior, or exclude the module."
            )
    return "The network itself has none there, nor has a draw: this way to predict fails. Use how='sampling'."


def _module(name: str) -> str:
    return f"Module {name!r}" if name else "The network's own forward"


def first_nan(network: nn.Module, inputs: Any, run: Callable[[], object] | None = None) -> str | None:
    """Return the name of the first module that makes NaN out of numbers; "" is the network itself.

    Args:
        network: The network.
        inputs: One example, or a few.
        run: What runs the network on them; None calls it.

    Example:
        >>> first_nan(nn.Sequential(nn.Linear(2, 2), nn.Threshold(9.0, torch.nan)), torch.ones(1, 2))
        '1'
    """
    found: list[str] = []

    def look(name: str, args: Any, kwargs: Any, output: Any) -> None:
        if not found and _has_nan(output) and not _has_nan((args, kwargs)):
            found.append(name)

    handles = [
        module.register_forward_hook(
            lambda _, args, kwargs, output, name=name: look(name, args, kwargs, output), with_kwargs=True
        )
        for name, module in network.named_modules()
    ]
    try:
        with torch.no_grad():
            call(network, inputs) if run is None else run()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _rows_of_nan(answer: Tensor) -> Tensor:
    return answer.isnan().flatten(1).any(1) if answer.ndim > 1 else answer.isnan()


def _has_nan(tree: Any) -> bool:
    """Return whether a structure has a number that is NaN; a mask may well be infinite."""
    found: list[bool] = []
    map_tensors(lambda x: found.append(x.is_floating_point() and bool(x.isnan().any())), tree)
    return any(found)
