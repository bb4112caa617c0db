"""Statistics of normalisation layers: kept as they are, or out of the reach of OOD rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bayesify._core.maths import at_least_float32
from bayesify.laws.passes import ShapeError
from bayesify.laws.patching import Slots, patched_forward, swapped

__all__ = ["normalise_apart", "ood_entries", "statistics_apart", "statistics_kept", "tracking_norms"]


Normalise = Callable[[slice | None, Tensor | None, Tensor | None, bool, float], Tensor]


def ood_entries(x: Tensor, ood: int, rows: int) -> int:
    """Return how many of the last entries of an activation belong to the last `ood` of `rows` examples."""
    if not ood or ood == rows:
        return len(x) if ood else 0
    if len(x) % rows:
        raise ShapeError(
            f"A normalisation layer saw an activation of shape {tuple(x.shape)} in a batch of {rows} examples, so that "
            "OOD rows cannot be kept out of its statistics. Use OODRegularizer(statistics='together')."
        )
    return ood * (len(x) // rows)


def normalise_apart(layer: Any, x: Tensor, ood: int, normalise: Normalise) -> Tensor:
    """Normalise by the statistics of the batch without its last `ood` rows.

    OOD rows are normalised by the others' statistics, since rows normalised in another way could be told by that
    alone, and leave the running statistics alone. Rows that are all OOD are normalised by the running ones, or by
    their own where there are none. Without any, or in evaluation mode, the statistics are those that `layer.forward`
    takes and updates.

    Args:
        layer: A batch normalisation.
        x: Its input.
        ood: How many of the last rows are OOD.
        normalise: `normalise(rows, running_mean, running_var, training, momentum)` for a part of the rows, or all of
            them, None: a slice of all would be copied in the backward pass.
    """
    training = layer.training or (layer.running_mean is None and layer.running_var is None)
    momentum = 0.0 if layer.momentum is None else layer.momentum
    if layer.training and layer.track_running_stats and layer.num_batches_tracked is not None and ood < len(x):
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:
            momentum = 1.0 / float(layer.num_batches_tracked)
    tracked = not layer.training or layer.track_running_stats
    mean, var = (layer.running_mean, layer.running_var) if tracked else (None, None)
    if not ood or not training:
        return normalise(None, mean, var, training, momentum)
    if ood == len(x):
        return normalise(None, layer.running_mean, layer.running_var, layer.running_mean is None, 0.0)
    own = slice(0, len(x) - ood)
    ordinary = normalise(own, mean, var, True, momentum)
    fixed = _batch_statistics(layer, x[own])
    return torch.cat([ordinary, normalise(slice(len(x) - ood, len(x)), *fixed, False, 0.0)])


def _batch_statistics(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of each channel, of the type that the layer's own statistics have or would have."""
    like = next((t for t in (layer.running_mean, layer.weight) if t is not None), x)
    var, mean = torch.var_mean(at_least_float32(x.detach()), [0, *range(2, x.ndim)], correction=0)
    return mean.to(like), var.to(like)


@contextmanager
def statistics_apart(network: nn.Module, ood: int, rows: int) -> Iterator[None]:
    """Let normalisation learn nothing from the last `ood` of `rows` examples, for a while.

    That holds for all of torch's batch and instance normalisation and what is derived from it, with running statistics
    or without, and for any other module with a `running_mean` or `running_var`.
    """
    norms = [m for m in network.modules() if _learns(m) and "forward" not in m.__dict__] if ood else []
    with patched_forward({norm: partial(_forward, norm, norm.forward, ood, rows) for norm in norms}):
        yield


def _learns(module: nn.Module) -> bool:
    """Return whether a module looks at, or keeps, statistics of more than one row in its present mode."""
    tracks = any(module._buffers.get(name) is not None for name in ("running_mean", "running_var"))
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return module.training or not tracks
    return module.training and tracks


def _forward(norm: Any, forward: Callable[..., Tensor], ood: int, rows: int, *args: Any, **kwargs: Any) -> Tensor:
    x: Tensor = args[0] if args else next(iter(kwargs.values()))
    own = len(x) - ood_entries(x, ood, rows)
    if own == len(x):
        return forward(x)
    ordinary = [forward(x[:own])] if own else []
    tensors: dict[str, Tensor] = {}
    train = norm.training
    if isinstance(norm, nn.modules.batchnorm._BatchNorm):
        train = norm.running_mean is None and not own  # by the others' statistics, or the running ones
        if own:
            tensors = dict(zip(("running_mean", "running_var"), _batch_statistics(norm, x[:own]), strict=True))
    elif isinstance(norm, nn.modules.instancenorm._InstanceNorm):
        tensors = {name: getattr(norm, name).clone() for name in ("running_mean", "running_var")}  # each row by its own
    else:
        train = False
    slots: Slots = {name: [(norm._buffers, name)] for name in tensors}
    with swapped(slots, tensors):
        norm.training, before = train, norm.training
        try:
            return torch.cat([*ordinary, forward(x[own:])])
        finally:
            norm.training = before


@contextmanager
def statistics_kept(network: nn.Module, keep: bool | frozenset[str]) -> Iterator[None]:
    """Normalise by the running statistics, and leave them alone, in training mode too, for a while.

    Args:
        network: The network.
        keep: Whether all layers do so, or the names of those that do.
    """
    known = tracking_norms(network) if keep else {}
    wanted = keep if isinstance(keep, frozenset) else known.keys()
    norms = [norm for name, norm in known.items() if norm.training and name in wanted]
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
