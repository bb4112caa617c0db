"""Passes through several sets of weights at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from bayesify._core.trees import call
from bayesify.laws.tensors import TensorTree, batch_norms, owners
from bayesify.layers import layer_type

__all__ = ["runs_batched", "vectorised_outputs", "vectorised_pass"]


def runs_batched(network: nn.Module, names: Sequence[str]) -> bool:
    """Return whether several sets of these tensors run as batched products: where linear layers own them."""
    return all(any(layer_type(kind).batched for kind in type(module).__mro__) for module in owners(network, names))


def vectorised_pass(
    network: nn.Module, tensors: Mapping[str, Tensor], read: Callable[[Any], Tensor], inputs: Any
) -> Tensor:
    """Return the outputs (S, B, ...) of one pass with S sets of tensors, each (S, ...), on the same inputs."""
    args, kwargs = call(lambda *args, **kwargs: (args, kwargs), inputs)

    def one(some: Mapping[str, Tensor]) -> Tensor:
        return read(functional_call(network, dict(some), args, dict(kwargs)))

    output: Tensor = vmap(one, randomness="different")(dict(tensors))
    return output


def vectorised_outputs(
    network: nn.Module, chains: nn.ModuleList, read: Callable[[Any], Tensor], inputs: Any
) -> Tensor | None:
    """Return all chains' outputs (C, B, ...) on the same inputs in one pass; None where they need one each.

    They do where layers are not linear, where batch normalisation would write statistics of several chains, and where
    the network has an `autograd.Function` that is not made for it.
    """
    trees = [tree.as_dict() for tree in chains if isinstance(tree, TensorTree)]
    if len(trees) < 2 or not runs_batched(network, list(trees[0])):
        return None
    if any(norm.training for norm in batch_norms(network).values()):
        return None
    stacked = {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}
    try:
        return vectorised_pass(network, stacked, read, inputs)
    except RuntimeError as error:
        if "setup_context" in str(error):  # an autograd.Function of the network's that cannot be vectorised
            return None
        raise
