"""Keep a row's posterior as a folder, made ready, and measure such a folder on the task's network.

`python -m experiments.keep FOLDER --of gain_cifar "network + 3 restarts, 12 passes, log-probabilities" --work work`
fits the row (from its checkpoints in `--work`), makes it ready on the validation data as the row says, and saves it.
`python -m experiments.keep FOLDER` loads it on the network that the row starts from, predicts the test set, and prints
the figures, so that anyone can check them. The folder's `row.json` says which row it is. With `--unpack` it also puts
the networks of an ensemble's members into `--work`, where other rows that have them as members find them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

import bayesify
from bayesify.laws import MemberLaw
from experiments.board import Board
from experiments.config import Config
from experiments.examples import columns_of, figures
from experiments.measures import targets_of
from experiments.run import fitted, found, network_path, ready

__all__ = ["keep", "main", "measure", "unpack"]

ROW = "row.json"


def _board(config: Config) -> Board:
    return next(measure for measure in config.measures if isinstance(measure, Board))


def keep(folder: Path, config: Config, names: Sequence[str], *, seed: int, work: Path) -> None:
    """Fit, make ready and save."""
    posterior, setting = fitted(config, seed, work=work)
    made = _board(config).way.ready(posterior, setting, seed=seed, trial=False)
    bayesify.save(made, folder)
    (folder / ROW).write_text(json.dumps({"row": list(names), "seed": seed}) + "\n", encoding="utf-8")


def measure(folder: Path, config: Config, *, seed: int, work: Path) -> dict[str, Any]:
    """Load a folder on the network that its row starts from, and return the figures of the test set."""
    setting, way = ready(config.task, seed, False, work), _board(config).way
    posterior = bayesify.load(folder, setting.network).eval()
    prediction = bayesify.predict(posterior, setting.test, **way.options(seed=seed, trial=False))
    return figures(columns_of(prediction, targets_of(posterior, setting.test), scale=setting.scale))


def unpack(folder: Path, config: Config, *, seed: int, work: Path) -> None:
    """Put the networks of members that were trained into `work`; those that are the network itself need no file."""
    network = ready(config.task, seed, False, work).network
    law = bayesify.load(folder, network).law
    assert isinstance(law, MemberLaw), f"{folder} holds no ensemble"
    work.mkdir(parents=True, exist_ok=True)
    for index, (member, fit) in enumerate(zip(config.members, config.fits(), strict=True)):
        assert isinstance(member.method, bayesify.MAP), "only plain networks are unpacked"
        if member.method.epochs:
            state = {**network.state_dict(), **law.member_tensors(index)}
            save_file(
                {name: t.detach().contiguous() for name, t in state.items()},
                network_path(work, fit, seed + member.seed),
            )


def main(words: Sequence[str] | None = None) -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--of", nargs=2, metavar=("EXPERIMENT", "ROW"), help="make the folder of this row")
    parser.add_argument("--seed", type=int, default=0, help="of the row that is made")
    parser.add_argument("--work", type=Path, default=Path("work"), help="folder of checkpoints")
    parser.add_argument(
        "--unpack", action="store_true", help="put the members' networks into the folder of checkpoints"
    )
    arguments = parser.parse_args(words)
    options: dict[str, Any] = {"work": arguments.work}
    if arguments.of:
        keep(arguments.folder, found(*arguments.of), arguments.of, seed=arguments.seed, **options)
    said = json.loads((arguments.folder / ROW).read_text(encoding="utf-8"))
    if arguments.unpack:
        unpack(arguments.folder, found(*said["row"]), seed=said["seed"], **options)
    made = measure(arguments.folder, found(*said["row"]), seed=said["seed"], **options)
    print(" / ".join(said["row"]), *(f"{name} {value:.5f}" for name, value in made.items()), sep="\n")


if __name__ == "__main__":
    main()
