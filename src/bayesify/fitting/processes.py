"""Several processes that learn one posterior: sums of what they saw, and the same tensors in all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from bayesify._core.processes import is_sharded, num_processes, others_expected
from bayesify.laws import Law, Posterior

__all__ = ["add_up", "align", "align_statistics"]


@torch.no_grad()
def add_up(tensors: Iterable[Tensor], *, mean: bool = False) -> None:
    """Replace tensors by their sums, or means, over processes."""
    if num_processes() > 1:
        for together, apart in _joined(tensors):
            with others_expected():
                dist.all_reduce(together)
            _write(together.div_(num_processes()) if mean else together, apart)


@torch.no_grad()
def align(posterior: Posterior) -> None:
    """Give every process the first one's tensors, but those that are sharded."""
    _broadcast([t for t in (*posterior.parameters(), *posterior.buffers()) if not is_sharded(t)])


@torch.no_grad()
def align_statistics(posterior: Posterior) -> None:
    """Give every process the first one's buffers of the network and of its members: each has seen other data."""
    owned = [part.own for part in posterior.law.modules() if isinstance(part, Law)]
    _broadcast([buffer for module in (posterior.network, *owned) for buffer in module.buffers()])


def _broadcast(tensors: Iterable[Tensor]) -> None:
    if num_processes() > 1:
        for together, apart in _joined(tensors):
            with others_expected():
                dist.broadcast(together, 0)
            _write(together, apart)


def _joined(tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Give tensors of one type and device as one, since messages cost more than their bytes."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for apart in groups.values():
        yield torch.cat([tensor.detach().reshape(-1) for tensor in apart]), apart


def _write(together: Tensor, apart: list[Tensor]) -> None:
    for tensor, part in zip(apart, torch.split(together, [tensor.numel() for tensor in apart]), strict=True):
        tensor.copy_(part.view(tensor.shape))
