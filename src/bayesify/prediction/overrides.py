"""Small helpers for tensors that take part in torch's operations in a way of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["is_metadata", "name_of", "plain_call"]

_METADATA = {
    *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_cuda", "is_cpu", "is_sparse", "is_nested"),
    *(
        "is_quantized",
        "is_mkldnn",
        "is_meta",
        "is_mps",
        "is_leaf",
        "grad_fn",
        "names",
        "itemsize",
        "nbytes",
        "_version",
    ),
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "is_floating_point", "is_complex"),
    *("is_contiguous", "element_size", "get_device", "__len__", "__hash__", "is_same_size", "is_inference", "type"),
    *("untyped_storage", "data_ptr", "is_signed", "is_xla", "is_xpu", "is_vulkan", "is_ipu", "is_maia", "has_names"),
}


def name_of(func: Callable[..., Any]) -> str:
    """Return the plain name of an operation; of a property, the property's name."""
    name: str = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        owner: str = getattr(getattr(func, "__self__", None), "__name__", name)
        return owner
    return name


def is_metadata(func: Callable[..., Any]) -> bool:
    """Return whether an operation asks for what a tensor looks like, not for what it holds."""
    return name_of(func) in _METADATA


def plain_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Run an operation as if its tensors were plain ones."""
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **(kwargs or {}))
    return result.as_subclass(Tensor) if isinstance(result, Tensor) else result
