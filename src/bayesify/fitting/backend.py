"""Where a training step runs: in this process, or in several through Accelerate."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bayesify._core.trees import to_device
from bayesify.laws import LossTerms, Posterior

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["Engine", "Precision", "make_engine"]

Precision = Literal["bf16", "fp16"]


class _Loss(nn.Module):
    """A posterior's loss as a forward pass, which is what distributed wrappers synchronise."""

    def __init__(self, posterior: Posterior) -> None:
        super().__init__()
        self.posterior = posterior

    def forward(self, batch: Any, num_data: int, **options: Any) -> dict[str, Tensor]:
        return self.posterior.loss(batch, num_data=num_data, **options)


class Engine:
    """One process: the posterior stays on the device it is on, and batches follow it."""

    rank = 0
    processes = 1

    def __init__(self, posterior: Posterior, precision: Precision | None) -> None:
        self.posterior = posterior
        self.device = next(posterior.parameters()).device
        if precision not in ("bf16", "fp16", None):
            raise ValueError(f"precision must be 'bf16', 'fp16' or None, but it is {precision!r}.")
        self.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, None: None}[precision]
        if precision == "fp16" and self.device.type == "cpu":
            raise ValueError("precision='fp16' needs a GPU; on a CPU use precision='bf16' or None.")
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        self.module: nn.Module = _Loss(posterior)

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

    def loss(self, batch: Any, num_data: int, *, ood: Any = None, **options: Any) -> LossTerms:
        """Return the loss of a batch, and of OOD inputs if there are any."""
        if ood is not None:
            options["ood"] = to_device(ood, self.device)
        with self.autocast():
            return LossTerms(self.module(to_device(batch, self.device), num_data, **options))

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

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over processes."""
        return value

    def gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Return every process's value, in the order of their ranks."""
        return [value]

    def align(self) -> None:
        """Give every process the first one's buffers: each has seen other data."""

    def wait(self) -> None:
        """Wait for the other processes."""


class _AccelerateEngine(Engine):
    """Several processes: Accelerate shards the loader and averages the gradients.

    Each process draws its own noise, since each is seeded by its rank.
    """

    def __init__(self, posterior: Posterior, precision: Precision | None, accelerator: Accelerator) -> None:
        posterior.to(accelerator.device)
        super().__init__(posterior, precision)
        self.accelerator = accelerator
        self.rank = accelerator.process_index
        self.processes = accelerator.num_processes
        self.module = accelerator.prepare_model(_Loss(posterior))

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

    def mean(self, value: Tensor) -> Tensor:
        return self.accelerator.reduce(value, "mean")  # type: ignore[no-any-return]

    def gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        from accelerate.utils import gather_object

        return gather_object([value])  # type: ignore[no-any-return]

    def align(self) -> None:
        from accelerate.utils import broadcast

        for buffer in self.posterior.buffers():
            buffer.copy_(broadcast(buffer.clone()))

    def wait(self) -> None:
        self.accelerator.wait_for_everyone()


def make_engine(posterior: Posterior, precision: Precision | None) -> Engine:
    """Return the engine for the way this process was started.

    Under `torchrun` or `accelerate launch` with several processes that is Accelerate; else this process alone.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return Engine(posterior, precision)
    try:
        from accelerate import Accelerator, DistributedDataParallelKwargs
    except ImportError as error:
        raise ImportError(
            "Training in several processes needs Accelerate: pip install 'bayesify[distributed]'."
        ) from error
    on_cpu = next(posterior.parameters()).device.type == "cpu" and not torch.cuda.is_available()
    # A stage trains some of the parameters; the others get no gradient, which must not stop the reduction.
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=on_cpu, kwargs_handlers=[unused])
    return _AccelerateEngine(posterior, precision, accelerator)
