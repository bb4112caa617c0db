"""Statistics of normalisation layers: kept as they are, or out of the reach of foreign rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bayesify.posteriors._forward import patched_forward

__all__ = ["normalise_apart", "statistics_apart", "statistics_kept", "tracking_norms"]


Normalise = Callable[[slice, Tensor | None, Tensor | None, bool, float], Tensor]


def normalise_apart(layer: Any, x: Tensor, foreign: int, normalise: Normalise) -> Tensor:
    """Normalise by the statistics of the batch without its last `foreign` rows.

    Foreign rows are normalised by the others' statistics, since rows normalised in another way could be told by that
    alone, and leave the running statistics alone. Rows that are all foreign are normalised by the running ones.
    Without any, or in evaluation mode, the statistics are those that `layer.forward` takes and updates.

    Args:
        layer: A batch normalisation.
        x: Its input.
        foreign: How many of the last rows are foreign.
        normalise: `normalise(rows, running_mean, running_var, training, momentum)` for a part of the rows.
    """
    training = layer.training or (layer.running_mean is None and layer.running_var is None)
    momentum = 0.0 if layer.momentum is None else layer.momentum
    if layer.training and layer.track_running_stats and layer.num_batches_tracked is not None and foreign < len(x):
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:
            momentum = 1.0 / float(layer.num_batches_tracked)
    tracked = not layer.training or layer.track_running_stats
    mean, var = (layer.running_mean, layer.running_var) if tracked else (None, None)
    everything = slice(0, len(x))
    if not foreign or not training or layer.running_mean is None:
        return normalise(everything, mean, var, training, momentum)
    if foreign == len(x):
        return normalise(everything, mean, var, False, 0.0)
    own = slice(0, len(x) - foreign)
    batch_var, batch_mean = torch.var_mean(x[own].detach(), [0, *range(2, x.ndim)], correction=0)
    fixed = batch_mean.to(layer.running_mean), batch_var.to(layer.running_var)
    ordinary = normalise(own, mean, var, True, momentum)
    return torch.cat([ordinary, normalise(slice(len(x) - foreign, len(x)), *fixed, False, 0.0)])


@contextmanager
def statistics_apart(network: nn.Module, foreign: int, rows: int) -> Iterator[None]:
    """Let batch normalisation learn nothing from the last `foreign` of `rows` examples, for a while."""
    if not foreign:
        yield
        return
    norms = [
        module
        for module in network.modules()
        if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) and "forward" not in module.__dict__
    ]
    with patched_forward({norm: partial(_forward, norm, foreign, rows) for norm in norms}):
        yield


def _forward(norm: Any, foreign: int, rows: int, input: Tensor) -> Tensor:
    norm._check_input_dim(input)

    def normalise(part: slice, mean: Tensor | None, var: Tensor | None, training: bool, momentum: float) -> Tensor:
        return functional.batch_norm(input[part], mean, var, norm.weight, norm.bias, training, momentum, norm.eps)

    return normalise_apart(norm, input, foreign * (len(input) // rows), normalise)


@contextmanager
def statistics_kept(network: nn.Module, keep: bool) -> Iterator[None]:
    """Normalise by the running statistics, and leave them alone, in training mode too, for a while."""
    norms = [norm for norm in tracking_norms(network).values() if norm.training] if keep else []
    for norm in norms:
        norm.training = False
    try:
        yield
    finally:
        for norm in norms:
            norm.training = True


def tracking_norms(network: nn.Module) -> dict[str, nn.Module]:
    """Return the batch- and instance-normalisation layers that keep running statistics, by name."""
    return {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None
    }
