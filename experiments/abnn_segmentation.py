"""ABNN on a U-Net: maps of uncertainty, and anomalies found pixel by pixel.

`BAYESIFY_DATA=... python -m experiments.abnn_segmentation` trains a U-Net on Fashion-MNIST items on photographs of
CIFAR-10 (`experiments/scenes.py`), makes it Bayesian, prints mIoU, NLL, pixel-wise ECE and how well anomalous pixels
(digits and notMNIST letters that lie in the scene) are told from the others, and draws the maps.
Results go to `experiments/results/abnn_segmentation.json` and `.png`. Letters are the reported anomalies; digits may
be looked at while settings are chosen.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import ABNN, measure
from experiments.rows import Rows
from experiments.scenes import CLASSES, OOD, Scenes, make_scenes

RESULTS = Path(__file__).parent / "results"
COMMAND = "python -m experiments.abnn_segmentation"


class UNet(nn.Module):
    """Scales with skip connections and batch normalisation (Ronneberger et al. 2015, much smaller)."""

    def __init__(self, width: int = 12, scales: int = 4) -> None:
        """Make layers of `width`, and twice as many channels at each further scale."""
        super().__init__()
        widths = [width * 2**scale for scale in range(scales)]
        pairs = list(pairwise(widths))
        self.first = self.block(3, width)
        self.down = nn.ModuleList(self.block(fine, coarse) for fine, coarse in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(coarse, fine, 2, stride=2) for fine, coarse in pairs)
        self.merge = nn.ModuleList(self.block(2 * fine, fine) for fine, _ in pairs)
        self.head = nn.Conv2d(width, len(CLASSES), 1)
        self.pool = nn.MaxPool2d(2)

    @staticmethod
    def block(inside: int, outside: int) -> nn.Sequential:
        """Return two convolutions, each with batch normalisation."""
        layers: list[nn.Module] = []
        for channels in (inside, outside):
            layers += [nn.Conv2d(channels, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, 3, H, W) to logits (B, C, H, W)."""
        h = self.first(x - 0.5)
        kept = []
        for block in self.down:
            kept.append(h)
            h = block(self.pool(h))
        for up, merge in zip(reversed(self.up), reversed(self.merge), strict=True):  # type: ignore[call-overload]
            h = merge(torch.cat([kept.pop(), up(h)], 1))
        logits: Tensor = self.head(h)
        return logits


METHODS: dict[str, bayesify.Method] = {
    "map": bayesify.MAP(),
    "abnn": ABNN(epochs=1),
    **{f"abnn, alpha={alpha}": ABNN(epochs=1, alpha=alpha) for alpha in (0.02, 0.1)},
    "abnn, eta=0": ABNN(epochs=1, eta=0.0),
    "mc-dropout": bayesify.MCDropout(p=0.1, insert_before="conv", epochs=1, lr=0.005, schedule="cosine"),
    "deep ensemble of perturbed copies": bayesify.DeepEnsemble(
        members=3, start="perturbed", perturb_std=0.2, epochs=2, lr=0.02
    ),
}


def miou(labels: Tensor, predicted: Tensor) -> float:
    """Return the mean over classes of intersection over union, where labels count.

    >>> miou(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]))
    0.5
    """
    counted = labels != OOD
    labels, predicted = labels[counted], predicted[counted]
    found = []
    for label in range(len(CLASSES)):
        union = ((labels == label) | (predicted == label)).sum()
        if union:
            found.append((((labels == label) & (predicted == label)).sum() / union).item())
    return sum(found) / len(found)


def evaluate(posterior: bayesify.Posterior, test: Scenes, ood: dict[str, Scenes], seed: int) -> dict[str, float]:
    """Return measures over the pixels of the test scenes, and of anomalies against the other pixels of their scenes."""
    prediction = bayesify.predict(posterior, test.images, seed=seed)
    found = {
        "miou": miou(test.labels, prediction.label),
        "accuracy": measure.accuracy(prediction.probs, test.labels),
        "nll": measure.nll(prediction.probs, test.labels),
        "ece": measure.ece(prediction.probs, test.labels),
    }
    for name, scenes in ood.items():
        prediction = bayesify.predict(posterior, scenes.images, seed=seed)
        anomaly = scenes.labels == OOD
        for score in ("total", "epistemic"):
            values = prediction.score(score)
            pair = values[~anomaly], values[anomaly]
            found[f"auroc-{score}/{name}"] = measure.auroc(*pair)
            found[f"aupr-{score}/{name}"] = measure.average_precision(*pair)
            found[f"fpr95-{score}/{name}"] = measure.fpr_at_tpr(*pair, tpr=0.95)
    return {name: round(value, 5) for name, value in found.items()}


