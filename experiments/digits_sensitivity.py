"""Which pixels of handwritten digits drive the uncertainty.

`python -m experiments.digits_sensitivity` trains a small network on scikit-learn's digits, makes it Bayesian with
BayesAdapter, and draws, for the six test digits that it is least sure of: the digit, the derivative of the variance of
the logits (red: ink there makes it less sure; blue: surer), and the variance that each pixel would contribute if it
were uncertain. The picture goes to `docs/pictures/digits_sensitivity.png`; half a minute. `--trial` trains for
one epoch and keeps nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify.data import read_digits
from bayesify.prediction.sensitivity import Sensitivity
from experiments.records import PICTURES, RESULTS, Records

SHOWN = 6


def fitted(*, trial: bool) -> tuple[bayesify.Posterior, torch.Tensor]:
    """Return a posterior and the test digits."""
    torch.manual_seed(0)
    train, test = read_digits("train"), read_digits("test")
    loader = DataLoader(TensorDataset(train.inputs, train.targets), 64, shuffle=True)
    network = nn.Sequential(
        nn.Flatten(1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    plain = bayesify.convert(network, bayesify.MAP(epochs=1 if trial else 60, lr=0.05))
    bayesify.fit(plain, loader, progress=False)
    method = bayesify.BayesAdapter(epochs=1 if trial else 20)
    posterior = bayesify.convert(plain.network, method)
    bayesify.fit(posterior, loader, progress=False, accuracy_tolerance=1.0)
    return posterior, test.inputs


def draw(images: torch.Tensor, found: Sensitivity, titles: list[str], path: Path) -> None:
    """Draw three rows of pictures."""
    figure = Figure(figsize=(1.6 * len(images), 5.2), layout="constrained")
    panels = figure.subplots(3, len(images))
    names = ("digit", "derivative", "contribution")
    for column, title in enumerate(titles):
        limit = float(found.gradient[column].abs().max())
        shown: list[tuple[torch.Tensor, dict[str, Any]]] = [
            (images[column, 0], {"cmap": "gray_r", "vmin": 0, "vmax": 1}),
            (found.gradient[column, 0], {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}),
            (found.contribution[column, 0], {"cmap": "Purples", "vmin": 0}),
        ]
        for row, (picture, options) in enumerate(shown):
            axes = panels[row][column]
            axes.imshow(picture, **options)
            axes.set(xticks=[], yticks=[])
            if row == 0:
                axes.set_title(title, fontsize=9)
            if column == 0:
                axes.set_ylabel(names[row], fontsize=9)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Fit, ask and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trial", action="store_true", help="one epoch, and nothing is kept")
    arguments = parser.parse_args()
    posterior, images = fitted(trial=arguments.trial)
    prediction = bayesify.predict(posterior, images, how="streamlined")
    worst = prediction.score("epistemic").argsort(descending=True)[:SHOWN]
    found = bayesify.input_sensitivity(posterior, images[worst], num_draws=50)
    two = prediction.probs[worst].topk(2, -1)
    titles = [f"{int(a)} ({float(p):.0%}) or {int(b)}" for (a, b), (p, _) in zip(two.indices, two.values, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        path = (Path(folder) if arguments.trial else PICTURES) / "digits_sensitivity.png"
        draw(images[worst], found, titles, path)
        print(path)
    places = [divmod(int(gradient.abs().flatten().argmax()), 8) for gradient in found.gradient]
    records = Records(
        None if arguments.trial else RESULTS / "digits_sensitivity.json", {"script": "digits_sensitivity"}
    )
    records.row("largest derivative, row and column", lambda: dict(zip(titles, places, strict=True)))


if __name__ == "__main__":
    main()
