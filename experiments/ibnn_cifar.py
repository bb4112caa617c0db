"""iBNN on the pretrained CIFAR-10 ResNet-20, beside the plain network and MC dropout.

`BAYESIFY_DATA=... python -m experiments.ibnn_cifar` fine-tunes K = 4, 8 and 16 components for three seeds each and
evaluates them on the last 8,000 test images and on clothes and letters, before and after temperature scaling; about
half an hour for each run on two cores. Other parts:

- `--part start` prints the accuracy before the first step for starts of other widths, on validation images;
- `--part tuning` tries settings, on validation images only;
- `--part noise` draws total, aleatoric and epistemic uncertainty against levels of noise, from the checkpoints of main;
- `--part components` prints each component's accuracy and draws where they lie.

Rows that are in `experiments/results/ibnn_cifar_*.json` are not run again; runs that were stopped go on from their
checkpoints in `--work`. `--examples 256` is a trial whose results are not kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

import bayesify
from bayesify import IBNN
from bayesify.components import look_at_components
from bayesify.data import gaussian_noise, load, salt_and_pepper
from bayesify.evaluate import Evaluation, evaluate
from bayesify.report import plot_components
from experiments.abnn_cifar import shorter
from experiments.cifar import foreign_loaders, loaders
from experiments.ledger import RESULTS, Ledger
from experiments.networks import cifar_inputs, pretrained

CHOSEN: dict[str, Any] = {"epochs": 5}
MAIN: dict[str, bayesify.Method] = {
    "map": bayesify.MAP(),
    "mc-dropout": bayesify.MCDropout(p=0.05, insert_before="conv", epochs=2, lr=0.005, schedule="cosine"),
    **{f"ibnn-{k}": IBNN(components=k, **CHOSEN) for k in (4, 8, 16)},
}
# Changes of K = 4 and two epochs, one at a time; what is best on validation images goes into CHOSEN.
TUNING: dict[str, dict[str, Any]] = {
    "the default": {},
    **{f"means_std={s}": {"means_std": s} for s in (0.05, 0.2, 0.3)},
    **{f"prior_std={s}": {"prior_std": s} for s in (0.05, 0.3)},
    **{f"latent_lr={r}": {"latent_lr": r} for r in (0.004, 0.04, 0.12)},
    **{f"start_std={s}": {"start_std": (s, 0.4 * s)} for s in (0.1, 0.2)},
    "slow_lr=0.001": {"slow_lr": 1e-3},
    "slow_lr=0.005": {"slow_lr": 5e-3},
    "joint": {"weights": "joint", "lr": 0.01},
    "frozen": {"weights": "frozen"},
    "kl=average": {"kl": "average"},
    "kl=mc": {"kl": "mc"},
    "repeats=1": {"repeats": 1},
    "not fitted": {"epochs": 0},
}
GAUSSIAN = [0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0]
SALT = [0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0]


class Run:
    """The data and where checkpoints are."""

    def __init__(self, work: Path, examples: int | None) -> None:
        """Read everything once; `examples` cuts each set for a trial."""
        self.work = work
        self.examples = examples
        self.train, self.val, self.test = (shorter(loader, examples) for loader in loaders())
        self.foreign = {name: shorter(loader, examples) for name, loader in foreign_loaders().items()}

    def fitted(self, name: str, method: bayesify.Method, seed: int) -> tuple[bayesify.Posterior, dict[str, Any]]:
        """Convert and fit, or go on with it."""
        if isinstance(method, IBNN):
            method = dataclasses.replace(method, seed=seed)
        posterior = bayesify.convert(pretrained("resnet20"), method)
        folder = self.work / f"{name}-{seed}-{self.examples}".replace("=", "-").replace(" ", "-")
        began = time.perf_counter()
        bayesify.fit(
            posterior, self.train, checkpoint=folder, checkpoint_steps=100, seed=seed, progress=False,
            accuracy_tolerance=1.0,
        )  # fmt: skip
        return posterior, {"fit seconds": round(time.perf_counter() - began, 1)}

    def validated(self, name: str, method: bayesify.Method, seed: int) -> dict[str, Any]:
        """Return measures on the validation images only."""
        posterior, row = self.fitted(name, method, seed)
        return {**row, "validation": _metrics(evaluate(posterior, self.val, seed=seed))}

    def tested(self, name: str, method: bayesify.Method, seed: int) -> dict[str, Any]:
        """Return measures on the test images, before and after calibration."""
        posterior, row = self.fitted(name, method, seed)
        row["validation"] = _metrics(evaluate(posterior, self.val, seed=seed))
        row["test"] = _metrics(evaluate(posterior, self.test, foreign=self.foreign, seed=seed))
        bayesify.calibrate(posterior, self.val)
        row["test, calibrated"] = _metrics(evaluate(posterior, self.test, foreign=self.foreign, seed=seed))
        return row

    def started(self, std: float) -> dict[str, Any]:
        """Return the accuracy before the first step: of the prediction, and of its draws on average."""
        posterior = bayesify.convert(pretrained("resnet20"), IBNN(components=8, samples=1, means_std=std))
        images, labels = next(iter(DataLoader(self.val.dataset, 1000)))
        prediction = bayesify.predict(posterior, images, seed=0, keep_samples=True)
        nll = -prediction.log_probs.gather(-1, labels[:, None]).mean()
        of_draws = (prediction.samples.argmax(-1) == labels).double().mean()
        accuracy = (prediction.probs.argmax(-1) == labels).double().mean()
        return {"accuracy": float(accuracy), "accuracy of draws": float(of_draws), "nll": float(nll)}

    def noisy(self, name: str, method: bayesify.Method, kind: str) -> dict[str, Any]:
        """Return the mean uncertainties for each level of noise."""
        posterior, _ = self.fitted(name, method, 0)
        images = load("cifar10", "test").inputs[: min(1000, self.examples or 1000)]
        corrupt = gaussian_noise if kind == "gaussian" else salt_and_pepper
        found: dict[str, list[float]] = {"total": [], "aleatoric": [], "epistemic": []}
        for level in GAUSSIAN if kind == "gaussian" else SALT:
            prediction = bayesify.predict(posterior, cifar_inputs(corrupt(images, level, generator=0)), seed=0)
            for key, values in found.items():
                values.append(float(getattr(prediction, key).mean()))
        return {"levels": GAUSSIAN if kind == "gaussian" else SALT, **found}


def _metrics(found: Evaluation) -> dict[str, float]:
    return {name: round(value, 5) for name, value in found.metrics.items()}


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
    axes[0][0].legend(frameon=False, loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    """Run a part and keep what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("main", "start", "tuning", "noise", "components"), default="main")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", help="names of rows")
    parser.add_argument("--examples", type=int, help="of each set, for a trial whose results are not kept")
    parser.add_argument("--work", type=Path, default=Path("ibnn-cifar-work"), help="folder for checkpoints")
    arguments = parser.parse_args()
    run, kept = Run(arguments.work, arguments.examples), arguments.examples is None
    command = f"python -m experiments.ibnn_cifar --part {arguments.part}"
    ledger = Ledger(f"ibnn_cifar_{arguments.part}", command, kept=kept)
    pictures = RESULTS if kept else arguments.work

    def wanted(names: Any) -> list[str]:
        return [name for name in names if arguments.only is None or name in arguments.only]

    if arguments.part == "start":
        for std in (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.5, 0.75):
            ledger.row(lambda std=std: run.started(std), means_std=std)  # type: ignore[misc]
    elif arguments.part == "tuning":
        for name in wanted(TUNING):
            method = dataclasses.replace(IBNN(epochs=2), **TUNING[name])
            ledger.row(lambda name=name, method=method: run.validated(name, method, 0), name=name)  # type: ignore[misc]
    elif arguments.part == "main":
        for name in wanted(MAIN):
            for seed in arguments.seeds if name != "map" else arguments.seeds[:1]:
                ledger.row(
                    lambda name=name, seed=seed: run.tested(name, MAIN[name], seed), name=name, seed=seed  # type: ignore[misc]
                )  # fmt: skip
    elif arguments.part == "noise":
        rows = [
            ledger.row(lambda name=name, kind=kind: run.noisy(name, MAIN[name], kind), name=name, noise=kind)  # type: ignore[misc]
            for kind in ("gaussian", "salt-and-pepper")
            for name in wanted(("mc-dropout", "ibnn-8"))
        ]
        draw_noise(rows, pictures / "ibnn_cifar_noise.svg")
    else:
        for name in wanted(name for name in MAIN if name.startswith("ibnn")):
            posterior, _ = run.fitted(name, MAIN[name], 0)
            found = look_at_components(posterior, run.val)  # type: ignore[arg-type]
            values = {"accuracy": found.accuracy.tolist(), "disagreement": found.mean_disagreement}
            ledger.row(lambda values=values: values, name=name)  # type: ignore[misc]
            plot_components(found, pictures / f"ibnn_cifar_components_{name}.svg")


if __name__ == "__main__":
    main()
