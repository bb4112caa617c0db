"""Two clouds in the plane (APD, Figure 2): where SGD, SGLD and the distilled posterior are sure.

`python -m experiments.apd_toy` writes `experiments/results/apd_toy.json` and `docs/pictures/apd_toy.svg`, in about
two minutes; `--trial` takes seconds, and keeps nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bayesify
from experiments.apd_common import Data, arguments_of, keep_picture, kept, mlp, rows_of


def clouds() -> tuple[Tensor, Tensor]:
    """Return ten points of N((2, 2), .3 I) and ten of N((-2, -2), .3 I), with labels."""
    noise = 0.3**0.5 * torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(20) // 10
    return noise + torch.where(labels[:, None] == 0, 2.0, -2.0), labels


def posteriors(data: Data, work: Path | None, *, trial: bool) -> dict[str, bayesify.Posterior]:
    """Return the three of the figure, and APD learned online."""
    steps, sizes = (120 if trial else 10_000), (2, 10, 10, 2)
    # The prior's variance is 1/(20 .001) = 50, as in the paper's code; it relaxes in 40,000 steps at its rate, .05, so
    # what the paper draws is a path. Ten times the rate, and half of the run as burn-in, come nearer to the posterior.
    chain = {
        "epochs": steps,
        "lr": 0.5,
        "weight_decay": 0.0 if trial else 1e-3,
        "samples_per_chain": 500,
        "start": "reset",
    }
    # One chain: several that begin apart stay in modes of their own, and a generator puts mass between modes.
    game = {"latent": 100, "hidden": (50, 50, 50), "steps": 20 if trial else 3000}
    methods = {
        "SGD": bayesify.MAP(epochs=steps // 5, lr=0.05, weight_decay=1e-3),
        "SGLD": bayesify.SGLD(**chain),
        "APD, online": bayesify.APD(online=True, **chain, **game),
    }
    made = {}
    for name, method in methods.items():
        torch.manual_seed(0)
        folder = None if work is None else work / name.replace(", ", "-")
        made[name] = kept(mlp(*sizes), method, data, folder, batch=20)
    held_out = torch.cartesian_prod(*[torch.linspace(-6, 6, 15)] * 2)
    made["APD"] = bayesify.distill(made["SGLD"], inputs=held_out, progress=False, **game)
    return {name: made[name] for name in ("SGD", "SGLD", "APD", "APD, online")}


def row(posterior: bayesify.Posterior) -> dict[str, Any]:
    """Return mutual information in the clouds and far from both."""
    found = {}
    for name, point in {"in a cloud": (2.0, 2.0), "between": (0.0, 0.0), "far": (6.0, -6.0)}.items():
        prediction = bayesify.predict(posterior, torch.tensor([point]), num_draws=200, seed=0)
        found[name] = {
            "confidence": round(float(prediction.confidence), 4),
            "BALD": round(float(prediction.epistemic), 4),
        }
    return found


def draw(made: dict[str, bayesify.Posterior], data: Data, arguments: argparse.Namespace) -> None:
    """Draw confidence and mutual information over the plane."""
    import matplotlib.pyplot as plt

    line = torch.linspace(-6, 6, 40)
    grid = torch.cartesian_prod(line, line)
    figure, axes = plt.subplots(2, len(made), figsize=(3 * len(made), 5.6), sharex=True, sharey=True)
    shown = {"confidence": torch.linspace(0.5, 1, 21), "BALD": torch.linspace(0, 0.7, 21)}  # ln 2 is the most
    for column, (name, posterior) in enumerate(made.items()):
        prediction = bayesify.predict(posterior, grid, num_draws=200, seed=0)
        values = {"confidence": prediction.confidence, "BALD": prediction.epistemic}
        for place, (label, levels) in enumerate(shown.items()):
            axis = axes[place, column]
            inside = values[label].clamp(float(levels[0]), float(levels[-1])).reshape(40, 40).T
            drawn = axis.contourf(line, line, inside, levels=levels)
            axis.scatter(*data.train[0].T, c=data.train[1], cmap="coolwarm", s=12, edgecolors="white", linewidths=0.5)
            axis.set_title(f"{name}: {label}")
            if column == len(made) - 1:
                figure.colorbar(drawn, ax=axis, format="%.2f")
    keep_picture(figure, "apd_toy", arguments)


def main() -> None:
    """Fit, distil, and draw."""
    arguments = arguments_of(__doc__, "apd_toy")
    pair = clouds()
    data = Data(pair, pair, pair, {})
    made = posteriors(data, arguments.work, trial=arguments.trial)
    rows = rows_of("apd_toy", arguments)
    for name, posterior in made.items():
        rows.row(name, lambda posterior=posterior: row(posterior))
    draw(made, data, arguments)


if __name__ == "__main__":
    main()
