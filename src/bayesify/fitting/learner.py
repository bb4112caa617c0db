"""What a method learns by beside the gradient of its loss, for any loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from bayesify._core.modes import modes_kept
from bayesify._core.processes import as_long_as_all, gather, shared_random_state
from bayesify._core.trees import to_device
from bayesify.fitting.objective import Objective
from bayesify.fitting.processes import add_up, align, align_statistics
from bayesify.fitting.shards import is_divided, make_whole
from bayesify.methods import Method, Stage

__all__ = ["Learner"]


class Learner:
    """What a method needs of a loop: its optimiser, a call after each step, and one at the end.

    Methods learn from more than the gradient of a loss: SWAG collects weights on its path, SGLD keeps samples after its
    burn-in, Laplace makes a pass over the data, iBNN lets its divergence grow. `fit` is a loop around this object, and
    loops of your own and of other packages can be too. In several processes it keeps buffers the same in all of them.

    Args:
        objective: The loss that the loop follows.
        epochs: How many epochs the loop makes; None takes the method's number. Schedules and samples depend on it.
        steps_per_epoch: Optimiser steps in each, as many in every process: `len(loader)` unless gradients are
            accumulated.

    Attributes:
        stages: Parts of the training with an optimiser of their own: one, or one for each member or chain.
        step: How many steps the present stage has taken.

    Example:
        >>> import torch
        >>> from bayesify import SWAG, Objective, convert, predict
        >>> data = torch.utils.data.TensorDataset(torch.randn(12, 4), torch.arange(12) % 3)
        >>> loader = torch.utils.data.DataLoader(data, batch_size=4)
        >>> posterior = convert(torch.nn.Linear(4, 3), SWAG(rank=2))
        >>> objective = Objective(posterior, num_data=12)
        >>> learner = Learner(objective, epochs=2, steps_per_epoch=len(loader))
        >>> optimizer = learner.optimizer()
        >>> for epoch in range(2):
        ...     for batch in loader:
        ...         objective(batch).backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         learner.after_step()
        >>> learner.finish(loader)
        >>> bool(predict(posterior, torch.randn(2, 4)).epistemic.min() > 0)
        True
    """

    def __init__(self, objective: Objective, *, epochs: float | None = None, steps_per_epoch: int = 0) -> None:
        self.objective = objective
        self.posterior = objective.posterior
        self.method: Method = self.posterior.require_method()
        self.epochs = self.method.epochs if epochs is None else epochs
        self.steps_per_epoch = steps_per_epoch
        self.survey = self.method.survey(self.posterior, objective.num_data)
        self.stages: list[Stage] = self.method.stages(self.posterior)
        self.step = 0
        self.stage: int | None = None
        self.schedule: LambdaLR | None = None
        if not self.method.trains_in_parts and is_divided(objective):
            raise ValueError(
                f"{type(self.method).__name__} reads whole weights in each of its steps, and fully_shard leaves each "
                "process a part of them. Use DistributedDataParallel(objective)."
            )

    @property
    def total_steps(self) -> int:
        """How many steps a stage has."""
        return round(self.epochs * self.steps_per_epoch)

    def optimizer(
        self, stage: int | None = None, *, make: Callable[[list[dict[str, Any]]], Optimizer] | None = None
    ) -> Optimizer:
        """Begin a stage and return its optimiser, whose learning rates `after_step` schedules as the method has it.

        Args:
            stage: Which of `stages`; None takes all members together, whose steps cost the memory of all.
            make: A function of parameter groups that returns an optimiser; None takes the method's.

        Returns:
            The optimiser.
        """
        if self.total_steps < 1:
            raise ValueError(
                "How many steps there will be is not known. Say so: Learner(objective, epochs=..., "
                "steps_per_epoch=len(loader))."
            )
        self._check_processes()
        groups, self.objective.context, self.objective.members = self._begun(stage)
        if not any(parameter.requires_grad for group in groups for parameter in group["params"]):
            name = self.method.name if stage is None else self.stages[stage].name
            raise ValueError(f"There is nothing to train in {name}: every parameter is frozen.")
        with shared_random_state(), self.objective.context():
            optimizer = (make or self.method.make_optimizer)(groups)
            self.method.prepare_optimizer(self.posterior, optimizer, self.objective.num_data)
            self.schedule = self.method.make_schedule(optimizer, self.total_steps)
        self.step, self.stage = 0, stage
        return optimizer

    def _check_processes(self) -> None:
        known = gather((self.epochs, self.steps_per_epoch))
        if len(set(known)) > 1:
            numbers = ", ".join(f"{epochs} x {steps}" for epochs, steps in known)
            raise ValueError(
                f"The processes would take different numbers of steps (epochs x steps: {numbers}), and each waits for "
                "all others in every step. Give each of them as many batches: by a DistributedSampler, which repeats a "
                "few examples, or with drop_last=True."
            )

    def _begun(self, stage: int | None) -> tuple[list[dict[str, Any]], Callable[[], AbstractContextManager[Any]], int]:
        """Return the parameter groups, the context and the number of members that a stage trains."""
        number = len(self.stages)
        if stage is not None or number == 1:
            own = self.stages[stage or 0]
            return own.groups, own.context, own.members
        if not self.method.trains_together:
            raise ValueError(
                f"{type(self.method).__name__} trains {number} chains one after another, each in a loop of its own: "
                f"optimizer = learner.optimizer(0), and so on to {number - 1}. With together=True they share one."
            )
        seen: set[int] = set()
        groups = []
        for group in (group for own in self.stages for group in own.groups):
            new = [parameter for parameter in group["params"] if id(parameter) not in seen]
            seen |= {id(parameter) for parameter in new}
            groups.append({**group, "params": new})
        return [group for group in groups if group["params"]], nullcontext, number

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Give a loader's batches as long as every process has one; where some end before others, all raise.

        A step waits for all processes, so that a loader that ends before its announced length would leave the others
        waiting. In one process these are the loader's batches, at no cost; else a small message precedes each.
        """
        return as_long_as_all(loader)

    def after_step(self) -> None:
        """Act after an optimiser step: learning rates, what the method keeps of its path, the processes' buffers."""
        if self.schedule is None:
            raise ValueError("No stage has begun: optimizer = learner.optimizer() comes before the first step.")
        self.step += 1
        self.schedule.step()
        with self.objective.context():
            self.method.after_step(self.posterior, self.step, self.total_steps, self.steps_per_epoch)
        align_statistics(self.posterior)

    def finish(
        self, loader: Iterable[Any], *, val_loader: Iterable[Any] | None = None, progress: Callable[..., Any] = iter
    ) -> None:
        """Act once after the last step: statistics of drawn weights, and passes over the data that a method makes.

        In several processes each may see a part of the data, as in training, or all of them; what they find is put
        together. Weights of which each process had a part (`fully_shard`) become whole in every process, for what
        follows: passes over the data, predictions and files.

        Args:
            loader: Training batches.
            val_loader: Batches that were not trained on, the same in every process: Laplace chooses its prior on them.
            progress: Wraps what takes long.
        """
        make_whole(self.objective)
        if self.schedule is not None:
            self._warn_of_missing_steps()
            self.end_steps(loader, progress)
        elif self.survey is None and self.posterior.unfinished and not self.method.learns_by_loss:
            raise ValueError(self.posterior.learned)
        for _ in self.look(progress(loader), val_loader):
            pass
        self.posterior.unfinished = False

    def end_steps(self, loader: Iterable[Any], progress: Callable[..., Any] = iter) -> None:
        """Act once after the last step of the last stage."""
        with modes_kept(self.posterior):
            self.posterior.train()
            self.method.finish(self.posterior, loader, progress)
        if self.posterior.statistics is not None:
            rows = self.posterior.statistics.rows.buffers()
            add_up((row for row in rows if row.is_floating_point()), mean=True)
        align(self.posterior)

    def _warn_of_missing_steps(self) -> None:
        if self.step < self.total_steps and type(self.method).after_step is not Method.after_step:
            warnings.warn(
                f"The loop ended after {self.step} of the {self.total_steps} steps that the learner was told of. What "
                f"{type(self.method).__name__} does later in a run, as taking samples, was not done.",
                stacklevel=3,
            )

    def look(self, batches: Iterable[Any], val_loader: Iterable[Any] | None, *, anew: bool = True) -> Iterator[None]:
        """Make the pass over the data that a method makes after the steps, if it does, batch by batch.

        Args:
            batches: Training batches.
            val_loader: As in `finish`.
            anew: Forget what was seen before; else go on.
        """
        if self.survey is None:
            return
        device = next(self.posterior.parameters()).device
        if anew:
            self.survey.begin(val_loader)
            self.survey.reset()
        with modes_kept(self.posterior):
            self.posterior.eval()
            seen = not anew
            for batch in batches:
                seen = True
                self.survey.look(to_device(batch, device))
                yield
            if not seen:
                raise ValueError("The loader gave no batch. Check its data set, batch size and drop_last.")
            add_up(self.survey.sums())
            self.survey.end(val_loader)
        align(self.posterior)

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop is, for a checkpoint beside the posterior's and the optimiser's states."""
        schedule = {} if self.schedule is None else self.schedule.state_dict()
        return {"stage": self.stage, "step": self.step, "schedule": schedule}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a loop was: after `optimizer(stage)` of the stage that it was in."""
        if self.schedule is None or self.stage != state["stage"]:
            raise ValueError(
                f"The loop was in stage {state['stage']}: begin it with learner.optimizer({state['stage']})."
            )
        self.step = state["step"]
        self.schedule.load_state_dict(state["schedule"])
