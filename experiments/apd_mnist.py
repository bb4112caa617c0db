"""Accuracy and anomaly detection on MNIST (APD, section 5.2, Tables 1 to 3 and 5, Figures 3, 5, 6, 7 and 9).

`BAYESIFY_DATA=... python -m experiments.apd_mnist` fits SGD, MC dropout and SGLD to fcNN1, distils SGLD's samples,
and makes a row for each of them and for the baselines of the distillation: accuracy, and AUROC, AUPR+ and AUPR- of
every score against five foreign sets multiplied by 5, every set on [-1, 1] before. `--network fcNN2` takes the larger
network. Other parts: `--part study` (what decides the AUROC: burn-in, prior, rate, chains, number and spread of
samples), `--part samples`, `scales`, `components`, `games` (the figures). Rows go to
`experiments/results/apd_mnist_*.json`, pictures beside them; what is there is not made again, and posteriors are kept
in `--work`. `--trial` takes a few images.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import bayesify
from bayesify import measure
from bayesify.decide import anomaly_table
from experiments.apd_common import BOUNDS, NETWORKS, RESULTS, Data, arguments_of, kept, mlp, mnist, rows_of
from experiments.rows import Rows

FACTOR = 5.0
PAPER = {
    "accuracy, fcNN1": {"SGD": 0.981, "MC dropout": 0.973, "SGLD": 0.979, "APD": 0.978},
    "accuracy, fcNN2": {"SGD": 0.981, "MC dropout": 0.983, "SGLD": 0.980, "APD": 0.981},
    "AUROC, fcNN1, notMNIST, entropy": {"SGD": 57.7, "MC dropout": 83.3, "SGLD": 92.3, "APD": 92.2},
    "AUROC, fcNN1, notMNIST, BALD": {"SGLD": 97.8, "APD": 97.6},
    "AUROC, fcNN1, notMNIST, max probability": {"SGD": 58.5, "MC dropout": 86.5, "SGLD": 93.2, "APD": 92.7},
    "AUROC, fcNN2, notMNIST, entropy": {"SGD": 61.4, "MC dropout": 87.0, "SGLD": 98.7, "APD": 98.3},
    "AUROC, fcNN2, notMNIST, BALD": {"SGLD": 99.7, "APD": 99.6},
}


class Lab:
    """Posteriors of one network, made when they are asked for and kept."""

    def __init__(self, data: Data, arguments: argparse.Namespace) -> None:
        """Note what there is."""
        self.data, self.arguments = data, arguments
        self.sizes = NETWORKS[arguments.network]
        self.trial = arguments.trial
        self.draws = 8 if self.trial else 200
        self.held_out = data.val[0][:500]

    def folder(self, name: str) -> Path | None:
        """Return where a posterior is kept."""
        work = self.arguments.work
        return None if work is None else work / self.arguments.network / name.replace(" ", "-")

    def plain(self, name: str) -> bayesify.Posterior:
        """Return SGD or MC dropout, at the epoch with the least validation loss."""
        settings: dict[str, Any] = {"epochs": 1 if self.trial else 40, "lr": 0.05, "weight_decay": 1e-3}
        torch.manual_seed(0)
        if name == "SGD":
            return kept(mlp(*self.sizes), bayesify.MAP(**settings), self.data, self.folder(name), best=True)
        dropped, method = mlp(*self.sizes, dropout=0.5), bayesify.MCDropout(**settings)
        return kept(dropped, method, self.data, self.folder(name), best=True)

    def sgld(self, name: str = "SGLD", **changes: Any) -> bayesify.Posterior:
        """Return SGLD with the paper's rate, prior and number of steps, and half of them as burn-in."""
        settings: dict[str, Any] = {
            "epochs": self.arguments.epochs, "lr": 0.05, "weight_decay": 1e-3, "num_samples": 2000, "start": "reset",
        }  # fmt: skip
        settings |= changes
        if self.trial:
            settings |= {"epochs": 4, "num_samples": 10, "weight_decay": 0.0}
        torch.manual_seed(0)
        return kept(mlp(*self.sizes), bayesify.SGLD(**settings), self.data, self.folder(name))

    def bank(self, number: int = 2000) -> bayesify.Posterior:
        """Return samples of SGLD at equal distances."""
        return bayesify.sample_bank(self.sgld(), number)

    def distilled(self, how: str, number: int = 2000, **options: Any) -> bayesify.Posterior:
        """Return a distillation of SGLD's samples, from its folder if it is there."""
        words = [how, str(number), *(f"{key}-{value}" for key, value in options.items())]
        folder = self.folder("-".join(words).replace(", ", "-").strip("()"))
        if folder is not None and (folder / "config.json").exists():
            torch.manual_seed(0)
            return bayesify.load(folder, mlp(*self.sizes)).eval()
        game = {"steps": 10 if self.trial else 20_000, "inputs": self.held_out} if "gan" in how else {}
        made = bayesify.distill(self.bank(number), how, progress=False, **{**game, **options})  # type: ignore[arg-type]
        if folder is not None:
            bayesify.save(made, folder)
        return made

    def members(self) -> dict[str, Callable[[], bayesify.Posterior]]:
        """Return how each row of the tables is made."""
        components = 4 if self.trial else 60
        return {
            "SGD": partial(self.plain, "SGD"),
            "MC dropout": partial(self.plain, "MC dropout"),
            "SGLD": self.sgld,
            "APD": partial(self.distilled, "wgan-gp"),
            "APD, hidden 20": partial(self.distilled, "wgan-gp", hidden=(20, 20, 20)),
            "PCA and residual noise": partial(self.distilled, "pca", latent=8 if self.trial else 32, residual=True),
            f"mixture of {components}": partial(self.distilled, "mixture", components=components),
            "SWAG of the bank": partial(self.distilled, "swag", latent=8 if self.trial else 32),
        }


