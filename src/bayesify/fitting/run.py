"""One run of the training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from bayesify._core.processes import as_long_as_all, gather
from bayesify._core.progress import bar
from bayesify._core.trees import inputs_of
from bayesify.fitting.backend import Engine
from bayesify.fitting.checkpoint import ANEW, Checkpoint, Progress, Saved
from bayesify.fitting.health import check_finite
from bayesify.fitting.history import EpochRecord, History
from bayesify.fitting.identity import (
    describe_data,
    describe_likelihood,
    describe_optimizer,
    describe_start,
    length,
    own_tensors,
)
from bayesify.fitting.learner import Learner
from bayesify.fitting.log import Log, open_log
from bayesify.fitting.measurements import Measurements
from bayesify.fitting.network_probe import probe_difference
from bayesify.fitting.paired import Paired
from bayesify.fitting.processes import add_up
from bayesify.fitting.random_state import random_state, restore_random_state, seed_part
from bayesify.laws import LossTerms, Posterior
from bayesify.methods import OODRegularizer, Stage

__all__ = ["Run"]

COMPARED = ("epochs", "patience", "seed", "num_data", "accumulate", "clip_norm")
# What the run in a folder began with, for posteriors that were in one: fit again, after an interrupt in a notebook, it
# goes on, though the posterior is no longer what it was.
_STARTS: WeakKeyDictionary[Posterior, dict[Path, dict[str, Any]]] = WeakKeyDictionary()


@dataclass(kw_only=True)
class Run:
    """One call of `fit`: its settings, which are those of `fit`, and where it is."""

    posterior: Posterior
    loader: Iterable[Any]
    ood_loader: Iterable[Any] | None
    regularizer: OODRegularizer | None
    val_loader: Iterable[Any] | None
    epochs: int
    patience: int | None
    num_data: int
    make_optimizer: Callable[[list[dict[str, Any]]], Optimizer]
    accumulate: int
    clip_norm: float | None
    engine: Engine
    checkpoint_folder: str | Path | None
    checkpoint_steps: int | None
    log_dir: str | Path | None
    seed: int
    shown: bool

    def __post_init__(self) -> None:
        """Begin at the beginning."""
        self.method = self.posterior.require_method()
        self.shown = self.shown and self.engine.rank == 0
        self.history = History()
        self.progress = Progress()
        self.sums: dict[str, Any] = {}
        self.epoch_random: dict[str, Any] = {}  # decides the order of the data in the present epoch
        self.log = Log()
        self.batches = 0
        self.probe: dict[str, Any] | None = None
        self.checkpoint = Checkpoint(self.checkpoint_folder)
        self.measurements = Measurements(
            posterior=self.posterior,
            loader=self.loader,
            val_loader=self.val_loader,
            epochs=self.epochs,
            engine=self.engine,
            seed=self.seed,
        )

    # -- the run --------------------------------------------------------------------------------------------

    def all_stages(self, accuracy_tolerance: float) -> History:
        """Run, or go on with, all stages, and what comes after them."""
        saved = self._resume()
        if saved is not None:
            self.history, self.progress = saved.history, saved.progress
        if self.progress.done:
            return self.history
        self.learner = Learner(self.engine.objective, epochs=self.epochs)
        survey, stages = self.learner.survey, self.learner.stages
        if survey is not None:
            survey.begin(self.val_loader)
        if saved is None:
            self.measurements.before(self.history)
            if self.checkpoint.folder is not None:
                self.probe = self.measurements.probe()
        else:
            names = [*(stage.name for stage in stages), "survey"]
            self.history.resumed_from = (names[self.progress.stage], self.progress.epoch)
        self.log = open_log(self.log_dir if self.engine.rank == 0 else None)
        try:
            if self.epochs and self.progress.stage < len(stages):
                self._all_epochs(stages, saved)
                saved = None
            if survey is not None:
                self._survey(len(stages), saved)
            if self.epochs or survey is not None:
                self.measurements.after(self.history, survey, accuracy_tolerance)
            self.progress.done = True
            self._save(None)
        finally:
            self.log.close()
            self.posterior.unfinished = False  # a run that was broken off has learned what it has
        return self.history

    def _resume(self) -> Saved | None:
        """Put the posterior where the checkpoint is, if there is one and it is of this run."""
        checkpoint, posterior = self.checkpoint, self.posterior
        if checkpoint.folder is None:
            return None
        saved, folder = checkpoint.read(), checkpoint.folder.resolve()
        known = None if saved is None else _STARTS.get(posterior, {}).get(folder)
        start = known or describe_start(posterior)
        settings = {
            **{name: getattr(self, name) for name in COMPARED},
            "method": self.method.to_dict(),
            "likelihood": describe_likelihood(posterior.likelihood),
            "precision": None if self.engine.dtype is None else str(self.engine.dtype),
            "processes": self.engine.processes,
            "optimiser": self._caller_optimizer(),
            "loader": describe_data(self.loader),
            "val_loader": describe_data(self.val_loader),
            "ood_loader": describe_data(self.ood_loader),
            "regulariser": None if self.ood_loader is None else asdict(self.regularizer or OODRegularizer()),
            "start": start,
        }
        # The first process's: the others' posteriors were set to its when the engine was made.
        checkpoint.set_settings(gather(settings)[0])
        if saved is not None:
            checkpoint.check(saved)
            self.probe = saved.parts["probe"]
            other = None if known or self.probe is None else probe_difference(posterior, self.probe)
            if other is not None:
                raise ValueError(
                    f"{checkpoint.path} belongs to another run: its network computed other outputs from the same "
                    f"weights and inputs (by {other:.2g}), as with another activation or order of layers. Give the "
                    f"same network to go on with it, {ANEW}."
                )
            checkpoint.restore(posterior, saved.tensors)
        if self.engine.rank == 0:
            checkpoint.clean()
        _STARTS.setdefault(posterior, {})[folder] = start
        return saved

    def _caller_optimizer(self) -> dict[str, Any] | None:
        if not self.epochs or self.make_optimizer == self.method.make_optimizer:
            return None
        self._seed(0, -1, shared=True)
        return describe_optimizer(self.make_optimizer(self.method.stages(self.posterior)[0].groups))

    def _all_epochs(self, stages: list[Stage], saved: Saved | None) -> None:
        self._seed(0, -1, shared=True)  # Accelerate may seed the order of the data now
        with self.engine.sharded(self.loader) as shard, self._ood_shard() as ood:
            self.batches = length(shard)
            if ood is not None:
                shard = Paired(shard, ood)
            self.learner.steps_per_epoch = -(-self.batches // self.accumulate)
            if saved is not None:
                restore_random_state(saved.parts["random"][self.engine.rank]["now"], *self._loaders)
            for index in range(self.progress.stage, len(stages)):
                with stages[index].context():
                    self._stage(index, stages[index], shard, saved)
                saved = None
            self._seed(len(stages), 0, shared=True)
            self.learner.end_steps(self.loader, lambda items: bar(items, "finish", shown=self.shown))

    def _survey(self, stage: int, saved: Saved | None) -> None:
        """Make, or go on with, the pass after the epochs; every process makes all of it, and comes to the same."""
        if saved is None:
            self.progress, self.sums = Progress(stage=stage), {}
            self._seed(stage, 1, shared=True)
            self.epoch_random = random_state(*self._loaders)
        else:
            self.epoch_random = saved.parts["random"][self.engine.rank]["epoch"]
            restore_random_state(self.epoch_random, *self._loaders)
        state = self.progress
        batches = iter(self.loader)
        for _ in range(state.step):
            next(batches)
        if saved is not None:
            restore_random_state(saved.parts["random"][self.engine.rank]["now"], *self._loaders)
        shown = bar(batches, "survey", shown=self.shown, total=length(self.loader), initial=state.step)
        for _ in self.learner.look(shown, self.val_loader, anew=saved is None):
            state.step += 1
            if self.checkpoint_steps is not None and state.step % self.checkpoint_steps == 0:
                self._save(None)

    def _stage(self, index: int, stage: Stage, loader: Iterable[Any], saved: Saved | None) -> None:
        self._seed(index, -1, shared=True)  # what an optimiser draws when it is made is the same in every process
        optimizer = self.engine.prepare(self.learner.optimizer(index, make=self.make_optimizer))
        best = None
        if saved is None:
            self.progress = Progress(stage=index)
        else:
            optimizer.load_state_dict(saved.parts["optimiser"])
            steps = self.progress.epoch * self.learner.steps_per_epoch + -(-self.progress.step // self.accumulate)
            self.learner.load_state_dict({"stage": index, "step": steps, "schedule": saved.parts["schedule"]})
            self.engine.scaler.load_state_dict(saved.parts["scaler"])
            if self.patience is not None and self.progress.best_nll is not None:
                best = self.checkpoint.read_best(index)
        state = self.progress
        while state.epoch < self.epochs:
            if self.patience is not None and state.epoch - state.best_epoch >= self.patience:
                break
            self._epoch(stage, loader, optimizer, saved if state.step else None)
            saved = None
            val_nll = self.measurements.during()
            if val_nll is not None and (state.best_nll is None or val_nll < state.best_nll):
                state.best_nll, state.best_epoch = val_nll, state.epoch
                if self.patience is not None:
                    best = {name: tensor.detach().clone() for name, tensor in own_tensors(self.posterior).items()}
                    if self.engine.rank == 0:
                        self.checkpoint.save_best(self.posterior, index)
            self._record(stage, optimizer, val_nll)
            self._save(optimizer)
        if best is not None:
            self.checkpoint.restore(self.posterior, best)

    def _epoch(self, stage: Stage, loader: Iterable[Any], optimizer: Optimizer, saved: Saved | None) -> None:
        """Run one epoch, or the rest of one."""
        state = self.progress
        self.posterior.train()
        if saved is None:
            self.sums, state.step, state.seconds = {}, 0, 0.0
            self._seed(state.stage, state.epoch)
            self.epoch_random = random_state(*self._loaders)
        else:
            self.sums = dict(state.sums)
            self.epoch_random = saved.parts["random"][self.engine.rank]["epoch"]
            restore_random_state(self.epoch_random, *self._loaders)
        batches = iter(loader)
        for _ in range(state.step):  # the same order of data as before, without the steps that were done
            next(batches)
        if saved is not None:
            restore_random_state(saved.parts["random"][self.engine.rank]["now"], *self._loaders)
        label = f"{stage.name} epoch {state.epoch + 1}/{self.epochs}"
        shown = bar(as_long_as_all(batches), label, shown=self.shown, total=self.batches, initial=state.step)
        optimizer.zero_grad(set_to_none=True)
        began = time.perf_counter()
        written = state.step
        for batch in shown:
            stepped = self._batch(stage, batch, optimizer)
            if hasattr(shown, "set_postfix") and self._may_look():
                means = {name: f"{value:.4f}" for name, value in self._means().items()}
                shown.set_postfix(means, refresh=False)
            # Gradients that wait for their step are not written, so a checkpoint waits for it too.
            due = self.checkpoint_steps is not None and state.step - written >= self.checkpoint_steps
            if due and stepped and state.step < self.batches:
                written = state.step
                state.seconds += time.perf_counter() - began
                began = time.perf_counter()
                self._save(optimizer)
        if state.step == 0:
            raise ValueError("The loader gave no batch. Check its data set, batch size and drop_last.")
        state.seconds += time.perf_counter() - began
        state.epoch += 1
        add_up(self.sums.values(), mean=True)

    def _batch(self, stage: Stage, batch: Any, optimizer: Optimizer) -> bool:
        """Learn from one batch; return whether the optimiser stepped."""
        state, total = self.progress, self.batches
        state.step += 1
        steps = state.step % self.accumulate == 0 or state.step == total
        # The last group of an epoch may be shorter; its mean is over the batches it has.
        group = self.accumulate
        if state.step > total - total % self.accumulate:
            group = total % self.accumulate
        with nullcontext() if steps else self.engine.accumulating():
            own, ood = (batch, None) if self.ood_loader is None else batch
            self.engine.backward(self.engine.loss(own, inputs_of(ood)) / group)
        terms = LossTerms({name: value.double() for name, value in self.engine.objective.terms.items()})
        if self._may_look():
            check_finite(terms, self.posterior, own, stage.name, epoch=state.epoch + 1, step=state.step)
        for name, value in [*terms.items(), ("total", terms.total)]:
            self.sums[name] = self.sums.get(name, 0.0) + value
        if steps:
            self.engine.step(optimizer, self.clip_norm)
            optimizer.zero_grad(set_to_none=True)
            self.learner.after_step()
        return steps

    @contextmanager
    def _ood_shard(self) -> Iterator[Iterable[Any] | None]:
        if self.ood_loader is None:
            yield None
            return
        with self.engine.sharded(self.ood_loader) as shard:
            yield shard

    @property
    def _loaders(self) -> tuple[Iterable[Any] | None, ...]:
        return (self.loader, self.ood_loader)

    def _may_look(self) -> bool:
        """Whether to read numbers now: always on a CPU; on other devices, where that waits, now and then."""
        step = self.progress.step
        return self.engine.device.type == "cpu" or step % 20 == 0 or step == self.batches

    def _means(self) -> dict[str, float]:
        return {name: float(value) / max(self.progress.step, 1) for name, value in self.sums.items()}

    # -- around the epochs ----------------------------------------------------------------------------------

    def _seed(self, stage: int, epoch: int, *, shared: bool = False) -> None:
        seed_part(self.seed, stage, epoch, 0 if shared else self.engine.rank)

    def _record(self, stage: Stage, optimizer: Optimizer, val_nll: float | None) -> None:
        state = self.progress
        means = self._means()
        lr = float(optimizer.param_groups[0]["lr"])
        steps = state.epoch * self.learner.steps_per_epoch
        record = EpochRecord(stage.name, state.epoch, steps, means, val_nll, lr, state.seconds)
        self.history.epochs.append(record)
        scalars = {f"{stage.name}/{name}": value for name, value in means.items()}
        self.log.add({**scalars, f"{stage.name}/val_nll": val_nll, f"{stage.name}/lr": lr}, state.epoch)
        state.step = 0

    def _save(self, optimizer: Optimizer | None) -> None:
        if self.checkpoint.folder is None:
            return
        random = gather({"now": random_state(*self._loaders), "epoch": self.epoch_random})
        self.progress.sums = {name: float(value) for name, value in self.sums.items()}
        schedule = self.learner.schedule
        if self.engine.rank == 0:
            parts = {
                "probe": self.probe,
                "optimiser": None if optimizer is None else optimizer.state_dict(),
                "schedule": None if optimizer is None or schedule is None else _plain(schedule.state_dict()),
                "scaler": self.engine.scaler.state_dict(),
                "random": random,
            }
            self.checkpoint.save(self.posterior, self.progress, self.history, parts)
        self.engine.wait()


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """Leave out a schedule's functions, which the method makes anew."""
    return {key: value for key, value in state.items() if key != "lr_lambdas"} | {"lr_lambdas": [None]}
