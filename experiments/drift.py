"""How soon a monitor finds real shifts, and how often it cries wolf: 200 streams of each kind.

`BAYESIFY_DATA=... python -m experiments.drift --work FOLDER` takes the features of `experiments.verdicts`, and trains a
small network on MNIST (10,000 images, 3 epochs). Scores are total uncertainties, and for MNIST also the distance of
features to the tenth nearest of 2,000 other training images, computed once. Each stream has a calibration set of its
own, 1,000 images drawn from the known ones, 2,000 known inputs and then 3,000 of the shifted kind, all with
replacement; a monitor with a false-alarm rate of 1 % (10 % in further rows) sees them. Reported are alarms before the
change, the share of changes that are found, and the median and the 90th percentile of the delay in inputs, where those
that are never found count as never.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bayesify
from bayesify.decide import KNN, Detector, Monitor
from experiments.data import load
from experiments.networks import pretrained
from experiments.records import RESULTS, Records
from experiments.verdicts import CORRUPTED, features

__all__ = ["SHIFTS", "streams"]

STREAMS, KNOWN, BEFORE, AFTER = 200, 1000, 2000, 3000
SHIFTS = (
    "MNIST, 5 % notMNIST, total",
    "MNIST, 5 % notMNIST, knn",
    "CIFAR-10, noise",
    "CIFAR-10, contrast",
    "CIFAR-10, nothing",
)


def _total(network: nn.Module, inputs: Tensor) -> Tensor:
    return bayesify.predict(bayesify.convert(network, "map"), inputs, how="mean").score("total").double()


def cifar(work: Path) -> tuple[Tensor, dict[str, Tensor]]:
    """Return scores of the known images, and of shifted ones by kind."""
    head = nn.Sequential(pretrained("resnet20").linear)
    known = _total(head, features("test", work)[0])
    return known, {f"CIFAR-10, {kind}": _total(head, features(kind, work)[0]) for kind in CORRUPTED}


def mnist() -> dict[str, tuple[Tensor, Tensor]]:
    """Return scores of MNIST's test images, and of notMNIST's, by the name of the score."""
    torch.manual_seed(0)
    train, test, other = load("mnist", "train"), load("mnist", "test"), load("notmnist", "test")
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    for _ in range(3):
        for rows in torch.randperm(10_000).split(64):  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(train.inputs[rows]), train.targets[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    network.eval()
    near = KNN.fit(_hidden(network, train.inputs[10_000:12_000]))  # which were not trained on
    sets = (test.inputs, other.inputs[:2000])
    return {
        "total": (_total(network, sets[0]), _total(network, sets[1])),
        "knn": (near(_hidden(network, sets[0])), near(_hidden(network, sets[1]))),
    }


def _hidden(network: nn.Module, inputs: Tensor) -> Tensor:
    found = bayesify.predict(bayesify.convert(network, "map"), inputs, how="mean", output="features")
    return found.features  # type: ignore[attr-defined, no-any-return]


def streams(known: Tensor, shifted: Tensor, share: float, false_alarm: float) -> dict[str, Any]:
    """Return alarms and delays over streams in which a share of the inputs is of the shifted kind, after a while."""
    early, delays = 0, []
    for seed in range(STREAMS):
        generator = torch.Generator().manual_seed(seed)

        def drawn(scores: Tensor, number: int, generator: torch.Generator = generator) -> Tensor:
            return scores[torch.randint(len(scores), (number,), generator=generator)]

        detector = Detector.fit(drawn(known, KNOWN))
        moved = torch.rand(AFTER, generator=generator) < share
        after = torch.where(moved, drawn(shifted, AFTER), drawn(known, AFTER))
        monitor = Monitor(KNOWN, false_alarm)
        monitor.update(detector(torch.cat([drawn(known, BEFORE), after])).p_value)
        if monitor.alarmed_at is None:
            delays.append(float("inf"))
        elif monitor.alarmed_at <= BEFORE:
            early += 1
        else:
            delays.append(float(monitor.alarmed_at - BEFORE))
    ordered = torch.tensor(delays).sort().values
    at = {name: float(ordered[int(q * (len(ordered) - 1))]) for name, q in (("median", 0.5), ("ninety", 0.9))}
    return {
        "false alarms": early / STREAMS,
        "found": float(ordered.isfinite().double().mean()),
        **{name: value if value < float("inf") else None for name, value in at.items()},
    }


def main() -> None:
    """Make the rows that are not there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="where features are kept")
    arguments = parser.parse_args()
    settings = {"streams": STREAMS, "known": KNOWN, "before": BEFORE, "after": AFTER}
    records = Records(RESULTS / "drift.json", settings)
    scores = mnist()
    images, shifted = cifar(arguments.work)
    kinds: list[tuple[str, Tensor, Tensor, float]] = []
    kinds += [(f"MNIST, 5 % notMNIST, {name}", *both, 0.05) for name, both in scores.items()]
    kinds += [(name, images, other, 1.0) for name, other in shifted.items()]
    kinds += [("CIFAR-10, nothing", images, images, 0.0)]
    for rate in (0.01, 0.1):
        for name, known, other, share in kinds:
            config = {"share": share, "false_alarm": rate}
            records.row(f"{name}, {rate:g}", partial(streams, known, other, share, rate), config=config)


if __name__ == "__main__":
    main()
