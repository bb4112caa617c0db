"""Whether two drawings are of one character, by features: BayesAdapter's open-set verification, on Omniglot.

`BAYESIFY_DATA=... python -m experiments.omniglot_pairs` trains a small convolutional network to tell the 86 characters
of three alphabets (Balinese, Early Aramaic, Korean), makes it Bayesian without and with supervised uncertainty, and
asks of pairs of drawings of an alphabet that it never saw whether they are one character: by the cosine of features
that are averaged over draws, with the threshold of the other nine of ten folds (the paper's protocol for faces).
Then the second drawings of pairs of one character are attacked (20 steps of .003 within .031, away from the first ones'
features), and the mutual information of the classifier's draws is to tell attacked drawings from the others.

The noise's width is chosen on pairs of Greek, by `--part tuning`; pairs of Latin are reported. Rows go to
`experiments/results/omniglot_pairs.json`; what is there is not made again. `--trial` takes seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import bayesify
from bayesify import BayesAdapter, OODRegularizer, measure
from bayesify.data import OODImages
from bayesify.decide import features_moved, pgd
from experiments.apd_common import arguments_of, rows_of
from experiments.data import load
from experiments.records import Records
from experiments.verification import cosine_scores, verification_accuracy

__all__ = ["ALPHABETS", "main", "network_of", "pairs_of"]

# The first character of each alphabet, and the one after its last.
ALPHABETS = {
    "Balinese": (0, 24),
    "Early Aramaic": (24, 46),
    "Greek": (46, 70),
    "Korean": (70, 110),
    "Latin": (110, 136),
}
LEARNED = ("Balinese", "Early Aramaic", "Korean")
WIDTHS = (0.01, 0.02, 0.04)
CHOSEN = 0.02
ADAPTER = BayesAdapter(epochs=20, lr=1e-3, log_std_lr=0.02, schedule="cosine", log_std_schedule="cosine")
# SGD at these rates and a weight of 1 leave the mutual information where it was; this is what CIFAR-10's images chose.
ASKED = dataclasses.replace(ADAPTER, optimizer="adam", log_std_lr=0.01, statistics="frozen")
REGULARIZER = OODRegularizer(weight=5.0, threshold=0.45)


def network_of(classes: int) -> nn.Sequential:
    """Return three convolutions with batch normalisation, and 128 features before the last layer."""
    layers: list[nn.Module] = []
    for before, after in ((1, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(576, 128), nn.ReLU(), nn.Linear(128, classes))


def pairs_of(alphabet: str, number: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return two drawings of each pair, and whether they are of one character, which every second pair is."""
    data = load("omniglot", "test")
    low, high = ALPHABETS[alphabet]
    generator = torch.Generator().manual_seed(seed)
    drawings = torch.stack([data.inputs[data.targets == character] for character in range(low, high)])  # (C, 20, ...)
    count, each = drawings.shape[:2]
    same = torch.arange(number) % 2 == 0
    first, step = (torch.randint(a, b, (number,), generator=generator) for a, b in ((0, count), (1, count)))
    one, apart = (torch.randint(a, b, (number,), generator=generator) for a, b in ((0, each), (1, each)))
    second = torch.where(same, first, (first + step) % count)
    return drawings[first, one], drawings[second, (one + apart) % each], same


@cache
def learned() -> tuple[Tensor, Tensor]:
    """Return the drawings of the alphabets that are learned, and their characters, counted from 0."""
    data = load("omniglot", "test")
    characters = torch.cat([torch.arange(*ALPHABETS[name]) for name in LEARNED])
    kept = torch.isin(data.targets, characters)
    return data.inputs[kept], torch.searchsorted(characters, data.targets[kept])


