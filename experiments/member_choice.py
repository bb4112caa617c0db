"""Which trained members to put beside the network, by validation images alone.

`BAYESIFY_DATA=... python -m experiments.member_choice --work work` takes the pretrained ResNet-20 of CIFAR-10, the
members of the folders in `experiments/kept`, and the fits of `gain_methods` whose checkpoints are in `--work`. Every
ensemble of the network and some of them that takes at most 40 plain epochs of fitting and 12 passes is judged, on two,
three or four views: by the NLL of the 2,000 validation images, each fifth with the temperatures of the others, one for
each member, averaging log-probabilities. Rows go to `experiments/results/gain_choice.json`, and the best are printed.
No test image is read.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

import bayesify
from bayesify.likelihoods.pooling_fit import Pooled, held_out_nll
from bayesify.prediction.calibration import draws_of
from experiments.board_tasks import CifarBoard
from experiments.config import Setting
from experiments.configs.gain import FOUR, MOST
from experiments.records import RESULTS, Records
from experiments.run import fitted, found, ready

__all__ = ["Candidate", "affordable", "judged", "main"]

EPOCHS = 40  # plain ones, of fitting
KEPT = Path(__file__).parent / "kept"
# The members of kept folders, in their order.
FOLDERS: Mapping[str, tuple[str, ...]] = {
    "cifar_members": ("network", "restart 1", "restart 3"),
    "cifar_teacher": ("network", "restart 1", "restart 2"),
    "cifar_ensemble": ("network", "restart 3", "BayesAdapter"),
}
COSTS = {"network": 0, "restart 1": 12, "restart 2": 12, "restart 3": 12, "BayesAdapter": 15}  # plain epochs
TRAINED = ("plain fine-tuning", "snapshots", "cyclical SGHMC", "ABNN")  # ten plain epochs each
VIEWS = (FOUR[:2], FOUR[:3], FOUR)


@dataclass(frozen=True)
class Candidate:
    """A fit that may be part of an ensemble.

    Attributes:
        name: What it is called.
        epochs: Plain epochs that it took.
        outputs: Its members' logits on as many views as the key says, (M, V, N, C).
    """

    name: str
    epochs: int
    outputs: Mapping[int, Tensor]

    @property
    def members(self) -> int:
        """Return M, the number of its members."""
        return len(next(iter(self.outputs.values())))


def candidates(setting: Setting, work: Path) -> tuple[dict[str, Candidate], Tensor]:
    """Return what is kept and what is in `work`, the network first, and the labels of the validation images."""
    made: dict[str, Candidate] = {}
    for folder, names in FOLDERS.items():
        outputs, labels = _outputs(bayesify.load(KEPT / folder, setting.network), setting, len(names))
        for index, name in enumerate(names):
            own = {views: logits[index : index + 1] for views, logits in outputs.items()}
            made.setdefault(name, Candidate(name, COSTS[name], own))
    for name in TRAINED:
        config = found("gain_methods", name)
        if (work / f"{config.fit_hash()}-0" / "checkpoint.safetensors").exists():
            posterior = bayesify.ensemble([fitted(config, work=work)[0]])
            outputs, _ = _outputs(posterior, setting, posterior.law.num_parts)
            made[name] = Candidate(name, 10, outputs)
    return made, labels


def _outputs(posterior: bayesify.Posterior, setting: Setting, members: int) -> tuple[dict[int, Tensor], Tensor]:
    """Return logits (M, V, N, C) by the number of views, each member seeing each of them once, and the labels."""
    made = {}
    for views in VIEWS:
        kept = draws_of(posterior, setting.val, bayesify.Views(*views), num_draws=members * len(views))
        logits = torch.cat([outputs for outputs, _ in kept.batches], 1)
        labels = torch.cat([targets for _, targets in kept.batches])
        parts = torch.tensor(kept.parts)
        made[len(views)] = torch.stack([logits[parts == member] for member in range(members)])
    return made, labels


def affordable(found: Sequence[Candidate]) -> Iterator[tuple[tuple[Candidate, ...], int]]:
    """Yield the ensembles with the network, the first candidate, and the views that epochs and passes allow.

    >>> epochs, logits = {"a": 0, "b": 12, "c": 30}, {2: torch.zeros(1, 2, 1, 1)}
    >>> some = [Candidate(name, number, logits) for name, number in epochs.items()]
    >>> [("+".join(one.name for one in members), views) for members, views in affordable(some)]
    [('a', 2), ('a', 3), ('a', 4), ('a+b', 2), ('a+b', 3), ('a+b', 4), ('a+c', 2), ('a+c', 3), ('a+c', 4)]
    """
    network, *others = found
    for number in range(len(others) + 1):
        for more in combinations(others, number):
            members = (network, *more)
            count = sum(one.members for one in members)
            if sum(one.epochs for one in members) <= EPOCHS:
                yield from ((members, len(views)) for views in VIEWS if count * len(views) <= MOST)


def judged(members: Sequence[Candidate], views: int, labels: Tensor) -> float:
    """Return the NLL of an ensemble on the validation images, each fifth with the temperatures of the others."""
    logits = torch.cat([one.outputs[views] for one in members])  # (M, V, N, C)
    parts = [member for member in range(len(logits)) for _ in range(views)]
    nll = held_out_nll(
        logits.flatten(0, 1), labels, start=Pooled(torch.ones(()), 0.0), parts=parts,
        examples=torch.arange(len(labels)), pooling="log-probs", temperatures="each",
    )  # fmt: skip
    return round(float(nll.mean()), 5)


def main() -> None:
    """Judge all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("work"), help="folder of checkpoints")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for results")
    arguments = parser.parse_args()
    some, labels = candidates(ready(CifarBoard(), 0, False, arguments.work), arguments.work)
    records, nll = Records(arguments.results / "gain_choice.json"), {}
    for members, views in affordable(list(some.values())):
        name = f"{' + '.join(one.name for one in members)}, {views} views"
        config = {"members": [(one.name, one.epochs) for one in members], "views": FOUR[:views]}
        passes = views * sum(one.members for one in members)
        row = {"passes": passes, "plain epochs": sum(one.epochs for one in members)}
        nll[name] = records.row(
            name, lambda m=members, v=views, r=row: {**r, "held-out nll": judged(m, v, labels)}, config=config
        )["held-out nll"]
    for name in sorted(nll, key=lambda one: nll[one])[:10]:
        print(f"{nll[name]:.4f} {name}")


if __name__ == "__main__":
    main()
