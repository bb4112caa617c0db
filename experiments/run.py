"""Run experiments: `BAYESIFY_DATA=... python -m experiments.run abnn_cifar_main_resnet20`.

Without a name it lists the experiments, which `experiments/configs/*.py` describe. A line of a table is fitted and
measured for each seed, and goes to `experiments/results/<name>.json` (`experiments/records.py` says what a row holds);
what is there for the same configuration and seed is not made again. Fits that were stopped go on from their checkpoints
in `--work`, which rows with the same fit share; numbers of single examples, where a measure has them, are kept there
too. `--trial` takes a few examples, one seed, and keeps nothing. `--compile` lets torch compile the network while it is
fitted, which is faster in long runs and the same to rounding.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import bayesify
from bayesify.students import new_student
from experiments.config import Config, Setting, Task
from experiments.configs import experiments
from experiments.cost import epoch_seconds, now
from experiments.examples import save_columns
from experiments.records import RESULTS, Records, config_hash

__all__ = ["examples_path", "fitted", "found", "main", "measured", "network_path"]


def found(experiment: str, name: str) -> Config:
    """Return a configuration by its names."""
    return next(config for config in experiments()[experiment] if config.name == name)


@lru_cache(maxsize=2)
def ready(task: Task, seed: int, trial: bool, work: Path) -> Setting:
    """Return a task made ready, which several rows share."""
    torch.manual_seed(seed)
    return task.setting(seed, trial=trial, work=work)


@lru_cache(maxsize=1)
def _fitted(
    config: Config, seed: int, trial: bool, work: Path, compiled: bool = False
) -> tuple[bayesify.Posterior, float]:
    if config.student is not None:
        return _taught(config, seed, trial, work, compiled)
    if config.members:
        began = now()
        seeds = [seed + one.seed for one in config.members]
        pairs = zip(config.fits(), seeds, strict=True)
        found = [_fitted(_to_fit(one), own, trial, work, compiled)[0] for one, own in pairs]
        return bayesify.ensemble(found).eval(), now() - began
    setting = ready(config.task, seed, trial, work)
    method = config.method
    if trial:
        method = dataclasses.replace(method, epochs=min(1, method.epochs))
    if hasattr(method, "seed"):
        method = dataclasses.replace(method, seed=seed)  # type: ignore[call-arg]
    include = None if config.include is None else list(config.include)
    posterior = bayesify.convert(setting.network, method, include=include, likelihood=copy.deepcopy(setting.likelihood))
    if compiled:
        posterior.network.compile()
    began = now()
    there = network_path(work, config, seed)
    if there.exists() and not trial:
        posterior.network.load_state_dict(load_file(there))
    elif method.learns:
        options: dict[str, Any] = {"accuracy_tolerance": 1.0, **setting.fitting}
        if method.epochs and not trial:
            options |= {"checkpoint": work / f"{config.fit_hash()}-{seed}", "checkpoint_steps": 100}
        if config.supervised:
            assert setting.supervision is not None, f"{config.task} has no OOD inputs to learn from"
            options |= setting.supervision()
        bayesify.fit(posterior, setting.train, seed=seed, progress=False, **options)
    seconds = now() - began
    return (copy.deepcopy(posterior) if compiled else posterior).eval(), seconds  # a copy is not compiled


def _taught(config: Config, seed: int, trial: bool, work: Path, compiled: bool) -> tuple[bayesify.Posterior, float]:
    """Return the student of a row's posterior, which is calibrated on the validation data first."""
    wanted = config.student
    assert wanted is not None
    teacher = copy.deepcopy(_fitted(dataclasses.replace(config, student=None), seed, trial, work, compiled)[0])
    setting = ready(config.task, seed, trial, work)
    began = now()
    views = bayesify.Views(*wanted.views) if wanted.views else None
    bayesify.calibrate(teacher, setting.val, views=views, seed=seed)
    epochs = 1 if trial else wanted.epochs
    taught: dict[str, Any] = {"epochs": epochs, "lr": wanted.lr, "mix": wanted.mix}
    student = new_student(teacher, network=setting.network, draw_seed=seed, **taught)
    if compiled:
        teacher.network.compile()
        student.network.compile()
    kept: dict[str, Any] = {"checkpoint": work / f"{config.fit_hash()}-{seed}", "checkpoint_steps": 100}
    bayesify.fit(student, setting.train, seed=seed, progress=False, accuracy_tolerance=1.0, **({} if trial else kept))
    student.method = None
    return (copy.deepcopy(student) if compiled else student).eval(), now() - began  # a copy is not compiled


