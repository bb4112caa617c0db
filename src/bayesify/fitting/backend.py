"""Where a training step runs: in this process, or in several through Accelerate."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bayesify._core.processes import alone
from bayesify._core.trees import to_device
from bayesify.fitting.objective import Objective

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["Engine", "Precision", "make_engine"]

Precision = Literal["bf16", "fp16"]


class Engine:
    """One process: the posterior stays on the device it is on, and batches follow it."""

    rank = 0
    processes = 1

    def __init__(self, objective: Objective, precision: Precision | None) -> None:
        self.objective = objective
        self.device = next(objective.parameters()).device
        if precision not in ("bf16", "fp16", None):
            raise ValueError(f"precision must be 'bf16', 'fp16' or None, but it is {precision!r}.")
        self.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, None: None}[precision]
        if precision == "fp16" and self.device.type == "cpu":
            raise ValueError("precision='fp16' needs a GPU; on a CPU use precision='bf16' or None.")
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        self.module: nn.Module = objective

    @contextmanager
    def sharded(self, loader: Iterable[Any]) -> Iterator[Iterable[Any]]:
        """Give this process's part of the loader; the loader itself is as before in the end."""
        yield loader

    def prepare(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimiser as this engine runs it."""
        return optimizer

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a pass."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def loss(self, batch: Any, ood: Any = None) -> Tensor:
        """Return the loss of a batch, and of OOD inputs if there are any."""
        with self.autocast():
            return self.module(*(to_device(one, self.device) for one in (batch, ood)))  # type: ignore[no-any-return]

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients."""
        torch.autograd.backward(self.scaler.scale(loss))

    def accumulating(self) -> AbstractContextManager[Any]:
        """Return the context of a backward pass that no step follows yet."""
        return nullcontext()

    def step(self, optimizer: Optimizer, clip_norm: float | None) -> None:
        """Clip the gradients if asked, and step."""
        if clip_norm is not None:
            self.scaler.unscale_(optimizer)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(parameters, clip_norm)
        self.scaler.step(optimizer)
        self.scaler.update()

    def wait(self) -> None:
        """Wait for the other processes."""


class _AccelerateEngine(Engine):
    """Several processes: Accelerate shards the loader and averages the gradients.

    Each process draws its own noise, since each is seeded by its rank.
    """

    def __init__(self, objective: Objective, precision: Precision | None, accelerator: Accelerator) -> None:
        objective.to(accelerator.device)
        super().__init__(objective, precision)
        self.accelerator = accelerator
        self.rank = accelerator.process_index
        self.processes = accelerator.num_processes
        self.module = accelerator.prepare_model(objective)

    @contextmanager
    def sharded(self, loader: Iterable[Any]) -> Iterator[Iterable[Any]]:
        sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
        own = getattr(sampler, "generator", None)
        try:
            yield self.accelerator.prepare(loader)
        finally:
            if sampler is not None and hasattr(sampler, "generator"):
                sampler.generator = own  # Accelerate gives a sampler without one its own

    def prepare(self, optimizer: Optimizer) -> Optimizer:
        return self.accelerator.prepare(optimizer)  # type: ignore[no-any-return]

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(self.scaler.scale(loss))

    def accumulating(self) -> AbstractContextManager[Any]:
        return self.accelerator.no_sync(self.module)  # type: ignore[no-any-return]

    def wait(self) -> None:
        self.accelerator.wait_for_everyone()


def make_engine(objective: Objective, precision: Precision | None) -> Engine:
    """Return the engine for the way this process was started.

    Under `torchrun` or `accelerate launch` with several processes that is Accelerate; else this process alone.
    """
    if alone() or int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return Engine(objective, precision)
    try:
        from accelerate import Accelerator, DistributedDataParallelKwargs
    except ImportError as error:
        raise ImportError(
            "Training in several processes needs Accelerate: pip install 'bayesify[distributed]'."
        ) from error
    on_cpu = next(objective.parameters()).device.type == "cpu" and not torch.cuda.is_available()
    # A stage trains some of the parameters: the others are to have no gradient, and not one of zeros. Buffers are the
    # learner's, which knows those that training changes from banks of samples.
    options = DistributedDataParallelKwargs(find_unused_parameters=True, broadcast_buffers=False)
    accelerator = Accelerator(cpu=on_cpu, kwargs_handlers=[options])
    return _AccelerateEngine(objective, precision, accelerator)
