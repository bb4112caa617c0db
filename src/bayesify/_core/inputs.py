"""What a caller may give as inputs, and the sentence for what cannot be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from bayesify._core.modes import first_parameter
from bayesify._core.trees import TARGET_KEYS, map_tensors, without_arrays

__all__ = ["as_inputs", "as_loader", "in_network_type"]

_LOADER = "torch.utils.data.DataLoader(data, batch_size=64)"
_ROWS = "bayesify.integrations.transformers.loader(posterior, data, tokenizer)"


def as_inputs(inputs: Any) -> tuple[Any, bool]:
    """Return inputs with tensors for arrays, and whether they are one batch and not a loader of batches."""
    inputs = without_arrays(inputs)
    if isinstance(inputs, Tensor | Mapping | tuple):
        return inputs, True
    return as_loader(inputs, "predict", "a tensor (B, ...), a tuple or a mapping of such, or a loader"), False


def as_loader(loader: Any, function: str, wanted: str = "a loader of batches") -> Iterable[Any]:
    """Return a loader, or say what to make one of."""
    name = type(loader).__name__
    if isinstance(loader, Dataset):
        raise TypeError(f"{function} takes {wanted}, not a data set: wrap it in a DataLoader, {_LOADER}.")
    if hasattr(loader, "column_names") and hasattr(loader, "__getitem__"):
        raise TypeError(
            f"{function} takes {wanted}, and not a data set with the columns {list(loader.column_names)}. Make batches "
            f"of those that the network takes: {_ROWS}, or a DataLoader with a collate_fn of your own."
        )
    if hasattr(loader, "iloc") and hasattr(loader, "to_numpy"):
        raise TypeError(
            f"{function} takes {wanted}, not a {name}: take its numbers, torch.tensor(table.to_numpy(), "
            "dtype=torch.float32)."
        )
    if isinstance(loader, str | bytes):
        raise TypeError(
            f"{function} takes {wanted}, not text: tokenise it first, tokenizer(texts, padding=True, "
            f'return_tensors="pt"), or {_ROWS}.'
        )
    if isinstance(loader, Tensor | Mapping) or (
        not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__")
    ):
        raise TypeError(f"{function} takes {wanted}, but got {'None' if loader is None else f'a {name}'}.")
    if isinstance(loader, list) and loader and _is_example(loader[0]):
        raise TypeError(
            f"{function} takes {wanted}, but got a list of single examples. Put them into batches: "
            f"{_ROWS} for tokens or texts, or torch.utils.data.DataLoader(examples, batch_size=64) with a collate_fn "
            "that pads where lengths differ."
        )
    return loader  # type: ignore[no-any-return]


def _is_example(batch: Any) -> bool:
    """Return whether something is no batch: text, a number, or names of what has no batch dimension."""
    if isinstance(batch, str | bytes | int | float):
        return True
    if not isinstance(batch, Mapping):
        return False
    values = [without_arrays(value) for key, value in batch.items() if key not in TARGET_KEYS]
    tensors = [value for value in values if isinstance(value, Tensor)]
    tokens = batch.get("input_ids")
    return not tensors or all(t.ndim == 0 for t in tensors) or (isinstance(tokens, Tensor) and tokens.ndim == 1)


def in_network_type(inputs: Any, network: nn.Module) -> Any:
    """Return inputs whose floating-point numbers are of the network's type, if it has one; others as they are.

    >>> in_network_type(torch.zeros(2, dtype=torch.float64), nn.Linear(2, 1)).dtype
    torch.float32
    """
    first = first_parameter(network, floating=True)
    own = None if first is None else first.dtype
    if isinstance(inputs, Tensor) and (inputs.dtype is own or not inputs.is_floating_point()):
        return inputs
    found: set[torch.dtype] = set()
    map_tensors(lambda tensor: found.add(tensor.dtype) if tensor.is_floating_point() else None, inputs)
    if own is None or found <= {own}:
        return inputs
    if any(p.is_floating_point() and p.dtype != own for p in network.parameters()):
        return inputs  # a network of several types knows itself what it wants
    return map_tensors(lambda tensor: tensor.to(own) if tensor.is_floating_point() else tensor, inputs)
