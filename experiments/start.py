"""The picture of the first page: how sure a network is of its mistakes, and how sure a posterior is of the same.

`BAYESIFY_DATA=... python -m experiments.start` takes the pretrained ResNet-20 and what `choose` finds for it within
four passes on CIFAR-10's first 2,000 test images (four views, and their calibration; the row "chosen, 4 passes" of the
scoreboard). Of the last 8,000 test images it draws all that the network gets wrong, and four of those that it is at
least 99 % sure of: where the posterior is less sure of them than in 20, 40, 60 and 80 % of these. A minute.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bayesify
from bayesify import Posterior, Prediction, Views
from experiments.board_tasks import CifarBoard
from experiments.config import Setting
from experiments.data import load
from experiments.networks import cifar_inputs
from experiments.records import PICTURES

__all__ = ["draw", "examples", "main"]

CLASSES = ("airplane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
VIEWS = ("identity", "mirror", "shift(2,0)", "mirror+shift(-2,0)")
SURE = 0.99
QUANTILES = (0.2, 0.4, 0.6, 0.8)
PLAIN, OURS = "#B0483A", "#2F6DB5"


def belief(prediction: Prediction, labels: Tensor) -> Tensor:
    """Return the probability that a prediction gives to other labels than its own, one for each input."""
    probs: Tensor = prediction.probs
    return probs.gather(-1, labels[:, None])[:, 0]


def examples(before: Tensor, after: Tensor, quantiles: Sequence[float] = QUANTILES) -> Tensor:
    """Return the indices of sure mistakes at these quantiles of what the posterior believes in them.

    >>> examples(torch.tensor([1.0, 0.5, 1.0, 1.0]), torch.tensor([0.9, 0.1, 0.2, 0.6]), (0, 0.5, 1)).tolist()
    [2, 3, 0]
    """
    sure = (before >= SURE).nonzero().flatten()
    ordered = sure[after[sure].argsort()]
    return ordered[[round(quantile * (len(ordered) - 1)) for quantile in quantiles]]


def draw(before: Tensor, after: Tensor, shown: Sequence[tuple[Tensor, str, str, float, float]], path: Path) -> None:
    """Draw both distributions over the mistakes, and images with what is believed of each.

    Args:
        before: What the network believes in its wrong answers.
        after: What the posterior believes in them.
        shown: Images (3, H, W), what they are, what the network says, and both beliefs.
        path: Where the picture goes.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "start", "font.size": 10}):
        figure = Figure(figsize=(11, 3.3), layout="constrained")
        places = figure.add_gridspec(2, 4 + len(shown), height_ratios=(1.2, 1))
        axes = figure.add_subplot(places[:, :4])
        edges = torch.linspace(0, 1, 11).tolist()
        axes.hist([before.tolist(), after.tolist()], bins=edges, color=[PLAIN, OURS], label=["network", "posterior"])
        axes.set_xlabel("probability of the network's wrong answer")
        axes.set_ylabel(f"of {len(before)} mistakes")
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        for number, one in enumerate(shown):
            _column(figure, places, 4 + number, *one)
        figure.savefig(path, metadata={"Date": None})


def _column(figure: Any, places: Any, at: int, image: Tensor, truth: str, said: str, *beliefs: float) -> None:
    top, low = figure.add_subplot(places[0, at]), figure.add_subplot(places[1, at])
    top.imshow(image.permute(1, 2, 0), interpolation="nearest")
    top.set_axis_off()
    top.set_title(f"a {truth}", fontsize=10)
    bars = low.bar([0, 1], beliefs, 0.75, color=(PLAIN, OURS))
    low.bar_label(bars, [f"{100 * belief:.0f} %" for belief in beliefs], fontsize=9, padding=2)
    low.set(ylim=(0, 1.25), yticks=[], xticks=[0.5])
    low.set_xticklabels([f"“{said}”?"])
    low.tick_params(length=0)
    low.spines[["top", "right", "left"]].set_visible(False)


def chosen(setting: Setting) -> Posterior:
    """Return the posterior that the scoreboard's row found: the network on four views, calibrated."""
    posterior = bayesify.convert(setting.network, "map")
    bayesify.calibrate(posterior, setting.val, views=Views(*VIEWS))
    return posterior


def main() -> None:
    """Predict and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=PICTURES / "start.svg")
    arguments = parser.parse_args()
    setting = CifarBoard().setting(0, trial=False, work=Path("work"))
    test = load("cifar10", "test")
    plain = bayesify.predict(bayesify.convert(setting.network, "map"), setting.test)
    wrong = (plain.label != test.targets).nonzero().flatten()
    images, truth, said = test.inputs[wrong], test.targets[wrong], plain.label[wrong]
    after = belief(bayesify.predict(chosen(setting), cifar_inputs(images)), said)
    before = plain.confidence[wrong]
    some = examples(before, after).tolist()
    shown = [
        (images[i], CLASSES[int(truth[i])], CLASSES[int(said[i])], float(before[i]), float(after[i])) for i in some
    ]
    draw(before, after, shown, arguments.picture)
    for name, values in (("network", before), ("posterior", after)):
        print(f"{name}: {int((values >= SURE).sum())} of {len(values)} mistakes with at least {SURE:.0%}")


if __name__ == "__main__":
    main()
