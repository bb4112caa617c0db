"""Batch-normalisation statistics that belong to drawn weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bayesify._core.inputs import in_network_type
from bayesify._core.modes import evaluation_mode
from bayesify._core.trees import call, split_batch, to_device
from bayesify.laws.passes import Refusal
from bayesify.laws.tensors import TensorTree, batch_norms, statistics_names

__all__ = ["Statistics", "estimate_statistics"]

STALE = (
    "The batch-normalisation statistics are older than the weights. Call "
    "posterior.refresh_statistics(train_loader), which fit does at its end."
)


class Statistics(nn.Module):
    """Running statistics for the mean network and for each of some draws.

    Statistics belong to weights: a law that draws weights has its own for each draw, so that a network with batch
    normalisation has as many functions as there are rows.

    Args:
        network: The network, whose own statistics fill all rows at first.
        draws: How many draws have a row.

    Attributes:
        rows: The buffers of batch normalisation by name, each (1 + draws, ...); the first row is the mean's.
        fresh: Whether they belong to the weights as they are now: the mean's, the draws'.
    """

    fresh: Tensor

    def __init__(self, network: nn.Module, draws: int) -> None:
        super().__init__()
        stats = {name: network.get_buffer(name) for name in statistics_names(network)}
        self.rows = TensorTree({name: s.expand(1 + draws, *s.shape).clone() for name, s in stats.items()})
        device = next(iter(stats.values())).device
        self.register_buffer("fresh", torch.ones(2, dtype=torch.bool, device=device))

    def outdate(self) -> None:
        """Say that the weights have changed."""
        self.fresh.fill_(False)

    def is_fresh(self) -> Literal[True] | Refusal:
        """True, or a sentence where the draws' statistics are older than their weights."""
        return True if bool(self.fresh[1]) else Refusal(STALE)

    def require_fresh(self) -> None:
        """Raise where the draws' statistics are older than their weights."""
        if not (answer := self.is_fresh()):
            raise ValueError(str(answer))

    def of(self, network: nn.Module, row: int) -> dict[str, Tensor]:
        """Return the statistics of the mean (row 0) or of a draw, as views.

        They are copies where batch normalisation would write into them.
        """
        rows = {name: rows[row] for name, rows in self.rows.as_dict().items()}
        trains = any(norm.training for norm in batch_norms(network).values())
        return {name: s.clone() for name, s in rows.items()} if trains else rows

    @torch.no_grad()
    def refresh(
        self,
        network: nn.Module,
        weights: Callable[[int], Mapping[str, Tensor]],
        loader: Iterable[Any],
        rows: Iterable[int],
        *,
        max_batches: int | None = None,
    ) -> None:
        """Estimate the statistics of some rows anew: a pass over the loader each.

        Args:
            network: The network.
            weights: The weights of a row, by name.
            loader: Training batches.
            rows: Which; 0 is the mean.
            max_batches: How many batches; None takes the whole loader.
        """
        for row in rows:
            statistics = {name: tensor[row] for name, tensor in self.rows.as_dict().items()}
            estimate_statistics(network, weights(row), statistics, loader, max_batches=max_batches)
        self.fresh.fill_(True)


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
