"""Turn user input into float64 tensors, or say what is wrong with it and what to do."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing import TypeAlias

    from numpy.typing import ArrayLike as NumpyArrayLike

    ArrayLike: TypeAlias = Tensor | NumpyArrayLike

__all__ = [
    "bin_edges",
    "ceil_share",
    "check_count",
    "check_problem",
    "check_probs",
    "check_same_shape",
    "check_selective",
    "check_share",
    "equal_mass_bins",
    "equal_width_bins",
    "flatten",
    "to_double",
    "to_tensor",
]

_HALF = (torch.float16, torch.bfloat16)


def to_tensor(values: ArrayLike, name: str) -> Tensor:
    """Return a non-empty tensor; arrays and lists keep their full precision."""
    if not isinstance(values, Tensor):
        try:
            # A C-ordered copy, because torch refuses negative strides and read-only arrays.
            values = torch.from_numpy(np.array(values, order="C"))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{name} cannot be read as numbers ({error}); pass a tensor, an array or nested lists of equal lengths."
            ) from error
    if values.is_complex():
        raise ValueError(f"{name} is complex; pass real numbers.")
    if values.numel() == 0:
        raise ValueError(f"{name} is empty; pass at least one example.")
    return values


def to_double(values: ArrayLike, name: str, *, finite: bool = True) -> Tensor:
    """Return a float64 tensor without NaN, and without infinities if ``finite``."""
    tensor = to_tensor(values, name)
    if tensor.device.type == "mps":  # that device has no float64
        tensor = tensor.cpu()
    tensor = tensor.to(torch.float64)
    if tensor.isnan().any():
        raise ValueError(
            f"{name} contains NaN; find the inputs that produce it (torch.isnan) and repair or remove them first."
        )
    if finite and tensor.isinf().any():
        raise ValueError(f"{name} contains infinite values; clip or remove them first.")
    return tensor


def check_same_shape(**tensors: Tensor) -> None:
    """Refuse tensors of different shapes: broadcasting (N,) with (N, 1) is a silent mistake."""
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items())
        raise ValueError(f"Shapes do not match: {shapes}; reshape them to one common shape.")


def check_share(value: float, name: str, *, closed_below: bool = False) -> float:
    """Return a share in (0, 1), or [0, 1) if ``closed_below``."""
    value = float(value)
    if not (0 < value < 1 or (closed_below and value == 0)):
        interval = "[0, 1)" if closed_below else "(0, 1)"
        advice = f", {value / 100:g} for {value:g} %" if 1 < value < 100 else ""
        raise ValueError(f"{name} is {value}; give a share in {interval}{advice}.")
    return value


def check_count(value: int, name: str) -> int:
    """Return an integer of at least one."""
    if int(value) != value or value < 1:
        raise ValueError(f"{name} is {value}; give a whole number of at least 1.")
    return int(value)


def ceil_share(share: float, count: int) -> int:
    """Return ceil(share * count), exact for the decimal that the user wrote.

    In floating point 0.55 * 100 is above 55 and would be rounded up to 56.
    """
    return math.ceil(Fraction(str(share)) * count)


def check_probs(probs: ArrayLike, name: str = "probs", *, min_dims: int = 2) -> Tensor:
    """Return float64 probabilities (..., C) that are non-negative and sum to one."""
    tensor = to_tensor(probs, name)
    tolerance = 1e-2 if tensor.dtype in _HALF else 1e-3
    tensor = to_double(tensor, name)
    if tensor.ndim < min_dims:
        wanted = "(N, C) or (N, ..., C)" if min_dims == 2 else "(S, N, C) or (S, N, ..., C)"
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; pass {wanted} with the classes last, adding "
            "missing dimensions with unsqueeze."
        )
    if tensor.shape[-1] < 2:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, one class only; stack (1 - p, p) along the "
            "last dimension for a binary problem."
        )
    if (tensor < 0).any():
        raise ValueError(f"{name} has negative entries; pass probabilities: softmax the logits.")
    worst = float((tensor.detach().sum(-1) - 1).abs().max())
    if worst > tolerance:
        raise ValueError(
            f"{name} do not sum to one over the last dimension (off by up to {worst:.3g}); apply "
            "softmax to logits, and move the class dimension last (movedim(1, -1))."
        )
    return tensor


def _check_labels(labels: ArrayLike, shape: torch.Size) -> Tensor:
    tensor = to_tensor(labels, "labels")
    if tensor.is_floating_point():
        raise ValueError("labels are floating point; pass class indices as integers: labels.long()")
    if tensor.shape != shape:
        raise ValueError(
            f"labels have shape {tuple(tensor.shape)} where the probabilities need {tuple(shape)}; "
            "pass one class index per prediction (arg max of one-hot labels), classes last in "
            "the probabilities."
        )
    return tensor.long()


def check_problem(probs: ArrayLike, labels: ArrayLike, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """Return probabilities (M, C) and labels (M,) of all positions that are not ignored.

    A 1-D array holds p(y=1) of a binary problem and becomes the two columns (1 - p, p).
    """
    tensor = to_tensor(probs, "probs")
    if tensor.ndim == 1:
        positive = to_double(tensor, "probs")
        if positive.min() < 0 or positive.max() > 1 + 1e-6:
            raise ValueError("probs leave [0, 1]; pass p(y=1): apply sigmoid to the logits.")
        positive = positive.clamp(max=1)
        tensor = torch.stack([1 - positive, positive], dim=-1)
    return flatten(check_probs(tensor).detach(), labels, ignore_index)


def flatten(values: Tensor, labels: ArrayLike, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Flatten (N, ..., C) and (N, ...) to (M, C) and (M,), dropping ignored positions."""
    index = _check_labels(labels, values.shape[:-1]).to(values.device).flatten()
    kept = index != ignore_index
    if not kept.any():
        raise ValueError(f"Every label equals ignore_index={ignore_index}; pass at least one labelled position.")
    index, num_classes = index[kept], values.shape[-1]
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= num_classes:
        raise ValueError(
            f"labels go from {low} to {high} but there are {num_classes} classes, numbered 0 to "
            f"{num_classes - 1}; renumber them, or name the value to skip with ignore_index."
        )
    return values.flatten(0, -2)[kept], index


