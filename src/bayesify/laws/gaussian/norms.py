"""Normalisation layers whose scales and shifts differ between examples; the statistics are the layers' own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bayesify.laws.gaussian.batch_norm import batch_norm_each
from bayesify.laws.gaussian.site import Visit
from bayesify.laws.norm_statistics import normalise_apart, ood_entries
from bayesify.layers import normalised

__all__ = ["batch_norm", "instance_norm", "own_norm"]


def batch_norm(layer: Any, x: Tensor, visit: Visit) -> Tensor:
    """Run batch normalisation with a scale and a shift for each example."""
    layer._check_input_dim(x)
    present = visit.present
    rows, times = visit.batch.rows, len(x) // visit.batch.rows
    if visit.batch.dim not in (0, None):
        rows, times = 1, len(x)
    weight = layer.weight if layer.weight is not None else x.new_ones(x.shape[1])
    bias = layer.bias if layer.bias is not None else x.new_zeros(x.shape[1])
    scale, shift = visit.each("weight", weight, rows), visit.each("bias", bias, rows)
    if times > 1:
        scale, shift = scale.repeat_interleave(times, 0), shift.repeat_interleave(times, 0)

    def normalise(
        part: slice | None, mean: Tensor | None, var: Tensor | None, training: bool, momentum: float
    ) -> Tensor:
        own, a, c = (x, scale, shift) if part is None else (x[part], scale[part], shift[part])
        if x.dtype != scale.dtype:  # autocast
            y = functional.batch_norm(own, mean, var, None, None, training, momentum, layer.eps)
            ones = [1] * (x.ndim - 2)
            return y * a.view(-1, x.shape[1], *ones) + c.view(-1, x.shape[1], *ones)
        return batch_norm_each(own, a, c, mean, var, training, momentum, layer.eps)

    return normalise_apart(layer, x, ood_entries(x, present.ood_rows, present.rows), normalise)


def instance_norm(layer: Any, x: Tensor, visit: Visit) -> Tensor:
    """Run instance normalisation with a scale and a shift for each example."""
    layer._check_input_dim(x)
    without = x.ndim == layer._get_no_batch_dim()
    whole = x[None] if without else x
    tracked = not layer.training or layer.track_running_stats
    mean, var = (layer.running_mean, layer.running_var) if tracked else (None, None)
    use_input = layer.training or not layer.track_running_stats
    momentum = 0.0 if layer.momentum is None else layer.momentum
    own = len(whole)
    if use_input and mean is not None and not without:
        own -= ood_entries(whole, visit.present.ood_rows, visit.present.rows)
    parts = [(whole, mean, var)] if own == len(whole) else [(whole[:own], mean, var), (whole[own:], None, None)]
    # OOD rows are normalised each by itself too, and enter no statistics.
    y = torch.cat(
        [functional.instance_norm(x, m, v, None, None, use_input, momentum, layer.eps) for x, m, v in parts if len(x)]
    )
    return _affine(y[0] if without else y, layer, visit, [-1, *[1] * (whole.ndim - 2)])


def own_norm(layer: Any, x: Tensor, visit: Visit) -> Tensor:
    """Run group, layer or root-mean-square normalisation, by each example's own statistics, with scales for each."""
    channels = [-1, *[1] * (x.ndim - 2)]
    return _affine(normalised(layer, x), layer, visit, list(getattr(layer, "normalized_shape", channels)))


def _affine(x: Tensor, layer: Any, visit: Visit, shape: list[int]) -> Tensor:
    """Return a_b x + c_b, with scales and shifts that broadcast as `shape` against the last dimensions."""
    whole = visit.batch.split(x)
    lead = [1] * (whole.ndim - 1 - len(shape))
    if layer.weight is not None:
        scale = visit.each("weight", layer.weight)
        whole = whole * scale.view(len(scale), *lead, *shape).to(x.dtype)
    bias = getattr(layer, "bias", None)
    if bias is not None:
        shift = visit.each("bias", bias)
        whole = whole + shift.view(len(shift), *lead, *shape).to(x.dtype)
    return visit.batch.join(whole)
