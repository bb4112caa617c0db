"""The picture of the first page: what a network is wrongly sure of, and what a posterior says of it.

`BAYESIFY_DATA=... python -m experiments.start` lets `choose` find a posterior of the pretrained ResNet-20 within four
passes on the first 2,000 test images of CIFAR-10, and draws, of the last 8,000, the mistakes that the network is surest
of into `docs/pictures/start.svg`, one of each class. Two minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bayesify
from bayesify import Prediction
from experiments.board_tasks import CifarBoard
from experiments.data import load
from experiments.networks import cifar_inputs
from experiments.records import PICTURES

__all__ = ["draw", "main", "surest"]

CLASSES = ("airplane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
NUMBER = 6
PLAIN, OURS = "#B0483A", "#2F6DB5"


def surest(plain: Prediction, targets: Tensor, number: int) -> Tensor:
    """Return the indices of the mistakes that the network is surest of, at most one of each true class."""
    wrong = (plain.label != targets).nonzero().flatten()
    found: dict[int, int] = {}
    for index in wrong[plain.confidence[wrong].argsort(descending=True)].tolist():
        found.setdefault(int(targets[index]), index)
    return torch.tensor(list(found.values())[:number])


def draw(images: Tensor, titles: Sequence[str], plain: Prediction, ours: Prediction, path: Path) -> None:
    """Draw each image, and how much both believe in the network's answer."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "start"}):
        figure = Figure(figsize=(1.9 * len(titles), 4.2), layout="constrained")
        axes = figure.subplots(2, len(titles), gridspec_kw={"height_ratios": (1.1, 1)})
        for column, (image, title) in enumerate(zip(images, titles, strict=True)):
            _column(axes[:, column], image, title, plain, ours, column)
        handles = [matplotlib.patches.Patch(color=colour) for colour in (PLAIN, OURS)]
        figure.legend(handles, ["the network", "the posterior"], loc="outside lower center", ncols=2, frameon=False)
        figure.savefig(path, metadata={"Date": None})


def _column(axes: Any, image: Tensor, title: str, plain: Prediction, ours: Prediction, row: int) -> None:
    said = int(plain.label[row])
    axes[0].imshow(image.permute(1, 2, 0), interpolation="bicubic")
    axes[0].set_axis_off()
    axes[0].set_title(title, fontsize=11)
    heights = [float(prediction.probs[row, said]) for prediction in (plain, ours)]
    bars = axes[1].bar([0, 1], heights, 0.7, color=(PLAIN, OURS))
    axes[1].bar_label(bars, [f"{100 * height:.0f} %" for height in heights], fontsize=10, padding=2)
    axes[1].set_xticks([0.5], [f"for “{CLASSES[said]}”"], fontsize=10)
    axes[1].tick_params(length=0)
    axes[1].set_ylim(0, 1.15)
    axes[1].set_xlim(-0.9, 1.9)
    axes[1].set_yticks([])
    axes[1].spines[["top", "right", "left"]].set_visible(False)
    parts = f"aleatoric {float(ours.aleatoric[row]):.2f}\nepistemic {float(ours.epistemic[row]):.2f}"
    axes[1].set_xlabel(parts, fontsize=9, color=OURS)


def main() -> None:
    """Train, predict and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=PICTURES / "start.svg")
    arguments = parser.parse_args()
    setting = CifarBoard().setting(0, trial=False, work=Path("work"))
    plain = bayesify.convert(setting.network, "map")
    posterior = bayesify.choose(setting.network, setting.val, passes=4)
    test = load("cifar10", "test")
    some = surest(bayesify.predict(plain, setting.test), test.targets, NUMBER)
    images = test.inputs[some]
    before, after = (bayesify.predict(made, cifar_inputs(images)) for made in (plain, posterior))
    titles = [CLASSES[target] for target in test.targets[some].tolist()]
    draw(images, titles, before, after, arguments.picture)
    print(f"confidence of the network {before.confidence.tolist()}, of the posterior {after.confidence.tolist()}")


if __name__ == "__main__":
    main()