def draw(posterior: bayesify.Posterior, rows: list[Scenes], path: Path) -> None:
    """Draw scenes beside their labels, predictions, and maps of aleatoric and epistemic uncertainty."""
    from matplotlib.figure import Figure

    scenes = Scenes(torch.cat([r.images for r in rows]), torch.cat([r.labels for r in rows]))
    prediction = bayesify.predict(posterior, scenes.images, seed=0)
    columns: dict[str, tuple[Tensor, dict[str, Any]]] = {
        "scene": (scenes.images.permute(0, 2, 3, 1), {}),
        "label (anomaly white)": (scenes.labels.float().where(scenes.labels != OOD, torch.nan), {"cmap": "tab20"}),
        "prediction": (prediction.label, {"cmap": "tab20"}),
        "aleatoric": (prediction.aleatoric, {"cmap": "magma", "vmin": 0}),
        "epistemic": (prediction.epistemic, {"cmap": "magma", "vmin": 0}),
    }
    for title in ("label (anomaly white)", "prediction"):
        columns[title][1].update(vmin=0, vmax=len(CLASSES) - 1, interpolation="nearest")
    for title in ("aleatoric", "epistemic"):
        columns[title][1]["vmax"] = float(columns[title][0].max())
    figure = Figure(figsize=(2 * len(columns), 2 * len(scenes.images)), layout="constrained")
    axes = figure.subplots(len(scenes.images), len(columns), squeeze=False)
    for column, (title, (values, options)) in enumerate(columns.items()):
        axes[0, column].set_title(title)
        for row in range(len(values)):
            axes[row, column].imshow(values[row].numpy(), **options)
            axes[row, column].axis("off")
    path.parent.mkdir(exist_ok=True, parents=True)
    figure.savefig(path, dpi=100)


def loader(scenes: Scenes, **options: Any) -> DataLoader:
    """Return batches of scenes."""
    return DataLoader(TensorDataset(*scenes), **{"batch_size": 16, **options})


def main() -> None:
    """Train, convert, evaluate, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=int, default=4000, help="number of training scenes")
    parser.add_argument("--test", type=int, default=100, help="number of test scenes of each kind")
    parser.add_argument("--epochs", type=int, default=12, help="of the plain U-Net")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", default=list(METHODS))
    parser.add_argument("--work", type=Path, default=Path("abnn-segmentation-work"), help="folder for checkpoints")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for results")
    arguments = parser.parse_args()
    train = make_scenes("train", arguments.train, seed=0)
    val, test = make_scenes("val", arguments.test, seed=1), make_scenes("test", arguments.test, seed=2)
    ood = {name: make_scenes("test", arguments.test, seed=3, ood=name) for name in ("mnist", "notmnist")}
    torch.manual_seed(0)
    plain = bayesify.convert(
        UNet().to(memory_format=torch.channels_last),
        bayesify.MAP(optimizer="adam", lr=3e-3, weight_decay=0.0, schedule="cosine"),
    )
    shuffled = loader(train, shuffle=True)
    bayesify.fit(plain, shuffled, epochs=arguments.epochs, checkpoint=arguments.work / "plain", progress=False)
    network = plain.network.eval()
    rows = Rows(arguments.out / "abnn_segmentation.json", f"{COMMAND} --train {arguments.train}")

    def made(name: str, seed: int) -> dict[str, Any]:
        posterior = bayesify.convert(network, METHODS[name])
        began = time.perf_counter()
        folder = arguments.work / "".join(c if c.isalnum() else "-" for c in f"{name}-{seed}")
        bayesify.fit(posterior, shuffled, checkpoint=folder, seed=seed, progress=False, accuracy_tolerance=1.0)
        row: dict[str, Any] = {"seed": seed, "fit seconds": round(time.perf_counter() - began, 1)}
        for kind in ("", ", calibrated"):
            row["validation" + kind] = evaluate(posterior, val, {}, seed)
            row["test" + kind] = evaluate(posterior, test, ood, seed)
            bayesify.calibrate(posterior, loader(val))
        if name == "abnn" and seed == arguments.seeds[0]:
            some = [Scenes(s.images[:2], s.labels[:2]) for s in (test, *ood.values())]
            draw(posterior, some, arguments.out / "abnn_segmentation.png")
        return row

    for name in arguments.only:
        for seed in arguments.seeds if name == "abnn" else arguments.seeds[:1]:
            rows.row(f"{name}, seed {seed}", partial(made, name, seed))


if __name__ == "__main__":
    main()
