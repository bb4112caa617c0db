"""Out-of-scope queries on CLINC150: a sentence encoder made Bayesian through its LayerNorms.

`BAYESIFY_DATA=... python -m experiments.abnn_clinc --model <folder>` trains all-MiniLM-L6-v2 (`experiments/clinc.py`)
with a linear head, makes it Bayesian, and prints accuracy, NLL and ECE on the test queries and how well out-of-scope
test queries are told from them. `--part tuning` compares settings on the validation queries alone. Rows go to
`experiments/results/abnn_clinc_*.json`; a run that was stopped goes on. `--model tiny` keeps nothing.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

from torch import nn

import bayesify
from bayesify import ABNN
from experiments.clinc import Parts, encoder_layers, main
from experiments.scoring import scored

DRAWS = 9

OURS = ABNN(epochs=1, optimizer="adam", lr=1e-3, weight_decay=0.0)
TUNING: dict[str, bayesify.Method] = {
    f"alpha={alpha}, lr={lr}": dataclasses.replace(OURS, alpha=alpha, lr=lr)
    for alpha, lr in ((0.1, 1e-3), (0.05, 1e-3), (0.02, 1e-3))
}
METHODS: dict[str, bayesify.Method] = {
    "map": bayesify.MAP(),
    "abnn": OURS,
    "abnn, not fitted": dataclasses.replace(OURS, epochs=0),
    "abnn, last layer": OURS,
    "mc-dropout": bayesify.MCDropout(p=0.1),
    "abnn, eta=0": dataclasses.replace(OURS, eta=0.0),
}


def measured(
    network: nn.Module, data: Parts, name: str, method: bayesify.Method, *, seed: int, work: Path, tuning: bool
) -> dict[str, Any]:
    """Convert, fit and measure; tuning sees the validation queries alone."""
    include = f"encoder.encoder.layer.{encoder_layers(network) - 1}" if name.endswith("last layer") else None
    posterior = bayesify.convert(network, method, include=include)
    folder = work / "".join(c if c.isalnum() else "-" for c in f"{name}-{seed}")
    began = time.perf_counter()
    bayesify.fit(posterior, data.train, checkpoint=folder, seed=seed, progress=False, accuracy_tolerance=1.0)
    row: dict[str, Any] = {"seed": seed, "fit seconds": round(time.perf_counter() - began, 1)}
    ood = {"out of scope": data.outside}
    if tuning:
        return {**row, **scored(posterior, data.val, None, num_draws=DRAWS, seed=seed)}
    return {**row, **scored(posterior, data.val, data.test, ood, num_draws=DRAWS, seed=seed)}


if __name__ == "__main__":
    main("abnn_clinc", __doc__, METHODS, TUNING, measured, repeated=lambda label: label == "abnn")
