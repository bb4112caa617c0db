"""The whole path on scikit-learn's digits, with small notMNIST as OOD inputs (APD, Figure 8): minutes, not hours.

`BAYESIFY_DATA=... python -m experiments.apd_digits` fits SGD, MC dropout and SGLD to 64-100-10, distils SGLD's
samples, and prints accuracy, NLL and AUROC, inputs multiplied by 1 and by 5, with the number of networks that each
costs; the number of samples is the figure's. Without notMNIST's files OOD inputs are patches of photographs and
noise. Rows go to `experiments/results/apd_digits.json`, a picture beside them. `--trial` takes seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bayesify
from bayesify import measure
from bayesify.data import photo_patches, uniform_like
from experiments.apd_common import BOUNDS, NETWORKS, Data, arguments_of, draw_curves, flat, kept, mlp, rows_of
from experiments.data import load
from experiments.protocols import anomaly_table

SIZES = NETWORKS["digits"]


def digits(*, trial: bool) -> Data:
    """Return the digits, and OOD inputs of their size."""
    most = 200 if trial else None
    parts = {}
    for name in ("train", "val", "test"):
        split = load("digits", name)
        parts[name] = (flat(split.inputs[:most], 8), split.targets[:most])
    ood = {"photos": flat(photo_patches(360, seed=0), 8)}
    try:
        ood["notMNIST"] = flat(load("notmnist", "test").inputs[:360], 8)
    except (OSError, ValueError) as reason:
        print(f"Without notMNIST: {reason}")
    ood["uniform"] = uniform_like(ood["photos"], generator=0)
    return Data(parts["train"], parts["val"], parts["test"], ood)


def posteriors(data: Data, work: Path | None, *, trial: bool, epochs: int = 400) -> dict[str, bayesify.Posterior]:
    """Return the four of the paper and the baselines of the distillation."""
    settings: dict[str, Any] = {"epochs": 2 if trial else 100, "lr": 0.005, "weight_decay": 1e-3}
    chain: dict[str, Any] = {
        # A prior of N(0, .02), the paper's on MNIST, whose relaxation time 2 n prior_std^2 / lr is 860 steps here.
        "epochs": 20 if trial else epochs, "lr": 0.05, "prior_std": 0.02**0.5, "start": "reset",
        "samples_per_chain": 20 if trial else 1000,
    }  # fmt: skip
    game: dict[str, Any] = {"inputs": data.val[0][:200], "steps": 20 if trial else 4000, "progress": False}
    made = {}
    for name, network, method, best in (
        ("SGD", mlp(*SIZES), bayesify.MAP(**settings), True),
        ("MC dropout", mlp(*SIZES, dropout=0.5), bayesify.MCDropout(**settings), True),
        ("SGLD", mlp(*SIZES), bayesify.SGLD(**chain), False),
    ):
        made[name] = kept(network, method, data, None if work is None else work / name, batch=50, best=best)
    bank = made["SGLD"]
    made["APD"] = bayesify.distill(bank, **game)
    made["APD, hidden 20"] = bayesify.distill(bank, hidden=(20, 20, 20), **game)
    made["APD and residual noise"] = bayesify.distill(bank, residual=True, **game)
    made["PCA and residual noise"] = bayesify.distill(bank, "pca", latent=20, residual=True, progress=False)
    made["mixture of 10"] = bayesify.distill(bank, "mixture", components=10, progress=False)
    made["SWAG of the bank"] = bayesify.distill(bank, "swag", latent=20, progress=False)
    return made


def row(posterior: bayesify.Posterior, data: Data, draws: int) -> dict[str, Any]:
    """Return quality and anomaly detection of a posterior."""
    prediction = bayesify.predict(posterior, data.test[0], num_draws=draws, seed=0)
    found: dict[str, Any] = {
        "accuracy": round(measure.accuracy(prediction.probs, data.test[1]), 4),
        "nll": round(measure.nll(prediction.probs, data.test[1]), 4),
    }
    for factor in (1.0, 5.0):
        table = anomaly_table(posterior, data.test[0], data.ood, factor=factor, bounds=BOUNDS, num_draws=draws, seed=0)
        for name, scores in table.items():
            found[f"AUROC, {name}, times {factor:g}"] = {
                score: round(100 * scores[score].auroc, 1) for score in ("entropy", "BALD", "max probability")
            }
    return found


def main() -> None:
    """Make the rows, and the picture."""
    arguments = arguments_of(__doc__, "apd_digits")
    data = digits(trial=arguments.trial)
    made = posteriors(data, arguments.work, trial=arguments.trial)
    rows = rows_of("apd_digits", arguments)
    draws = 10 if arguments.trial else 200
    for name, posterior in made.items():
        rows.row(name, lambda posterior=posterior: row(posterior, data, draws))
    ood = "notMNIST" if "notMNIST" in data.ood else "photos"
    compared = ("SGLD", "APD, hidden 20")
    curves: dict[str, dict[float, float]] = {name: {} for name in compared}
    for number in (4, 8) if arguments.trial else (5, 10, 20, 50, 100, 200, 500):
        found = rows.row(
            f"{number} samples",
            lambda n=number: {name: row(made[name], data, n)[f"AUROC, {ood}, times 5"]["BALD"] for name in compared},
        )
        for name in compared:
            curves[name][number] = found[name]
    draw_curves(curves, "apd_digits", arguments, x="samples", y="AUROC by BALD, inputs times 5, %")


if __name__ == "__main__":
    main()
