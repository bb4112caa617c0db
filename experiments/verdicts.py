"""What a guard promises of CIFAR-10, and whether it holds: ResNet-20, several posteriors, 200 calibration sets each.

`BAYESIFY_DATA=... python -m experiments.verdicts --work FOLDER` computes once what the pretrained network has before
its last layer, for the last 8,000 test images and their mirror images, for 1,000 images of Fashion-MNIST and of
notMNIST, and for corrupted ones, and keeps it in the folder. The posteriors are random in the last layer, so that
their draws are exact on what was kept. What they have to choose (widths, a prior) they choose on the first 512 test
images, which are not among the 8,000.

Then the 8,000 images are the population, whose risk is known exactly: 200 times, 4,000 or 16,000 are drawn with
replacement, `Guard.fit` chooses and promises by them, and what the guard does is measured on all 8,000. A promise of
risk is broken where the population's risk is above it; coverages are averages over the 200 sets.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import BayesAdapter, Laplace, MCDropout, Posterior
from bayesify.data import corrupt
from bayesify.decide import Guard, PredictionSets
from bayesify.decide.examined import examine
from bayesify.decide.halves import halves
from bayesify.decide.verdicts import ANSWER, OOD
from bayesify.prediction.calibration import draws_of
from bayesify.prediction.views import ONE
from experiments.cifar import NUM_DATA, ood_loaders
from experiments.data import load
from experiments.networks import cifar_inputs, pretrained
from experiments.records import RESULTS, Records

__all__ = ["CORRUPTED", "POSTERIORS", "Replay", "features", "outputs", "replayed"]

SEEN, TUNED_ON, OUTSIDE, DRAWS = 1000, 512, 1000, 8
POPULATION, REPEATS = 8000, 200
PROMISES = ((0.01, 4000), (0.005, 16_000), (0.005, 4000))  # risk, and calibration images
CORRUPTED = {"noise": ("gaussian_noise", 1), "contrast": ("contrast", 3)}


def _images(kind: str) -> tuple[Tensor, Tensor]:
    """Return inputs of the network, and labels; zeros for OOD images."""
    if kind in ("fashion-mnist", "notmnist"):
        inputs = torch.cat([batch[0] for batch in ood_loaders(OUTSIDE)[kind]])
        return inputs, torch.zeros(len(inputs), dtype=torch.long)
    split, first = {"train": ("train", SEEN), "val": ("val", TUNED_ON)}.get(kind, ("test", POPULATION))
    data = load("cifar10", split)
    images, labels = data.inputs[:first], data.targets[:first]
    if kind in CORRUPTED:
        images, labels = images[:OUTSIDE], labels[:OUTSIDE]
        images = corrupt(images, *CORRUPTED[kind])
    return cifar_inputs(images), labels


@torch.no_grad()
def features(kind: str, work: Path, *, mirror: bool = False) -> tuple[Tensor, Tensor]:
    """Return what the network has before its last layer, (N, 64), and labels, from the folder or computed."""
    path = work / f"{kind}{'-mirrored' if mirror else ''}.safetensors"
    if not path.exists():
        inputs, labels = _images(kind)
        posterior = bayesify.convert(pretrained("resnet20"), "map")
        found = bayesify.predict(posterior, inputs.flip(-1) if mirror else inputs, how="mean", output="features")
        work.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        save_file({"features": found.features.contiguous(), "labels": labels}, part)  # type: ignore[attr-defined]
        part.replace(path)
        print(path.name, tuple(labels.shape), flush=True)
    kept = load_file(path)
    return kept["features"], kept["labels"]


def _head() -> nn.Module:
    """Return the last layer as a network of its own."""
    return nn.Sequential(pretrained("resnet20").linear)


def _widened(method: bayesify.Method, work: Path) -> Posterior:
    def loader(kind: str) -> DataLoader[Any]:
        return DataLoader(TensorDataset(*features(kind, work)), 256)

    posterior = bayesify.convert(_head(), method).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the prior is chosen by the width
        if method.surveys:
            bayesify.fit(posterior, loader("train"), epochs=0, num_data=NUM_DATA, progress=False)
        bayesify.widen(posterior, loader("val"), num_draws=DRAWS)
    posterior.default_draws = DRAWS
    return posterior


def _plain(work: Path) -> Posterior:
    del work
    return bayesify.convert(_head(), "map")


# By name: the posterior of the last layer, and whether it sees the mirrored image too.
POSTERIORS: dict[str, tuple[Callable[[Path], Posterior], bool]] = {
    "plain": (_plain, False),
    "plain, mirrored": (_plain, True),
    "dropout, widened": (partial(_widened, MCDropout(p=0.1, insert_before="linear")), False),
    "dropout, widened, mirrored": (partial(_widened, MCDropout(p=0.1, insert_before="linear")), True),
    "Gaussian weights, widened": (partial(_widened, BayesAdapter()), False),
    "Laplace, widened": (partial(_widened, Laplace()), False),
}


def outputs(name: str, work: Path) -> dict[str, Tensor]:
    """Return draws' logits (S, N, C) of the population and of OOD images, and the population's labels."""
    make, mirrored = POSTERIORS[name]
    posterior = make(work)
    kept: dict[str, Tensor] = {}
    for kind in ("test", "fashion-mnist", "notmnist"):
        parts = []
        for mirror in (False, True) if mirrored else (False,):
            seen = draws_of(posterior, DataLoader(TensorDataset(*features(kind, work, mirror=mirror)), 1000), ONE)
            parts.append(torch.cat([logits for logits, _ in seen.batches], 1))
        kept[kind] = torch.cat(parts)
    kept["labels"] = features("test", work)[1]
    return kept


class Replay(nn.Module):
    """A network whose input is the number of an example, and whose output is what was kept for it."""

    def __init__(self, table: Tensor) -> None:
        """Keep outputs (N, C)."""
        super().__init__()
        self.register_buffer("table", table)

    def forward(self, rows: Tensor) -> Tensor:
        """Look outputs up, for rows (B, 1)."""
        return self.table[rows[:, 0]]  # type: ignore[index]


def replayed(logits: Tensor) -> Posterior:
    """Return a posterior whose draws are those that were kept, (S, N, C): each is a member."""
    members = [bayesify.convert(Replay(table), "map") for table in logits]
    return members[0] if len(members) == 1 else bayesify.ensemble(members)


def measured(
    guard: Guard, rows: Tensor, labels: Tensor, others: dict[str, Tensor], own: PredictionSets
) -> dict[str, Any]:
    """Return what a guard does to the whole population, and to OOD images."""
    verdicts = guard(rows)
    answered = verdicts.codes == ANSWER
    right = verdicts.label == labels
    assert verdicts.in_set is not None
    held = verdicts.in_set.gather(1, labels[:, None])[:, 0].double()
    sets = own(verdicts.prediction)
    inside = sets.gather(1, labels[:, None])[:, 0].double()
    found: dict[str, Any] = {
        "answered": float(answered.double().mean()),
        "risk": 1 - float(right[answered].double().mean()),
        "known called OOD": float((verdicts.codes == OOD).double().mean()),
        "set coverage": float(held.mean()),
        "set coverage by class": [float(held[labels == label].mean()) for label in range(10)],
        "set size": float(verdicts.in_set.double().sum(1).mean()),
        "own coverage by class": [float(inside[labels == label].mean()) for label in range(10)],
        "own set size": float(sets.double().sum(1).mean()),
        "uncertainty": guard.uncertainty,
    }
    for name, outside in others.items():
        found[f"fpr {name}"] = float((guard(outside).codes != OOD).double().mean())
    return found


def repeated(kept: dict[str, Tensor], max_risk: float, size: int, repeats: int) -> dict[str, Any]:
    """Return averages over calibration sets, and how many promises were broken or refused."""
    names: list[str] = ["fashion-mnist", "notmnist"]
    tables = [kept["test"], *(kept[name][:, :OUTSIDE] for name in names)]
    table = torch.cat(tables, 1)
    rows = torch.arange(POPULATION)[:, None]
    others = {name: POPULATION + OUTSIDE * index + torch.arange(OUTSIDE)[:, None] for index, name in enumerate(names)}
    labels = kept["labels"]
    found: list[dict[str, Any]] = []
    for seed in range(repeats):
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(POPULATION, (size,), generator=generator)
        data = [(drawn[:, None], labels[drawn])]
        options: dict[str, Any] = {"max_risk": max_risk, "seed": seed, "pooling": "probs"}
        posterior = replayed(table)
        try:
            guard = Guard.fit(posterior, data, **options)
        except ValueError as error:
            if "No threshold" not in str(error):
                raise
            continue
        promising = examine(posterior, halves(data, seed, function="Guard.fit")[1], guard.settings)
        own = PredictionSets.fit(promising.prediction, promising.targets, coverage=0.95, condition="class")
        found.append(measured(guard, rows, labels, others, own))
    return summary(found, max_risk, repeats)


def summary(found: list[dict[str, Any]], max_risk: float, repeats: int) -> dict[str, Any]:
    """Return averages of rows, the lowest class, and shares of all repeats."""
    mean: dict[str, Any] = {
        name: sum(one[name] for one in found) / max(1, len(found))
        for name in (found[0] if found else {})
        if isinstance(found[0][name], float)
    }
    for name in ("set coverage by class", "own coverage by class"):
        columns = torch.tensor([one[name] for one in found])
        mean[f"{name}, lowest"] = float(columns.mean(0).min()) if found else None
    return {
        "repeats": repeats,
        "refused": (repeats - len(found)) / repeats,
        "broken": sum(one["risk"] > max_risk for one in found) / repeats,
        "uncertainties": {name: sum(one["uncertainty"] == name for one in found) for name in _kinds(found)},
        **mean,
    }


def _kinds(found: list[dict[str, Any]]) -> list[str]:
    return sorted({one["uncertainty"] for one in found})


def main() -> None:
    """Make the rows that are not there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="posteriors; all of them by default")
    parser.add_argument("--work", type=Path, required=True, help="where features are kept")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--outputs", action="store_true", help="compute features only")
    arguments = parser.parse_args()
    settings = {"network": "resnet20", "population": POPULATION, "outside": OUTSIDE}
    records = Records(RESULTS / "verdicts_cifar.json", settings)
    if arguments.outputs:
        for kind in ("test", "fashion-mnist", "notmnist", "val", "train", *CORRUPTED):
            features(kind, arguments.work)
        for kind in ("test", "fashion-mnist", "notmnist"):
            features(kind, arguments.work, mirror=True)
        return
    for risk, size in PROMISES:
        for name in arguments.names or POSTERIORS:
            config = {"draws": DRAWS, "max_risk": risk, "calibration": size, "repeats": arguments.repeats}
            records.row(f"{name}, {risk:g} of {size}", partial(row, name, risk, size, arguments), config=config)


def row(name: str, risk: float, size: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the measures of a posterior and a promise."""
    return repeated(outputs(name, arguments.work), risk, size, arguments.repeats)


if __name__ == "__main__":
    main()
