"""Batch-normalisation statistics that belong to given weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bayesify._core.inputs import in_network_type
from bayesify._core.modes import evaluation_mode
from bayesify._core.trees import call, split_batch, to_device
from bayesify.laws.tensors import TensorTree, batch_norms, statistics_names

__all__ = ["estimate_statistics", "statistics_rows", "statistics_tree"]


def statistics_tree(network: nn.Module, rows: int) -> TensorTree:
    """Return room for the statistics of so many sets of weights, (rows, ...), filled with the network's own."""
    stats = {name: network.get_buffer(name) for name in statistics_names(network)}
    return TensorTree({name: s.expand(rows, *s.shape).clone() for name, s in stats.items()})


def statistics_rows(network: nn.Module, statistics: TensorTree, row: int) -> dict[str, Tensor]:
    """Return one set's statistics by name, as views; as copies where batch normalisation would write into them."""
    rows = {name: rows[row] for name, rows in statistics.as_dict().items()}
    trains = any(norm.training for norm in batch_norms(network).values())
    return {name: s.clone() for name, s in rows.items()} if trains else rows


@torch.no_grad()
def estimate_statistics(
    network: nn.Module,
    weights: Mapping[str, Tensor],
    statistics: Mapping[str, Tensor],
    loader: Iterable[Any],
    *,
    max_batches: int | None = None,
) -> None:
    """Write the statistics that the network has with these weights, as averages over a loader's batches.

    Args:
        network: The network; its own tensors are left alone.
        weights: Its parameters by name.
        statistics: Its batch-normalisation buffers by name, which are written to.
        loader: Training batches; costs a pass over them, or over the first `max_batches`.
        max_batches: None takes the whole loader.
    """
    for name, tensor in statistics.items():
        if name.endswith("num_batches_tracked"):
            tensor.zero_()  # the first batch then replaces what was there
    device = next(network.parameters()).device
    tensors = {**weights, **statistics}
    batches = 0
    with _cumulative(network):
        for batch in islice(loader, max_batches):
            batches += 1
            inputs = in_network_type(split_batch(to_device(batch, device))[0], network)
            call(lambda *args, **kwargs: functional_call(network, tensors, args, kwargs), inputs)
    if batches == 0:
        raise ValueError("The loader gave no batch, so there is nothing to estimate statistics from.")


@contextmanager
def _cumulative(network: nn.Module) -> Iterator[None]:
    """Let batch normalisation, and nothing else, train, with plain averages over batches."""
    norms = list(batch_norms(network).values())
    momenta = [norm.momentum for norm in norms]
    with evaluation_mode(network):
        for norm in norms:
            norm.train()
            norm.momentum = None  # type: ignore[assignment]
        try:
            yield
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