def figures(
    lab: Lab, posterior: bayesify.Posterior, factor: float = FACTOR, draws: int | None = None
) -> dict[str, Any]:
    """Return accuracy and the table of anomaly detection, in per cent."""
    number = draws or lab.draws
    test = bayesify.predict(posterior, lab.data.loader("test", 1000), num_samples=number, seed=0)
    inside = lab.data.test[0][:2000]
    repeats = 1 if lab.trial else 3
    table = anomaly_table(
        posterior, inside, lab.data.foreign, factor=factor, bounds=BOUNDS, num_samples=number, repeats=repeats
    )
    percent = {
        name: {
            score: [round(100 * value, 1) for value in (found.auroc, found.aupr_foreign, found.aupr_own)]
            for score, found in scores.items()
        }
        for name, scores in table.items()
    }
    return {"accuracy": round(measure.accuracy(test.probs, lab.data.test[1]), 4), "factor": factor, **percent}


def tables(lab: Lab, rows: Rows) -> None:
    """Make Tables 1, 2 and 5 for one network, with and without the factor."""
    for name, make in lab.members().items():

        def both(make: Callable[[], bayesify.Posterior] = make) -> dict[str, Any]:
            posterior = make()
            return {
                "times 5": figures(lab, posterior),
                "times 1": figures(lab, posterior, 1.0),
                "storage": storage(posterior),
            }

        rows.row(name, both)


def storage(posterior: bayesify.Posterior) -> dict[str, float]:
    """Return how many networks a posterior costs."""
    own = {name for name, _ in posterior.named_parameters() if name.startswith("network.")}
    numbers = sum(
        t.numel() for name, t in posterior.state_dict().items() if not name.startswith(("network.", "chains."))
    )
    size = sum(p.numel() for name, p in posterior.named_parameters() if name in own)
    return {"networks": round(numbers / size, 2)}


