"""Batches of any structure: the one place that knows what inputs and outputs may look like.

A batch is a tensor, a tuple, or a mapping (a HuggingFace batch is one). The rest of the library never
looks inside: it calls these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = [
    "CACHE",
    "TARGET_KEYS",
    "arguments_of",
    "batch_rows",
    "batch_tensor",
    "call",
    "first_tensor",
    "inputs_of",
    "join_rows",
    "map_tensors",
    "output_tensor",
    "repeat_rows",
    "slice_rows",
    "split_batch",
    "take_rows",
    "to_device",
    "without_arrays",
    "without_cache",
]

TARGET_KEYS = ("labels", "shift_labels", "label", "targets", "target", "y")
SPAN_KEYS = ("start_positions", "end_positions")  # of an answer in a text: two targets
CACHE = "past_key_values"  # what attention made of earlier positions; a pass writes into it
_CACHED = (CACHE, "attention_mask", "position_ids", "cache_position")  # what says where the tokens of such a pass are


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply a function to every tensor of a nested structure and keep the structure.

    >>> map_tensors(lambda t: t.shape[0], {"a": torch.zeros(2, 3), "b": (torch.zeros(4), "text")})
    {'a': 2, 'b': (4, 'text')}
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):  # a named tuple
        return type(tree)(*(map_tensors(function, value) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map_tensors(function, value) for value in tree)
    return tree


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(found.append, tree)
    return found


def first_tensor(tree: Any) -> Tensor | None:
    """Return the first tensor of a nested structure, or None.

    >>> first_tensor(("text", {"a": torch.ones(1)}))
    tensor([1.])
    """
    if isinstance(tree, Tensor):
        return tree
    inner: Any = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list | tuple) else ()
    return next((found for found in map(first_tensor, inner) if found is not None), None)


def without_arrays(tree: Any) -> Any:
    """Return a batch with a tensor for every array, which share their memory."""
    if isinstance(tree, Tensor):
        return tree
    if isinstance(tree, np.ndarray):
        if tree.dtype.kind not in "biufc":
            raise TypeError(
                f"An array of {tree.dtype} holds no numbers. Give numbers, or tokenise text first: tokenizer(texts, "
                'padding=True, return_tensors="pt").'
            )
        return torch.from_numpy(np.ascontiguousarray(tree))
    if isinstance(tree, Mapping) and any(isinstance(value, np.ndarray) for value in tree.values()):
        return {key: without_arrays(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple) and any(isinstance(value, np.ndarray) for value in tree):
        return type(tree)(without_arrays(value) for value in tree)
    return tree


def to_device(tree: Any, device: torch.device) -> Any:
    """Move every tensor of a batch, and every array; pinned memory is copied without waiting."""
    if isinstance(tree, Tensor):
        return tree.to(device, non_blocking=True)
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), without_arrays(tree))


def batch_rows(inputs: Any) -> int:
    """Return the number of examples: the first dimension of the first tensor."""
    return batch_tensor(inputs).shape[0]


def batch_tensor(inputs: Any) -> Tensor:
    """Return the first tensor that has a first dimension, which is the batch's."""
    for tensor in (inputs,) if isinstance(inputs, Tensor) else _tensors(inputs):
        if tensor.ndim > 0:
            return tensor
    raise ValueError(
        "The inputs hold no tensor with a batch dimension, so the number of examples is unknown. "
        "Pass a tensor (B, ...), a tuple of tensors, or a mapping of names to tensors."
    )


def slice_rows(inputs: Any, start: int, stop: int | None, step: int = 1) -> Any:
    """Take examples start to stop; tensors without the batch dimension are passed on as they are."""
    rows = batch_rows(inputs)
    return map_tensors(
        lambda t: t[start:stop:step] if t.ndim > 0 and t.shape[0] == rows else t,
        inputs,
    )


def take_rows(inputs: Any, which: Tensor) -> Any:
    """Take the examples of a mask or of positions; tensors without the batch dimension are passed on as they are.

    >>> take_rows((torch.arange(3), torch.zeros(())), torch.tensor([True, False, True]))
    (tensor([0, 2]), tensor(0.))
    """
    rows = batch_rows(inputs)
    return map_tensors(
        lambda t: t[which.to(t.device)] if t.ndim > 0 and t.shape[0] == rows else t,
        inputs,
    )


