"""Runs of `fit` in a process of their own, which may be killed at any of their steps."""

import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler, get_worker_info

import bayesify
from bayesify import MAP, SGLD, SWAG, BayesAdapter, DeepEnsemble, Laplace, Method, OODRegularizer
from tests.conformance.cases import CASES
from tests.processes import FORKS

if not hasattr(os, "fork"):
    import pytest

    pytest.skip("the processes here are forked", allow_module_level=True)

ROWS, CLASSES = 22, 3


class Events:
    """Notes what happens in this process, and ends it with SIGKILL at the event of the given number, from 1."""

    def __init__(self, kill_at: int | None) -> None:
        self.kill_at = kill_at
        self.seen: list[str] = []

    def happen(self, what: str) -> None:
        self.seen.append(what)
        if len(self.seen) == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch_files(self) -> None:
        """Make the time just before and just after a file is put in its place events."""
        replace = os.replace

        def watched(source: str, target: Path) -> None:
            self.happen(f"before {target.name}")
            replace(source, target)
            self.happen(f"after {target.name}")

        os.replace = watched
        # A killed process loses nothing that it wrote, only a power cut does: so that tests need not wait for disks.
        os.fsync = lambda handle: self.happen("sync")


class Calls:
    """Ends this process with SIGKILL at the call of the given number, of any function of Python's or C's, from 1."""

    def __init__(self, kill_at: int | None) -> None:
        self.kill_at = kill_at
        self.count = 0

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        self.count += 1
        if self.count == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Numbers and labels; with `augment`, shaken by torch, NumPy and Python where they are fetched."""

    def __init__(self, events: Events, *, augment: bool, rows: int = ROWS) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(rows, 4, generator=generator)
        self.y = torch.randint(CLASSES, (rows,), generator=generator)
        self.events = events
        self.augment = augment

    def __len__(self) -> int:
        return len(self.x)

    def __getitems__(self, rows: list[int]) -> list[tuple[Tensor, Tensor]]:
        if get_worker_info() is None:
            self.events.happen("fetch")
        return [self[row] for row in rows]

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        x = self.x[row]
        if self.augment:
            x = x + 0.1 * torch.randn(4) + 0.1 * float(np.random.randn()) + 0.1 * random.gauss(0, 1)
        return x, self.y[row]


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, CLASSES)
    )  # fmt: skip


def _scenario(
    method: Method,
    *,
    augment: bool = False,
    validate: bool = False,
    ood: bool = False,
    loader: dict[str, Any] | None = None,
    **options: Any,
) -> Callable[[Events], tuple[Method, DataLoader[Any], dict[str, Any]]]:
    def build(events: Events) -> tuple[Method, DataLoader[Any], dict[str, Any]]:
        own = {key: value() if callable(value) else value for key, value in (loader or {"shuffle": True}).items()}
        data = DataLoader(Points(events, augment=augment), batch_size=4, **own)
        if validate:
            options["val_loader"] = DataLoader(Points(events, augment=False, rows=9), batch_size=4, shuffle=True)
        if ood:
            options["ood_loader"] = DataLoader(Points(events, augment=True, rows=10), batch_size=4, shuffle=True)
        return method, data, options

    return build


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(13)


def _weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler(torch.arange(1.0, ROWS + 1), ROWS, generator=_generator())


SCENARIOS = {
    "map": _scenario(MAP(lr=0.1, schedule="cosine"), epochs=3, checkpoint_steps=1),
    "adam and accumulation": _scenario(
        MAP(lr=0.1, optimizer="adam"), epochs=2, checkpoint_steps=1, accumulate=4, clip_norm=0.1
    ),
    "epochs alone": _scenario(MAP(lr=0.1), validate=True, epochs=3),
    "ensemble": _scenario(DeepEnsemble(members=3, lr=0.2), validate=True, epochs=4, patience=1),
    "ensemble within epochs": _scenario(DeepEnsemble(members=2), epochs=2, checkpoint_steps=2),
    "swag": _scenario(SWAG(rank=3, num_bn_draws=3, snapshots_per_epoch=2), epochs=2, checkpoint_steps=2),
    "own generator": _scenario(
        MAP(lr=0.1), loader={"shuffle": True, "generator": _generator}, epochs=3, checkpoint_steps=2
    ),
    "own generator, epochs alone": _scenario(
        SWAG(rank=2, num_bn_draws=2, statistics_batches=2), loader={"shuffle": True, "generator": _generator}, epochs=2
    ),
    "weighted sampler": _scenario(DeepEnsemble(members=2), loader={"sampler": _weighted}, epochs=2, checkpoint_steps=2),
    "augmented": _scenario(MAP(lr=0.1), augment=True, epochs=2, checkpoint_steps=1),
    "augmented swag": _scenario(
        SWAG(rank=2, num_bn_draws=2), augment=True, validate=True, epochs=2, checkpoint_steps=4
    ),
    "augmented by workers": _scenario(
        MAP(lr=0.1),
        augment=True,
        validate=True,
        loader={"shuffle": True, "num_workers": 2},
        epochs=2,
        checkpoint_steps=2,
    ),
}
# Each method, in every structure it has, with all that can be in the way.
EVERY_METHOD = {
    **{
        case.name: _scenario(case.noisy, checkpoint_steps=1, **({"epochs": 2} if case.noisy.epochs else {}))
        for case in CASES
    },
    "sgld, chains apart": _scenario(
        SGLD(samples_per_chain=2, chains=3, kind="sghmc", lr=0.1, weight_decay=0.0), epochs=2, checkpoint_steps=2
    ),
    "laplace, trained and validated": _scenario(
        Laplace(structure="diagonal", lr=0.1), validate=True, epochs=2, patience=1, checkpoint_steps=2
    ),
    "bayes-adapter, OOD inputs": _scenario(
        BayesAdapter(start_std=(0.05, 0.1)), ood=True, epochs=2, checkpoint_steps=1,
        regularizer=OODRegularizer(threshold=0.5),
    ),
}  # fmt: skip


def work(name: str, folder: Path | None, result: Path, kill_at: int | None, anywhere: bool) -> None:
    """Run a scenario to its end and write down what came out, or die on the way."""
    torch.set_num_threads(1)
    events, calls = Events(None if anywhere else kill_at), Calls(kill_at)
    method, data, options = {**SCENARIOS, **EVERY_METHOD}[name](events)
    posterior = bayesify.convert(network(), method)
    posterior.default_draws = min(2, posterior.default_draws)  # Laplace tries many prior precisions with each of them
    register_optimizer_step_post_hook(lambda *_: events.happen("step"))
    events.watch_files()
    if anywhere:
        sys.setprofile(calls)
    history = bayesify.fit(
        posterior, data, checkpoint=folder, seed=5, progress=False, accuracy_tolerance=1.0, **options
    )
    sys.setprofile(None)
    records = [{**vars(record), "seconds": None} for record in history.epochs]
    numbers = (records, history.accuracy_before, history.accuracy_after)
    found = {"state": posterior.state_dict(), "numbers": numbers, "events": events.seen, "calls": calls.count}
    torch.save(found, result)


def run(
    name: str, folder: Path, kill_at: int | None = None, *, checkpoint: bool = True, anywhere: bool = False
) -> dict[str, Any] | None:
    """Run a scenario in a process of its own; None where it was killed: at an event, or `anywhere` at a call."""
    folder.mkdir(exist_ok=True)
    result = folder / "result.pt"
    process = FORKS.Process(target=work, args=(name, folder if checkpoint else None, result, kill_at, anywhere))
    process.start()
    process.join(60)
    if process.is_alive():
        process.kill()
        raise TimeoutError(f"{name} takes too long")
    if process.exitcode == -signal.SIGKILL:
        return None
    assert process.exitcode == 0, f"{name} ended with {process.exitcode}"
    return torch.load(result)
