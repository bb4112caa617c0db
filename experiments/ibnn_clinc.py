"""Out-of-scope queries on CLINC150: a sentence encoder with a mixture posterior over the inputs of its layers.

`BAYESIFY_DATA=... python -m experiments.ibnn_clinc --model <folder>` trains all-MiniLM-L6-v2 (`experiments/clinc.py`)
with a linear head, makes it Bayesian, and prints accuracy, NLL and ECE on the test queries and how well out-of-scope
test queries are told from them. Transformers are what the paper names as future work. `--part tuning` compares settings
on the validation queries alone. Rows go to `experiments/results/ibnn_clinc_*.json`; a run that was stopped goes on.
`--model tiny` keeps nothing.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

from torch import nn

import bayesify
from bayesify import IBNN
from experiments.clinc import Parts, encoder_layers, main
from experiments.scoring import scored

OURS = IBNN(draws_per_component=2, epochs=2, optimizer="adam", latent_lr=1e-3, slow_lr=1e-5, weight_decay=0.0)
TUNING: dict[str, bayesify.Method] = {
    ", ".join(f"{key}={value}" for key, value in changes.items()): dataclasses.replace(OURS, **changes)
    for changes in ({"means_std": 0.1}, {"means_std": 0.2}, {"latent_lr": 4e-3}, {"slow_lr": 1e-4})
}
METHODS: dict[str, bayesify.Method] = {
    "map": bayesify.MAP(),
    "mc-dropout": bayesify.MCDropout(p=0.1),
    "ibnn-4": OURS,
    "ibnn-8": dataclasses.replace(OURS, components=8),
    "ibnn-4, weights frozen": dataclasses.replace(OURS, weights="frozen"),
    "ibnn-4, last layer and head": OURS,
}


def measured(
    network: nn.Module, data: Parts, name: str, method: bayesify.Method, *, seed: int, work: Path, tuning: bool
) -> dict[str, Any]:
    """Convert, fit and measure; tuning sees the validation queries alone."""
    last = [f"encoder.encoder.layer.{encoder_layers(network) - 1}", "head"]
    posterior = bayesify.convert(network, method, include=last if name.endswith("head") else None)
    folder = work / "".join(c if c.isalnum() else "-" for c in f"{name}-{seed}")
    began = time.perf_counter()
    bayesify.fit(posterior, data.train, checkpoint=folder, seed=seed, progress=False, accuracy_tolerance=1.0)
    row: dict[str, Any] = {"seed": seed, "fit seconds": round(time.perf_counter() - began, 1)}
    if tuning:
        return {**row, **scored(posterior, data.val, None, seed=seed)}
    return {**row, **scored(posterior, data.val, data.test, {"out of scope": data.outside}, seed=seed)}


if __name__ == "__main__":
    main("ibnn_clinc", __doc__, METHODS, TUNING, measured, repeated=lambda label: label == "ibnn-4")