def repeat_rows(inputs: Any, times: int) -> Any:
    """Repeat the whole batch: rows x0, x1, ..., x0, x1, ... (draw-major)."""
    rows = batch_rows(inputs)
    return map_tensors(
        lambda t: t.repeat(times, *(1,) * (t.ndim - 1)) if t.ndim > 0 and t.shape[0] == rows else t,
        inputs,
    )


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Split a training batch into inputs and targets.

    A pair `(x, y)`; a longer tuple `(x1, x2, y)`, whose last entry is the target; a mapping with one of the
    keys `labels, label, targets, target, y`, whose other entries are the inputs by name. `start_positions` and
    `end_positions` together are targets (B, 2), and `shift_labels` is transformers' name for tokens that come next.

    >>> split_batch({"input_ids": 1, "labels": 2})
    ({'input_ids': 1}, 2)
    """
    if isinstance(batch, Mapping):
        if all(isinstance(batch.get(key), Tensor) for key in SPAN_KEYS):
            return inputs_of(batch), _span(batch)
        for key in TARGET_KEYS:
            if key in batch:
                return {k: v for k, v in batch.items() if k != key}, batch[key]
        raise ValueError(
            f"The batch has the keys {sorted(map(str, batch))} and none of {list(TARGET_KEYS)}, so its targets "
            "are unknown. Rename the target's key, or make the loader give (inputs, targets)."
        )
    if isinstance(batch, list | tuple) and len(batch) >= 2:
        inputs = batch[0] if len(batch) == 2 else tuple(batch[:-1])
        return inputs, batch[-1]
    raise ValueError(
        f"A training batch must be (inputs, targets) or a mapping with a target key, but it is {_describe(batch)}. "
        "Wrap the data in a TensorDataset(inputs, targets) or pass a collate function."
    )


def _span(batch: Mapping[str, Any]) -> Tensor:
    """Return first and last position of an answer, (B, 2); -100 where the text was cut off before it."""
    positions = torch.stack([batch[key].flatten() for key in SPAN_KEYS], dim=-1).clamp_min(0)
    text = batch.get("input_ids", batch.get("inputs_embeds"))
    return positions if text is None else positions.where(positions < text.shape[1], -100)


def inputs_of(batch: Any) -> Any:
    """Return the inputs of a batch that may hold targets too, which are not looked at.

    >>> inputs_of({"input_ids": 1, "labels": 2}), inputs_of([3]), inputs_of([3, 4])
    ({'input_ids': 1}, 3, 3)
    """
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key not in (*TARGET_KEYS, *SPAN_KEYS)}
    if isinstance(batch, list | tuple):
        return batch[0] if len(batch) == 1 else split_batch(batch)[0]
    return batch


def join_rows(one: Any, other: Any) -> Any | None:
    """Put the examples of two inputs of one structure into one batch; None if their shapes do not allow it.

    >>> join_rows((torch.zeros(2, 3),), (torch.zeros(1, 3),))[0].shape
    torch.Size([3, 3])
    """
    second = _tensors(other)
    pairs = list(zip(_tensors(one), second, strict=False))
    if len(_tensors(one)) != len(second) or _skeleton(one) != _skeleton(other):
        return None
    if any(a.shape[1:] != b.shape[1:] or a.ndim == 0 or a.dtype != b.dtype for a, b in pairs):
        return None
    rows = iter(second)
    return map_tensors(lambda tensor: torch.cat([tensor, next(rows)]), one)


def _skeleton(tree: Any) -> Any:
    return map_tensors(lambda tensor: None, tree)


def call(module: nn.Module | Callable[..., Any], inputs: Any) -> Any:
    """Call a network on inputs: `f(x)`, `f(*xs)` for a tuple, `f(**xs)` for a mapping."""
    args, kwargs = arguments_of(inputs)
    return module(*args, **kwargs)


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return inputs of any structure as the arguments of a network's forward.

    >>> arguments_of({"x": 1}), arguments_of([1, 2]), arguments_of(1)
    (((), {'x': 1}), ((1, 2), {}), ((1,), {}))
    """
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, list | tuple):
        return tuple(inputs), {}
    return (inputs,), {}


def without_cache(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs by name without a key-value cache, and without what only makes sense beside it.

    >>> without_cache({"input_ids": 1, "attention_mask": 2, "past_key_values": None})
    {'input_ids': 1, 'attention_mask': 2, 'past_key_values': None}
    >>> without_cache({"input_ids": 1, "attention_mask": 2, "past_key_values": object()})
    {'input_ids': 1}
    """
    if inputs.get(CACHE) is None:
        return dict(inputs)
    return {key: value for key, value in inputs.items() if key not in _CACHED}


def output_tensor(output: Any, key: str | int | None = None) -> Tensor:
    """Find the tensor of logits or means in a network's output.

    A tensor is itself; a mapping or `ModelOutput` gives `logits`, or its only entry, or `start_logits` and
    `end_logits` side by side, (B, 2, T); a tuple gives its first entry. `key` names another entry.

    >>> output_tensor((torch.ones(1), None))
    tensor([1.])
    """
    if isinstance(output, Tensor):
        return output
    found: Any = None
    if key is not None:
        try:
            found = output[key]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"The network's output has no entry {key!r}: it is {_describe(output)}.") from error
    elif isinstance(output, Mapping):
        found = output.get("logits")
        if found is None and "last_hidden_state" in output:
            raise ValueError(
                "The network returns hidden states: it is a model without a head, which answers nothing yet. Take the "
                "one with a head for your task, as AutoModelForSequenceClassification or AutoModelForCausalLM; or, if "
                "these are what you want, posterior.output_key = 'last_hidden_state'."
            )
        if found is None and len(output) == 1:
            found = next(iter(output.values()))
        if found is None and "start_logits" in output and "end_logits" in output:
            found = torch.stack([output["start_logits"], output["end_logits"]], dim=1)
    elif isinstance(output, list | tuple) and output:
        found = output[0]
    if isinstance(found, Tensor):
        return found
    raise ValueError(
        f"The network's output is {_describe(output)}, and which entry holds the logits or means is unknown. "
        "Name it: posterior.output_key = 'the name' (or its position)."
    )


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {sorted(map(str, value))}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)} entries"
    return f"a {type(value).__name__}"
