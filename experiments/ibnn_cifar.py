"""iBNN on the pretrained CIFAR-10 ResNets, beside the plain network and MC dropout.

`BAYESIFY_DATA=... python -m experiments.ibnn_cifar` fine-tunes K = 4, 8 and 16 components for three seeds each (and
with wider starts for one), and measures them on the last 8,000 test images and on Fashion-MNIST and notMNIST, before
and after temperature scaling. Other parts:

- `start`: accuracy before the first step for starts of other widths, on the first 1,000 validation images;
- `tuning`: settings compared on the validation images (the first 2,000 test images) alone;
- `noise`: total, aleatoric and epistemic uncertainty against levels of noise, with a picture, from the fits of `main`;
- `components`: each component's accuracy on the validation images and where it lies, with pictures, from the same.

Rows go to `experiments/results/ibnn_cifar_*.json` one by one; what is there is not made again, and fits that were
stopped go on from their checkpoints in `--work`. `--trial` takes a few images and keeps nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import bayesify
from bayesify import IBNN
from bayesify.data import gaussian_noise, load, salt_and_pepper
from bayesify.evaluation.components import look_at_components
from bayesify.evaluation.report import plot_components
from experiments.adapter_cifar import Run
from experiments.networks import cifar_inputs, pretrained
from experiments.rows import Rows
from experiments.scoring import scored

RESULTS = Path(__file__).parent / "results"

# Error, NLL and ECE of the pretrained ResNet-50 on ImageNet (the paper's Table 7).
PAPER = {
    "map": (0.2387, 0.9618, 0.0373),
    "ibnn-4": (0.2322, 0.9310, 0.0350),
    "ibnn-8": (0.2315, 0.9237, 0.0323),
    "ibnn-16": (0.2312, 0.9118, 0.0232),
}
CHOSEN: dict[str, Any] = {"epochs": 2, "means_std": 0.05}
DRAWS = 16  # in every prediction, whatever K is
MAIN: dict[str, bayesify.Method] = {
    "map": bayesify.MAP(),
    "mc-dropout": bayesify.MCDropout(p=0.05, insert_before="conv", epochs=2, lr=0.005, schedule="cosine"),
    **{f"ibnn-{k}": IBNN(components=k, draws_per_component=DRAWS // k, **CHOSEN) for k in (4, 8, 16)},
    **{
        f"ibnn-{k}, means_std={std}": IBNN(components=k, draws_per_component=DRAWS // k, **{**CHOSEN, "means_std": std})
        for std, k in product((0.1, 0.3), (4, 8, 16))
    },
    "ibnn-16, not fitted": IBNN(components=16, draws_per_component=1, **{**CHOSEN, "epochs": 0}),
}
# Changes of K = 16 and two epochs, one at a time; what is best on validation images goes into CHOSEN.
TUNED = IBNN(components=16, draws_per_component=1, epochs=2, means_std=0.05)
TUNING: dict[str, dict[str, Any]] = {
    "not fitted": {"epochs": 0},
    "not fitted, means_std=0.08": {"epochs": 0, "means_std": 0.08},
    "not fitted, start_std=0.02": {"epochs": 0, "start_std": (0.02, 0.008)},
    "fitted": {},
    "means_std=0.1": {"means_std": 0.1},
    "start_std=0.02": {"start_std": (0.02, 0.008)},
    **{f"latent_lr={r}": {"latent_lr": r} for r in (0.001, 0.004, 0.04)},
    "slow_lr=0.001": {"slow_lr": 1e-3},
    "joint": {"weights": "joint", "lr": 0.01},
    "frozen": {"weights": "frozen"},
    "kl=average": {"kl": "average"},
    "repeats=1": {"repeats": 1},
}
STARTS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.5, 0.75)
LEVELS = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
# As in the paper (eq. 28), of normalised inputs.
NOISES = {
    "gaussian mixture": partial(gaussian_noise, how="mix"),
    "salt-and-pepper elements": partial(salt_and_pepper, per="element"),
}


def main_row(run: Run, name: str, seed: int) -> dict[str, Any]:
    """Fit and measure on the test images."""
    posterior, row = run.posterior(name, _seeded(MAIN[name], seed), seed)
    measured = scored(posterior, run.val, run.test, run.ood, seed=seed)
    return {**row, **measured, "paper (ResNet-50): error, nll, ece": PAPER.get(name)}


def tuning_row(run: Run, name: str) -> dict[str, Any]:
    """Fit and measure on the validation images."""
    method = dataclasses.replace(TUNED, **TUNING[name])
    posterior, row = run.posterior(f"tuning-{name}", method, 0)
    return {**row, **scored(posterior, run.val, None)}


def start_row(run: Run, std: float) -> dict[str, float]:
    """Return the accuracy before the first step: of the prediction, and of its draws on average."""
    method = IBNN(components=8, draws_per_component=1, means_std=std)
    posterior = bayesify.convert(pretrained(run.arguments.network), method)
    images, labels = next(iter(DataLoader(run.val.dataset, 1000)))
    prediction = bayesify.predict(posterior, images, seed=0, keep_samples=True)
    found = {
        "accuracy": (prediction.label == labels).double().mean(),
        "accuracy of draws": (prediction.samples.argmax(-1) == labels).double().mean(),
        "nll": -prediction.log_probs.gather(-1, labels[:, None]).mean(),
    }
    return {name: round(float(value), 5) for name, value in found.items()}


def noise_row(run: Run, name: str, kind: str) -> dict[str, Any]:
    """Return the mean uncertainties for each level of noise."""
    posterior, _ = run.posterior(name, MAIN[name], 0)
    images = load("cifar10", "test").inputs[: 16 if run.arguments.trial else 500]
    found: dict[str, list[float]] = {"total": [], "aleatoric": [], "epistemic": []}
    for level in LEVELS:
        noisy = NOISES[kind](cifar_inputs(images), level, generator=0)
        prediction = bayesify.predict(posterior, noisy, seed=0)
        for key, values in found.items():
            values.append(round(float(getattr(prediction, key).mean()), 5))
    return {"name": name, "noise": kind, "images": len(images), "levels": LEVELS, **found}


def components_row(run: Run, name: str, pictures: Path) -> dict[str, Any]:
    """Look at the components of a fit, and draw them."""
    posterior, _ = run.posterior(name, MAIN[name], 0)
    found = look_at_components(posterior, run.val)  # type: ignore[arg-type]
    plot_components(found, pictures / f"ibnn_cifar_components_{name}.svg")
    return {"accuracy": [round(float(a), 5) for a in found.accuracy], "disagreement": found.mean_disagreement}


def draw_noise(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw Figure 8: aleatoric below, epistemic above, for each method and kind of noise."""
    from matplotlib.figure import Figure

    names, kinds = list(dict.fromkeys(r["name"] for r in rows)), list(dict.fromkeys(r["noise"] for r in rows))
    figure = Figure(figsize=(3.4 * len(names), 2.8 * len(kinds)), layout="constrained")
    axes = figure.subplots(len(kinds), len(names), squeeze=False, sharey=True)
    for row in rows:
        axis = axes[kinds.index(row["noise"])][names.index(row["name"])]
        parts = row["aleatoric"], row["epistemic"]
        axis.stackplot(row["levels"], *parts, labels=("aleatoric", "epistemic"), colors=("#56B4E9", "#E69F00"))
        axis.set(title=row["name"], xlabel=f"{row['noise']} noise", ylabel="nats")
    figure.legend(*axes[0][0].get_legend_handles_labels(), frameon=False, loc="outside upper center", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _seeded(method: bayesify.Method, seed: int) -> bayesify.Method:
    return dataclasses.replace(method, seed=seed) if isinstance(method, IBNN) else method


def main() -> None:
    """Make the rows of a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("main", "start", "tuning", "noise", "components"), default="main")
    parser.add_argument("--network", default="resnet20", choices=("resnet20", "resnet32", "resnet44"))
    parser.add_argument("--images", type=int, default=10_000, help="training images in an epoch")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", help="names of rows, without the seed")
    parser.add_argument("--work", type=Path, default=Path("ibnn-work"), help="folder for checkpoints")
    parser.add_argument("--trial", action="store_true", help="a few images, and nothing is kept")
    arguments = parser.parse_args()
    if arguments.trial:
        torch.manual_seed(0)
        arguments.images = 64
    # Draws are plain networks, which are a fifth faster in this layout on a processor.
    run, part = Run(arguments, layout=torch.channels_last), arguments.part
    command = (
        f"python -m experiments.ibnn_cifar --part {part} --network {arguments.network} --images {arguments.images}"
    )
    path = RESULTS / f"ibnn_cifar_{part}_{arguments.network}.json"
    rows = Rows(None if arguments.trial else path, command)
    pictures = arguments.work if arguments.trial else RESULTS

    def wanted(names: Any) -> list[str]:
        return [name for name in names if arguments.only is None or name in arguments.only]

    if part == "start":
        for std in STARTS:
            rows.row(f"means_std={std}", partial(start_row, run, std))
    elif part == "tuning":
        for name in wanted(TUNING):
            rows.row(name, partial(tuning_row, run, name))
    elif part == "main":
        for name in wanted(MAIN):
            for seed in arguments.seeds[:1] if name == "map" else arguments.seeds:
                rows.row(f"{name}, seed {seed}", partial(main_row, run, name, seed))
    elif part == "noise":
        pairs = product(NOISES, wanted(("mc-dropout", "ibnn-8")))
        made = [rows.row(f"{name}, {kind}", partial(noise_row, run, name, kind)) for kind, name in pairs]
        draw_noise(made, pictures / f"ibnn_cifar_noise_{arguments.network}.svg")
    else:
        for name in wanted(f"ibnn-{k}" for k in (4, 8, 16)):
            rows.row(name, partial(components_row, run, name, pictures))


if __name__ == "__main__":
    main()
