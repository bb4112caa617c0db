"""y = x^3 from 30 points: iBNN and mean-field VI with one to five hidden layers of 256, as in the paper's Figure 1.

`python -m experiments.ibnn_regression` trains both from scratch at each depth, prints the error of the mean where the
data are, the spread of functions there and away from them, and draws `docs/pictures/ibnn_regression.svg`. About
five minutes on one core. Rows go to `experiments/results/ibnn_regression.json`. `--trial` takes a few steps and keeps
nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import IBNN, BayesAdapter
from experiments.records import PICTURES, RESULTS, Records

NOISE = 3.0  # of y = x^3 on [-4, 4]
SCALE_X, SCALE_Y = 4.0, 64.0
EPOCHS = 3000


def data() -> tuple[Tensor, Tensor]:
    """Return 30 points, scaled to about one."""
    generator = torch.Generator().manual_seed(0)
    x = 8 * torch.rand(30, 1, generator=generator) - 4
    y = x**3 + NOISE * torch.randn(30, 1, generator=generator)
    return x / SCALE_X, y / SCALE_Y


def network(depth: int) -> nn.Module:
    """Return a ReLU network with so many hidden layers of 256."""
    layers: list[nn.Module] = [nn.Linear(1, 256), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(256, 256), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(256, 1))


def methods(epochs: int) -> dict[str, bayesify.Method]:
    """Return both methods, set up to train from scratch."""
    common: dict[str, Any] = {"epochs": epochs, "optimizer": "adam", "lr": 1e-3}
    latent: dict[str, Any] = {"latent_lr": 1e-3, "means_std": 0.5, "prior_std": 0.3, "weight_decay": 0.0}
    log_stds: dict[str, Any] = {"log_std_lr": 1e-3, "start_std": (0.0067, 0.018), "prior_std": 1.0}
    return {"iBNN": IBNN.from_scratch(8, **common, **latent), "mean-field VI": BayesAdapter(**common, **log_stds)}


def run(depth: int, name: str, method: bayesify.Method) -> dict[str, Any]:
    """Train, and predict on a grid twice as wide as the data."""
    torch.manual_seed(0)
    x, y = data()
    likelihood = bayesify.Gaussian(noise_std=NOISE / SCALE_Y)
    posterior = bayesify.convert(network(depth), method, likelihood=likelihood)
    bayesify.fit(posterior, DataLoader(TensorDataset(x, y), 30), progress=False, clip_norm=1.0)
    grid = torch.linspace(-8, 8, 161)[:, None]
    prediction = bayesify.predict(posterior, grid / SCALE_X, num_draws=100, seed=0)
    mean = SCALE_Y * prediction.mean.reshape(-1)
    spread = SCALE_Y * prediction.epistemic.reshape(-1).sqrt()
    inside = grid[:, 0].abs() <= 4
    truth = grid[:, 0] ** 3
    return {
        "method": name,
        "depth": depth,
        "rmse inside": float((mean - truth)[inside].square().mean().sqrt()),
        "spread inside": float(spread[inside].mean()),
        "spread outside": float(spread[grid[:, 0].abs() >= 6].mean()),
        "within two stds, inside": float(
            ((mean - truth).abs() <= 2 * (spread**2 + NOISE**2).sqrt())[inside].float().mean()
        ),
        "mean": mean.tolist(),
        "spread": spread.tolist(),
        "grid": grid[:, 0].tolist(),
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw every prediction, a row for each method, a column for each depth."""
    from matplotlib.figure import Figure

    names, depths = list(dict.fromkeys(r["method"] for r in rows)), sorted({r["depth"] for r in rows})
    figure = Figure(figsize=(3 * len(depths), 2.8 * len(names)), layout="constrained")
    axes = figure.subplots(len(names), len(depths), squeeze=False, sharex=True, sharey=True)
    x, y = data()
    for row in rows:
        axis = axes[names.index(row["method"])][depths.index(row["depth"])]
        mean, spread, grid = (torch.tensor(row[key]) for key in ("mean", "spread", "grid"))
        std = (spread**2 + NOISE**2).sqrt()
        axis.fill_between(grid, mean - 3 * std, mean + 3 * std, color="#0072B2", alpha=0.2, linewidth=0)
        axis.fill_between(grid, mean - std, mean + std, color="#0072B2", alpha=0.3, linewidth=0)
        axis.plot(grid, mean, color="#0072B2")
        axis.plot(grid, grid**3, color="#555555", linewidth=0.8, linestyle="--")
        axis.plot(SCALE_X * x[:, 0], SCALE_Y * y[:, 0], ".", color="#D55E00", markersize=4)
        axis.set(title=f"{row['method']}, {row['depth']} hidden", xlim=(-6, 6), ylim=(-200, 200))
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path)


def main() -> None:
    """Run what is missing and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="*", default=[1, 2, 3, 4, 5])
    parser.add_argument("--picture", type=Path, default=PICTURES / "ibnn_regression.svg")
    parser.add_argument("--trial", action="store_true", help="a few steps, and nothing is kept")
    arguments = parser.parse_args()
    rows = Records(None if arguments.trial else RESULTS / "ibnn_regression.json", {"script": "ibnn_regression"})
    if arguments.trial:
        arguments.depths = arguments.depths[:1]
    pairs = product(methods(5 if arguments.trial else EPOCHS).items(), arguments.depths)
    made = [
        rows.row(f"{name}, {depth} hidden", partial(run, depth, name, method), config={"method": method})
        for (name, method), depth in pairs
    ]
    for row in made:
        print(row["method"], row["depth"], {k: round(v, 3) for k, v in row.items() if isinstance(v, float)})
    with tempfile.TemporaryDirectory() as folder:
        draw(made, Path(folder) / "picture.svg" if arguments.trial else arguments.picture)


if __name__ == "__main__":
    main()
