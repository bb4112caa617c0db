"""Distillation of banks that are no chain's: an ABNN posterior and a deep ensemble, on scikit-learn's digits.

`BAYESIFY_DATA=... python -m experiments.apd_sources` fits ABNN (of a network with normalisation layers), a deep
ensemble of 20 and SWAG, distils a bank of each into a generator and into the baselines, and prints the quality of
each beside its source's, the agreement of both, and how many networks they cost. Minutes; `--trial` seconds. Rows go
to `experiments/results/apd_sources.json`.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import bayesify
from bayesify import measure
from bayesify.methods.distillation import agreement
from experiments.apd_common import BOUNDS, Data, arguments_of, kept, mlp, rows_of
from experiments.apd_digits import digits
from experiments.protocols import anomaly_table


def normalised() -> nn.Sequential:
    """Return a network with layer normalisation."""
    return nn.Sequential(nn.Linear(64, 100), nn.LayerNorm(100), nn.ReLU(), nn.Linear(100, 10))


def sources(data: Data, arguments: argparse.Namespace) -> dict[str, bayesify.Posterior]:
    """Return the fitted posteriors that are distilled."""
    trial, work = arguments.trial, arguments.work
    epochs = 2 if trial else 60
    torch.manual_seed(0)
    plain = bayesify.MAP(epochs=epochs, lr=0.05, weight_decay=1e-3)
    trained = kept(normalised(), plain, data, work and work / "plain", batch=50).network
    ensemble = bayesify.DeepEnsemble(members=4 if trial else 20, epochs=epochs, lr=0.05, weight_decay=1e-3)
    return {
        "ABNN": kept(trained, bayesify.ABNN(alpha=0.3, epochs=epochs // 2), data, work and work / "abnn", batch=50),
        "deep ensemble": kept(mlp(64, 100, 10), ensemble, data, work and work / "ensemble", batch=50),
        "SWAG": kept(
            mlp(64, 100, 10), bayesify.SWAG(epochs=epochs, lr=0.05, snapshots_per_epoch=2), data,
            work and work / "swag", batch=50,
        ),
    }  # fmt: skip


def row(posterior: bayesify.Posterior, source: bayesify.Posterior, data: Data, draws: int) -> dict[str, Any]:
    """Return quality, anomaly detection, and agreement with the source."""
    prediction = bayesify.predict(posterior, data.test[0], num_draws=draws, seed=0)
    table = anomaly_table(posterior, data.test[0], data.ood, bounds=BOUNDS, num_draws=draws)
    near = agreement(posterior, bayesify.predict(source, data.test[0], seed=1), data.test[0], num_draws=draws)
    return {
        "accuracy": round(measure.accuracy(prediction.probs, data.test[1]), 4),
        "nll": round(measure.nll(prediction.probs, data.test[1]), 4),
        "AUROC by BALD": {name: round(100 * scores["BALD"].auroc, 1) for name, scores in table.items()},
        "KL from the source": round(near.divergence, 5),
        "error of BALD": round(near.epistemic_error, 5),
    }


def main() -> None:
    """Make the rows."""
    arguments = arguments_of(__doc__, "apd_sources")
    trial = arguments.trial
    data = digits(trial=trial)
    rows = rows_of("apd_sources", arguments)
    draws = 10 if trial else 100
    for name, source in sources(data, arguments).items():
        rows.row(f"{name}, source", lambda source=source: row(source, source, data, draws))
        bank = bayesify.sample_bank(source, 10 if trial else 300)
        ways: dict[str, dict[str, Any]] = {
            "wgan-gp": {"inputs": data.val[0][:200], "steps": 10 if trial else 3000, "hidden": (20, 20, 20)},
            "pca": {"latent": min(20, len(bank.law) - 1), "residual": True},
            "mixture": {"components": min(10, len(bank.law))},
        }
        for how, options in ways.items():
            rows.row(
                f"{name}, {how}",
                lambda bank=bank, how=how, options=options, source=source: row(
                    bayesify.distill(bank, how, progress=False, **options), source, data, draws
                ),
            )


if __name__ == "__main__":
    main()