def study(lab: Lab, rows: Rows) -> None:
    """Change one thing at a time, to see what decides the AUROC."""
    epochs = lab.arguments.epochs
    steps = epochs * 500
    variants: dict[str, dict[str, Any]] = {
        "as in the tables": {},
        "the paper's burn-in, 500 steps": {"burn_in": 500 / steps},
        "samples of the last tenth": {"burn_in": 0.9},
        "a tenth of the steps": {"epochs": max(1, epochs // 10)},
        "four times the rate": {"lr": 0.2},
        "a prior ten times as wide in variance": {"weight_decay": 1e-4},
        "a prior a tenth as wide in variance": {"weight_decay": 1e-2},
        "four chains, a quarter of the steps each": {"chains": 4, "num_samples": 500, "epochs": max(1, epochs // 4)},
        "from the trained network": {"start": "network"},
        "SGHMC": {"kind": "sghmc", "lr": 0.01, "friction": 0.1},
        "preconditioned": {"kind": "psgld", "lr": 0.001},
        "cyclical": {"schedule": "cyclical", "lr": 0.2},
    }
    for name, changes in variants.items():

        def make(name: str = name, changes: dict[str, Any] = changes) -> dict[str, Any]:
            posterior = lab.sgld("SGLD" if not changes else name, **changes)
            found = figures(lab, posterior)
            try:
                diagnosis = bayesify.diagnose(posterior, lab.data.test[0][:20])
            except (ImportError, ValueError) as reason:
                return {**found, "diagnosis": str(reason)}
            worst = {
                "ess": diagnosis.ess.median(),
                "r_hat": diagnosis.r_hat.median(),
                "weight r_hat": diagnosis.weight_r_hat.median(),
            }
            return {**found, "diagnosis": {key: round(float(value), 3) for key, value in worst.items()}}

        rows.row(name, make)


def sweep(lab: Lab, rows: Rows, part: str) -> dict[str, dict[float, float]]:
    """Make the rows of a figure; return curves of the AUROC on notMNIST by BALD."""
    curves: dict[str, dict[float, float]] = {}

    def point(curve: str, at: float, make: Callable[[], dict[str, Any]]) -> None:
        found = rows.row(f"{curve}, {at:g}", make)
        curves.setdefault(curve, {})[at] = found["notMNIST"]["BALD"][0]

    if part == "samples":  # Figures 3 and 6
        for number in (4, 8) if lab.trial else (10, 20, 50, 100, 200, 500, 1000, 2000):
            point("SGLD", number, lambda n=number: figures(lab, lab.bank(n), draws=n))
            point("APD", number, lambda n=number: figures(lab, lab.distilled("wgan-gp", hidden=(20, 20, 20)), draws=n))
    elif part == "scales":  # Figure 9
        members = lab.members()
        for factor in (1.0, 2.0, 5.0, 10.0, 20.0):
            for name in ("SGD", "MC dropout", "SGLD", "APD"):
                point(name, factor, lambda n=name, f=factor: figures(lab, members[n](), f))
    elif part == "components":  # Figure 5
        for number in (2, 3) if lab.trial else (1, 5, 10, 20, 40, 60, 100):
            point("mixture", number, lambda n=number: figures(lab, lab.distilled("mixture", components=n)))
        point("SGLD", 1, lambda: figures(lab, lab.sgld()))
    else:  # Figure 7
        for how in ("wgan-gp", "wgan", "gan"):
            for hidden in (8,) if lab.trial else (20, 50, 100):
                point(how, hidden, lambda h=how, s=hidden: figures(lab, lab.distilled(h, hidden=(s, s, s))))
    return curves


def draw(curves: dict[str, dict[float, float]], part: str, path: Path) -> None:
    """Draw the curves of a figure."""
    import matplotlib.pyplot as plt

    label = {"samples": "samples", "scales": "factor", "components": "components", "games": "hidden units"}[part]
    figure, axis = plt.subplots(figsize=(5, 3.5))
    for name, curve in curves.items():
        axis.plot(list(curve), list(curve.values()), marker="o", label=name)
    axis.set(xlabel=label, ylabel="AUROC by BALD, notMNIST, %", xscale="log")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path)
    print(path)


def main() -> None:
    """Make the rows of a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=("fcNN1", "fcNN2"), default="fcNN1")
    parser.add_argument(
        "--part", choices=("tables", "study", "samples", "scales", "components", "games"), default="tables"
    )
    parser.add_argument("--epochs", type=int, default=400, help="of SGLD, of 500 steps each")
    arguments = arguments_of(parser, "apd_mnist")
    lab = Lab(mnist(trial=arguments.trial), arguments)
    name = f"apd_mnist_{arguments.part}_{arguments.network}"
    command = f"apd_mnist --part {arguments.part} --network {arguments.network} --epochs {arguments.epochs}"
    rows = rows_of(name, arguments, command)
    if arguments.part == "tables":
        tables(lab, rows)
        for title, numbers in PAPER.items():
            print(f"paper, {title}: {numbers}")
    elif arguments.part == "study":
        study(lab, rows)
    else:
        folder = Path(tempfile.mkdtemp()) if arguments.trial else RESULTS
        draw(sweep(lab, rows, arguments.part), arguments.part, folder / f"{name}.svg")


if __name__ == "__main__":
    main()
