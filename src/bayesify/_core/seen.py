"""What the inputs of a posterior look like, and made-up inputs that look the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify._core.files import unpack
from bayesify._core.trees import batch_rows
from bayesify._core.values import fits

__all__ = ["KINDS", "FormError", "InputsSeen", "make_inputs"]

KINDS = ("spread", "highest", "lowest")
_MOST = 2**24  # numbers of made-up inputs
_PLAIN = 16  # values that are no tensors; with more of them they are data
_FORMS: dict[str, Any] = {"type": str, "shape": list[int], "low": int, "high": int}


class FormError(ValueError):
    """A description of inputs is damaged."""


class InputsSeen:
    """How the inputs of the last pass were built: structure, types, shapes, and the range of whole numbers.

    Inputs themselves are not kept. Noting them again costs a comparison of shapes; the range of whole numbers (which
    identifiers of words there are) is looked at when the structure is new, and not again.
    """

    def __init__(self) -> None:
        self.form: dict[str, Any] | None = None
        self._last: Any = None

    def note(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Look at the inputs of a pass."""
        if torch.compiler.is_compiling():
            return
        try:
            outline = _outline(args[0] if len(args) == 1 and not kwargs else (args, kwargs))
            if outline != self._last:
                self._note(args, dict(kwargs))
                self._last = outline
        except Exception:  # a pass must not fail for it: tensors that only stand for others, structures of any kind
            self.form = self._last = None

    def _note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves: list[Tensor] = []
        tree = _tree([list(args), kwargs], leaves, [])
        rows = batch_rows(leaves)
        before = self.form if self.form is not None and self.form["tree"] == tree else None
        forms: list[dict[str, Any]] = []
        for index, tensor in enumerate(leaves):
            shape = [int(size) for size in tensor.shape]
            if tensor.ndim and shape[0] == rows:
                shape[0] = min(rows, 2)
            form: dict[str, Any] = {
                "type": str(tensor.dtype).removeprefix("torch."),
                "shape": shape,
                "low": 0,
                "high": 0,
            }
            if before is not None and before["tensors"][index]["type"] == form["type"]:
                form |= {key: before["tensors"][index][key] for key in ("low", "high")}
            elif _whole(tensor.dtype) and tensor.numel():
                form |= {"low": int(tensor.min()), "high": int(tensor.max())}
            forms.append(form)
        fitting = 0 < sum(math.prod(form["shape"]) for form in forms) <= _MOST
        self.form = {"tree": tree, "tensors": forms} if fitting else None


def _outline(value: Any) -> Any:
    """Return what tells a structure of tensors from another, as quickly as can be."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, list | tuple):
        return tuple([_outline(item) for item in value])
    if isinstance(value, dict):
        return tuple([(key, _outline(item)) for key, item in value.items()])
    return _outline(dict(value)) if isinstance(value, Mapping) else value


def _tree(value: Any, leaves: list[Tensor], plain: list[Any]) -> Any:
    """Return a structure with references to its tensors, as `unpack` takes it."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise TypeError("only dense tensors can be made up")
        leaves.append(value)
        return {"tensor": len(leaves) - 1}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("only names can be written")
        return {"pairs": [[key, _tree(item, leaves, plain)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [_tree(item, leaves, plain) for item in value]
        return items if isinstance(value, list) else {"tuple": items}
    plain.append(value)
    if len(plain) > _PLAIN or not (value is None or isinstance(value, bool | int | float)):
        raise TypeError("only settings are written, not data")
    return value


def make_inputs(form: Any, kind: str, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    """Return made-up inputs, the same numbers everywhere, as (args, kwargs); a FormError where the form is damaged.

    Args:
        form: From `InputsSeen`.
        kind: "spread": numbers of mean 0 and variance 1, whole numbers all over their range; "highest", "lowest":
            numbers in [0, 1), whole numbers at an end of their range.
        device: Where they are made.

    >>> seen = InputsSeen()
    >>> seen.note((torch.randn(8, 3),), {"mask": torch.ones(8, dtype=torch.bool)})
    >>> args, kwargs = make_inputs(seen.form, "spread", torch.device("cpu"))
    >>> args[0].shape, kwargs["mask"].shape
    (torch.Size([2, 3]), torch.Size([2]))
    """
    try:
        forms = form["tensors"]
        if kind not in KINDS or not all(fits(each[key], _FORMS[key]) for each in forms for key in _FORMS):
            raise ValueError("values of wrong types")
        if not 0 < sum(math.prod(each["shape"]) for each in forms) <= _MOST:
            raise ValueError("too many numbers")
        if any(size < 0 for each in forms for size in each["shape"]):
            raise ValueError("a size below 0")
        tensors = [_make(each, kind, index).to(device) for index, each in enumerate(forms)]
        args, kwargs = unpack(form["tree"], tensors)  # type: ignore[arg-type]
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise ValueError("no arguments")
    except Exception as error:
        raise FormError(f"the form of the inputs is damaged ({error})") from error
    return args, kwargs


def _make(form: Mapping[str, Any], kind: str, seed: int) -> Tensor:
    dtype = getattr(torch, form["type"])
    uniform = torch.from_numpy(_uniform(math.prod(form["shape"]), seed)).reshape(form["shape"])
    if dtype == torch.bool:
        return torch.lt(uniform, {"spread": 0.5, "highest": 2.0, "lowest": -1.0}[kind])
    if not _whole(dtype):
        return (uniform if kind != "spread" else (uniform - 0.5) * 12**0.5).to(dtype)
    low, high = form["low"], form["high"]
    if kind != "spread":
        return torch.full(form["shape"], high if kind == "highest" else low, dtype=dtype)
    whole: Tensor = (uniform * (high - low + 1)).floor().clamp(max=high - low).long().add(low).to(dtype)
    return whole


def _uniform(count: int, seed: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return numbers in [0, 1) that no version, machine or device changes: the hash of SplitMix64 of a counter."""
    state = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed << 32)
    state *= np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _whole(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool
