"""Operations that move entries: the same for the mean and the variance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bayesify._core.trees import map_tensors
from bayesify.prediction.overrides import name_of, plain_call
from bayesify.prediction.streamlined.lineage import look_at
from bayesify.prediction.streamlined.moments import Moments, Origin, centre, moment_rule, same_size, variance_of
from bayesify.prediction.streamlined.products import joint_share

__all__: list[str] = []


def _moved(operation: Callable[..., Any], x: Moments, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    means = operation(x.centre, *args, **options)
    variances = operation(x.variance, *args, **options)
    if isinstance(means, Tensor):
        made = Moments.make(means, variances, _share(x, means), _source(operation, x, args, options, means.shape))
        _look(operation, x, args, options, made)
        return made
    indices = _indices(operation, x, args, options)
    pairs = zip(means, variances, indices or [None] * len(means), strict=True)
    parts = tuple(
        Moments.make(m, v, _share(x, m), None if i is None or x.source is None else replace(x.source, index=i))
        for m, v, i in pairs
    )
    for number, part in enumerate(parts):
        _look(operation, x, args, options, part, number)
    return parts


def _look(
    operation: Callable[..., Any],
    x: Moments,
    args: tuple[Any, ...],
    options: dict[str, Any],
    made: Moments,
    part: int | None = None,
) -> None:
    """Note that entries are those of another tensor, or of the same tensor as others are."""

    def values(z: Tensor) -> Any:
        found = operation(z, *args, **options)
        return found if part is None else found[part]

    name, shape = name_of(operation), made.shape
    if name in _COPIES:
        look_at(x, made, values, None)
    elif name in ("view", "reshape", "flatten"):  # the index may have other steps than the tensor, and then no view
        look_at(x, made, values, lambda index: index.view(shape) if index.is_contiguous() else None)
    elif name in _VIEWS and (name != "__getitem__" or _slices_alone(args[0])):
        look_at(x, made, values, values)


def _share(x: Moments, moved: Tensor) -> Tensor | None:
    """Keep the common part while the first dimension has as many entries; else take its mean for all."""
    if x.shared is None or moved.ndim == 0:
        return None
    same = same_size(moved.shape[0], x.shared.shape[0])
    return x.shared if same else x.shared.mean().expand(moved.shape[0])


def _indices(operation: Callable[..., Any], x: Moments, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Move the index of a linear map's outputs along; None where its entries no longer lie at fixed steps."""
    if x.source is None:
        return None
    if operation is Tensor.__getitem__ and not _slices_alone(args[0]):
        return None
    if name_of(operation) in _COPIES:
        return x.source.index
    try:
        return operation(x.source.index, *args, **options)
    except (RuntimeError, ValueError, TypeError):
        return None


def _source(
    operation: Callable[..., Any], x: Moments, args: tuple[Any, ...], options: dict[str, Any], shape: torch.Size
) -> Origin | None:
    if name_of(operation) not in _VIEWS | _COPIES:
        return None
    if name_of(operation) in ("reshape", "flatten"):  # these copy where there is no view, and a copy has other steps
        operation, args, options = Tensor.view, (shape,), {}
    index = _indices(operation, x, args, options)
    return None if index is None or x.source is None else replace(x.source, index=index)


def _slices_alone(key: Any) -> bool:
    keys = key if isinstance(key, tuple) else (key,)
    return all(one is None or one is Ellipsis or isinstance(one, int | slice) for one in keys)


_COPIES = {"contiguous", "clone", "detach", "to", "float", "double", "half", "bfloat16", "type_as", "cpu"}
_VIEWS = {
    *("view", "reshape", "transpose", "permute", "unflatten", "flatten", "unsqueeze", "squeeze", "select", "narrow"),
    *("movedim", "swapaxes", "t", "__getitem__", "unbind", "chunk", "split", "mT", "T"),
}
_NAMES = (
    *("view", "reshape", "transpose", "permute", "unflatten", "flatten", "unsqueeze", "squeeze", "select", "narrow"),
    *("movedim", "moveaxis", "swapaxes", "swapdims", "t", "unbind", "chunk", "split", "tensor_split", "roll", "flip"),
    *("expand", "expand_as", "repeat", "tile", "repeat_interleave", "index_select", "gather", "contiguous", "clone"),
    *("detach", "to", "float", "double", "half", "bfloat16", "type_as", "cpu", "view_as", "reshape_as", "__getitem__"),
    *("take_along_dim", "rot90", "diagonal", "unfold", "broadcast_to", "pixel_shuffle", "pixel_unshuffle", "fold"),
    *("channel_shuffle", "tril", "triu"),
)


def _rule(operation: Callable[..., Any]) -> Callable[..., Any]:
    def rule(x: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(x, Moments):
            return NotImplemented
        return _moved(operation, x, *map_tensors(centre, (args, options)))

    return rule


for _name in _NAMES:
    for _place in (Tensor, torch, functional):
        _found = getattr(_place, _name, None)
        if callable(_found) and not isinstance(_found, type):  # torch.float is a type of numbers
            moment_rule(_found, kind="exact")(_rule(_found))
for _property in (Tensor.T, Tensor.mT):
    moment_rule(_property.__get__, kind="exact")(_rule(_property.__get__))  # type: ignore[attr-defined]


def _joined(operation: Callable[..., Any]) -> Callable[..., Any]:
    def rule(tensors: Any, *args: Any, **options: Any) -> Moments:
        parts = list(tensors)
        return Moments.make(
            operation([centre(part) for part in parts], *args, **options),
            operation([variance_of(part) for part in parts], *args, **options),
            joint_share(*parts),
        )

    return rule


for _operation in (torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack, torch.vstack):
    moment_rule(_operation, kind="exact")(_joined(_operation))


@moment_rule(functional.pad, kind="exact")
def _pad(input: Moments, pad: Any, mode: str = "constant", value: float | None = None) -> Moments:
    """A constant has no variance."""
    return input.like(functional.pad(input.centre, pad, mode, value), functional.pad(input.variance, pad, mode))


@moment_rule(Tensor.masked_fill, torch.masked_fill, kind="exact")
def _masked_fill(input: Moments, mask: Tensor, value: Any) -> Any:
    if isinstance(value, Moments) or not isinstance(input, Moments):
        return NotImplemented
    return input.like(input.centre.masked_fill(mask, value), input.variance.masked_fill(mask, 0))


@moment_rule(torch.where, Tensor.where, kind="exact")
def _where(condition: Tensor, input: Any, other: Any) -> Any:
    if isinstance(condition, Moments):  # x.where(mask, y)
        condition, input = input, condition
    mean = torch.where(condition, centre(input), centre(other))
    variances = [x.variance if isinstance(x, Moments) else torch.zeros((), dtype=mean.dtype) for x in (input, other)]
    variance = torch.where(condition, variances[0], variances[1])
    return Moments.make(mean, variance, joint_share(input, other))


def _blank(operation: Callable[..., Any]) -> Callable[..., Any]:
    def rule(*args: Any, **options: Any) -> Any:
        return plain_call(operation, *map_tensors(centre, (args, options)))

    return rule


for _place, _names in (
    (torch, ("zeros_like", "ones_like", "empty_like", "full_like", "is_floating_point", "is_complex")),
    (Tensor, ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")),
):
    for _name in _names:
        moment_rule(getattr(_place, _name), kind="exact")(_blank(getattr(_place, _name)))