def check_selective(uncertainty: ArrayLike, correct: ArrayLike) -> tuple[Tensor, Tensor]:
    """Return flat float64 uncertainties and whether each prediction was correct (0 or 1)."""
    scores = to_double(uncertainty, "uncertainty", finite=False).detach()
    hits = to_double(correct, "correct").detach().to(scores.device)
    check_same_shape(uncertainty=scores, correct=hits)
    if not ((hits == 0) | (hits == 1)).all():
        raise ValueError("correct holds values other than 0 and 1; pass predicted == labels.")
    return scores.flatten(), hits.flatten()


def equal_mass_bins(values: Tensor, num_bins: int) -> Tensor:
    """Return the bin of each value (N,), about N / num_bins in each.

    Bin = floor(num_bins * #{smaller values} / N): equal values always share one bin, so the
    result does not depend on the order of the examples.
    """
    smaller = torch.searchsorted(values.sort().values, values.contiguous())
    return smaller * num_bins // len(values)


def bin_edges(num_bins: int, device: torch.device) -> Tensor:
    """Return the edges of bins of equal width (num_bins + 1,)."""
    # Division rounds correctly, so that 0.6 lies exactly on 9 / 15; linspace may be one bit off.
    return torch.arange(num_bins + 1, dtype=torch.float64, device=device) / num_bins


def equal_width_bins(values: Tensor, num_bins: int) -> Tensor:
    """Return the bin of each value: i for values in (i / m, (i + 1) / m], and 0 for zero.

    >>> equal_width_bins(torch.tensor([0.0, 0.5, 0.51], dtype=torch.float64), 2)
    tensor([0, 0, 1])
    """
    edges = bin_edges(check_count(num_bins, "num_bins"), values.device)
    return torch.bucketize(values, edges[1:-1])