def fitted(
    config: Config, seed: int = 0, *, trial: bool = False, work: Path = Path("work")
) -> tuple[bayesify.Posterior, Setting]:
    """Return the fitted posterior of a configuration, from its checkpoint if it is there, and its setting."""
    posterior, _ = _fitted(_to_fit(config), seed, trial, work)
    return posterior, ready(config.task, seed, trial, work)


def measured(
    config: Config, seed: int, *, trial: bool = False, work: Path = Path("work"), compiled: bool = False
) -> dict[str, Any]:
    """Fit and measure."""
    try:
        posterior, seconds = _fitted(_to_fit(config), seed, trial, work, compiled)
    except bayesify.NonFiniteError as error:
        return {"failed": str(error)}
    setting = ready(config.task, seed, trial, work)
    row: dict[str, Any] = {"fit seconds": round(seconds, 1)}
    if not (config.members or config.student or config.method.epochs):  # what trains may have been resumed
        row["fit in plain epochs"] = round(seconds / epoch_seconds(setting), 3) if config.method.learns else 0.0
    row["parameters learned"] = sum(p.numel() for p in posterior.parameters() if p.requires_grad)
    for measure in config.measures:
        row |= measure(posterior, setting, seed=seed, trial=trial)
    columns = row.pop("examples", None)
    if columns is not None and not trial:
        save_columns(examples_path(work, config_hash(config.described()), seed), columns)
    return row


def network_path(work: Path, config: Config, seed: int) -> Path:
    """Return where the network of a fit of `MAP` may be, unpacked from a kept folder; it is then taken as it is."""
    return work / f"{config.fit_hash()}-{seed}.safetensors"


def examples_path(work: Path, hashed: str, seed: int) -> Path:
    """Return where the columns of a row's examples are, by the hash of its configuration."""
    return work / "examples" / f"{hashed}-{seed}.npz"


def _to_fit(config: Config) -> Config:
    """Return a configuration that is equal for rows that differ only in what they are called and measure."""
    return dataclasses.replace(config, name="", measures=(), seeds=())


def run(
    name: str, configs: Sequence[Config], *, seeds: Sequence[int] | None = None, trial: bool = False, work: Path,
    results: Path = RESULTS, compiled: bool = False,
) -> None:  # fmt: skip
    """Make the rows of an experiment that are not there, seed by seed, so that rows share the network of a seed."""
    records = Records(None if trial else results / f"{name}.json")
    wanted = {config: config.seeds[:1] if trial else (config.seeds if seeds is None else seeds) for config in configs}
    for seed in dict.fromkeys(seed for some in wanted.values() for seed in some):
        for config in (config for config, some in wanted.items() if seed in some):
            make = partial(measured, config, seed, trial=trial, work=work, compiled=compiled)
            records.row(config.name, make, config=config.described(), seed=seed)


def main(words: Sequence[str] | None = None, known: Mapping[str, Sequence[Config]] | None = None) -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", help="names; all are listed if there is none")
    parser.add_argument("--only", nargs="*", help="names of rows")
    parser.add_argument("--seeds", type=int, nargs="*", help="other seeds than the configurations'")
    parser.add_argument("--work", type=Path, default=Path("work"), help="folder for checkpoints")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for results")
    parser.add_argument("--trial", action="store_true", help="a few examples, and nothing is kept")
    parser.add_argument("--compile", action="store_true", help="compile networks while they are fitted")
    arguments = parser.parse_args(words)
    all_of_them = experiments() if known is None else known
    for name in arguments.experiments:
        if name not in all_of_them:
            parser.error(f"there is no experiment {name!r}; they are {', '.join(all_of_them)}")
        chosen = [c for c in all_of_them[name] if arguments.only is None or c.name in arguments.only]
        options = {"seeds": arguments.seeds, "trial": arguments.trial, "work": arguments.work}
        options["compiled"] = arguments.compile
        run(name, chosen, results=arguments.results, **options)
    if not arguments.experiments:
        for name, configs in all_of_them.items():
            print(name, *(f"    {config.name}" for config in configs), sep="\n")


if __name__ == "__main__":
    main()