class Shifted(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Drawings that are moved by up to three pixels."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = nn.functional.pad(images, (3, 3, 3, 3)), labels

    def __len__(self) -> int:
        """Return the number of drawings."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return one, moved anew each time."""
        top, left = torch.randint(7, (2,)).tolist()
        return self.images[index, :, top : top + 28, left : left + 28], self.labels[index]


def plain(seed: int, arguments: argparse.Namespace) -> bayesify.Posterior:
    """Return the trained network."""
    torch.manual_seed(seed)
    classes = int(learned()[1].max()) + 1
    method = bayesify.MAP(epochs=arguments.epochs, lr=0.05, weight_decay=5e-4, schedule="cosine")
    posterior = bayesify.convert(network_of(classes), method)
    bayesify.fit(posterior, loader(arguments), seed=seed, progress=False, accuracy_tolerance=1)
    return posterior.eval()


def loader(arguments: argparse.Namespace) -> DataLoader[Any]:
    """Return batches of moved drawings."""
    x, y = learned()
    most = 64 if arguments.trial else len(y)
    return DataLoader(Shifted(x[:most], y[:most]), 64, shuffle=True, drop_last=True)


def adapted(
    start: bayesify.Posterior, seed: int, width: float, asked: bool, arguments: argparse.Namespace
) -> bayesify.Posterior:
    """Return BayesAdapter of a trained network, with supervised uncertainty if asked."""
    method = dataclasses.replace(
        ASKED if asked else ADAPTER,
        start_std=(0.6 * width, 1.6 * width),
        epochs=1 if arguments.trial else ADAPTER.epochs,
    )
    posterior = bayesify.convert(start.plain_network(), method)
    options: dict[str, Any] = {}
    if asked:
        images = OODImages(learned()[0], share=0.2, shift=3, mirror=False, compress=False)
        options = {"ood_loader": DataLoader(images, 32, shuffle=True), "regularizer": REGULARIZER}
    bayesify.fit(posterior, loader(arguments), seed=seed, progress=False, accuracy_tolerance=1, **options)
    return posterior.eval()


def verified(posterior: bayesify.Posterior, alphabet: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the share of pairs that are decided rightly, before and after an attack, and whether it is noticed."""
    draws = 1 if posterior.require_method().name == "map" else arguments.draws
    first, second, same = pairs_of(alphabet, arguments.pairs)

    def features_of(images: Tensor) -> Tensor:
        made = bayesify.predict(
            posterior,
            [images[start : start + 250] for start in range(0, len(images), 250)],
            num_draws=draws,
            seed=0,
            output="features",
        )
        return cast(bayesify.FeaturePrediction, made).features

    features = [features_of(images) for images in (first, second)]
    found = verification_accuracy(cosine_scores(*features), same)
    row: dict[str, Any] = {"accuracy": round(found.accuracy, 4), "std": round(found.std, 4)}
    chosen = same.nonzero()[: arguments.attacked, 0]
    goal = features_moved(features[0][chosen])
    options: dict[str, Any] = {"num_draws": min(draws, 5), "steps": 2 if arguments.trial else 20, "output": "features"}
    changed = pgd(posterior, second[chosen], goal, **options)
    threshold = sum(found.thresholds) / len(found.thresholds)
    for name, images in (("same, untouched", second[chosen]), ("same, attacked", changed)):
        scores = cosine_scores(features[0][chosen], features_of(images))
        row[name] = round(float((scores >= threshold).double().mean()), 4)
    if draws > 1:
        both = (bayesify.predict(posterior, x, num_draws=draws, seed=0) for x in (second[chosen], changed))
        own, other = (cast(bayesify.ClassificationPrediction, one) for one in both)
        row["average precision"] = round(measure.average_precision(own.epistemic, other.epistemic), 4)
        row["by total entropy"] = round(measure.average_precision(own.score("total"), other.score("total")), 4)
    return row


def main() -> None:
    """Make the rows."""
    arguments = arguments_of(
        __doc__,
        "omniglot_pairs",
        part=("main", "tuning"),
        seeds=[0, 1, 2],
        epochs=40,
        pairs=3000,
        attacked=250,
        draws=20,
    )
    if arguments.trial:
        arguments.seeds, arguments.epochs, arguments.pairs, arguments.attacked, arguments.draws = [0], 1, 40, 5, 3
    rows = rows_of("omniglot_pairs", arguments)
    for seed in arguments.seeds if arguments.part == "main" else arguments.seeds[:1]:
        of_seed(rows, seed, arguments)


def of_seed(rows: Records, seed: int, arguments: argparse.Namespace) -> None:
    """Make the rows of a seed, which share a trained network."""
    tuning = arguments.part == "tuning"
    alphabet = "Greek" if tuning else "Latin"
    start = cache(partial(plain, seed, arguments))

    def make(width: float, asked: bool) -> dict[str, Any]:
        return verified(adapted(start(), seed, width, asked, arguments), alphabet, arguments)

    rows.row("plain", lambda: verified(start(), alphabet, arguments), seed=seed)
    for width in WIDTHS if tuning else (CHOSEN,):
        for asked in (False, True):
            name = f"bayes-adapter{', supervised' if asked else ''}{f', start_std={width:g}' if tuning else ''}"
            config: dict[str, Any] = {"method": ASKED if asked else ADAPTER, "width": width, "supervised": asked}
            config |= {"regularizer": REGULARIZER} if asked else {}
            rows.row(name, partial(make, width, asked), config=config, seed=seed)


if __name__ == "__main__":
    main()
