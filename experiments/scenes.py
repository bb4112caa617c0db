"""A segmentation set that is made from real images: Fashion-MNIST items on CIFAR-10 photographs.

A scene (3, 64, 64) is a CIFAR-10 photograph, enlarged twice, on which two or three Fashion-MNIST items lie in random
colours. A pixel's label is 0 for the photograph and 1 to 10 for the items. An OOD scene also has an MNIST digit
or a notMNIST letter, whose pixels no class describes, as the anomalies of StreetHazards and BDD-Anomaly are. Training
scenes use the training parts of both sets, test scenes the test parts.

`BAYESIFY_DATA=... python -m experiments.scenes` draws the maps of uncertainty of ABNN's fit, which
`python -m experiments.run abnn_segmentation` makes, into `docs/pictures/abnn_segmentation.png`. Letters are the
reported anomalies; digits may be looked at while settings are chosen.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify.data import Split
from experiments.config import Setting
from experiments.data import load
from experiments.records import PICTURES, config_hash

__all__ = ["CLASSES", "OOD", "Scenes", "Segmentation", "UNet", "make_scenes"]

CLASSES = ("photograph", "top", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "trainer", "bag", "boot")
OOD = -100  # the label of an anomaly: it does not count
SIZE, ITEM = 64, 28


class Scenes(NamedTuple):
    """Images (N, 3, 64, 64) with values from 0 to 1, and labels (N, 64, 64)."""

    images: Tensor
    labels: Tensor


def make_scenes(part: str, number: int, *, seed: int, ood: str | None = None) -> Scenes:
    """Compose scenes.

    Args:
        part: "train", "val" or "test".
        number: How many.
        seed: Of what is chosen and where it lies.
        ood: "mnist" or "notmnist" adds one such object to each scene.
    """
    generator = torch.Generator().manual_seed(seed)
    items = load("fashion-mnist", part)
    photos = load("cifar10", part).inputs
    if photos.shape[-1] == 3:
        photos = photos.permute(0, 3, 1, 2)
    others = None
    if ood is not None:
        found = load(ood, "test")
        assert isinstance(found, Split)
        others = found.inputs
    images, labels = torch.empty(number, 3, SIZE, SIZE), torch.zeros(number, SIZE, SIZE, dtype=torch.long)

    def below(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    for index in range(number):
        photo = _unit(photos[below(len(photos))])
        images[index] = interpolate(photo[None], scale_factor=2, mode="bilinear")[0].clamp(0, 1)
        for _ in range(2 + below(2)):
            chosen = below(len(items))
            _paste(images[index], labels[index], items.inputs[chosen], int(items.targets[chosen]) + 1, generator)
        if others is not None:
            _paste(images[index], labels[index], others[below(len(others))], OOD, generator)
    return Scenes(images, labels)


def _paste(image: Tensor, labels: Tensor, item: Tensor, label: int, generator: torch.Generator) -> None:
    grey = _unit(item)[0]
    top, left = (int(torch.randint(SIZE - ITEM + 1, (), generator=generator)) for _ in range(2))
    colour = 0.3 + 0.7 * torch.rand(3, 1, 1, generator=generator)
    mask = grey > 0.15
    rows, columns = slice(top, top + ITEM), slice(left, left + ITEM)
    image[:, rows, columns] = torch.where(mask, grey * colour, image[:, rows, columns])
    labels[rows, columns] = torch.where(mask, label, labels[rows, columns])


def _unit(image: Tensor) -> Tensor:
    return image.float() / 255 if image.dtype == torch.uint8 else image.float()


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
        for up, merge in zip(reversed(self.up), reversed(self.merge), strict=True):
            h = merge(torch.cat([kept.pop(), up(h)], 1))
        logits: Tensor = self.head(h)
        return logits


@dataclass(frozen=True)
class Segmentation:
    """A U-Net and scenes.

    Attributes:
        train: How many training scenes.
        test: How many test scenes of each kind.
        epochs: Of the plain U-Net.
    """

    train: int = 4000
    test: int = 100
    epochs: int = 12

    def setting(self, seed: int, *, trial: bool, work: Path) -> Setting:
        """Make the scenes and train the U-Net, or go on with it."""
        number, few, epochs = (32, 4, 1) if trial else (self.train, self.test, self.epochs)
        torch.manual_seed(0)
        adam = bayesify.MAP(optimizer="adam", lr=3e-3, weight_decay=0.0, schedule="cosine", epochs=epochs)
        plain = bayesify.convert(UNet().to(memory_format=torch.channels_last), adam)  # type: ignore[call-overload]
        train = _loader(make_scenes("train", number, seed=0), shuffle=True)
        folder = None if trial else work / f"scenes-{config_hash([self.train, self.epochs])}"
        bayesify.fit(plain, train, checkpoint=folder, progress=False)
        return Setting(
            plain.network.eval(),
            train,
            _loader(make_scenes("val", few, seed=1)),
            _loader(make_scenes("test", few, seed=2)),
            {name: _loader(make_scenes("test", few, seed=3, ood=name)) for name in ("mnist", "notmnist")},
        )


def _loader(scenes: Scenes, *, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*scenes), 16, shuffle=shuffle)


def draw(posterior: bayesify.Posterior, rows: list[Scenes], path: Path) -> None:
    """Draw scenes beside their labels, predictions, and maps of aleatoric and epistemic uncertainty."""
    from matplotlib.figure import Figure

    scenes = Scenes(torch.cat([r.images for r in rows]), torch.cat([r.labels for r in rows]))
    prediction = bayesify.predict(posterior, scenes.images, seed=0)
    assert isinstance(prediction, bayesify.ClassificationPrediction)
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


def main() -> None:
    """Draw two scenes of each kind."""
    from experiments.run import fitted, found

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("work"), help="folder for checkpoints")
    parser.add_argument("--trial", action="store_true", help="a few scenes, and nothing is kept")
    arguments = parser.parse_args()
    posterior, setting = fitted(found("abnn_segmentation", "abnn"), trial=arguments.trial, work=arguments.work)
    some = [next(iter(loader)) for loader in (setting.test, *setting.ood.values())]
    with tempfile.TemporaryDirectory() as folder:
        path = (Path(folder) if arguments.trial else PICTURES) / "abnn_segmentation.png"
        draw(posterior, [Scenes(images[:2], labels[:2]) for images, labels in some], path)
        print(path)


if __name__ == "__main__":
    main()
