"""Out-of-scope queries on CLINC150: a sentence encoder made Bayesian through its LayerNorms.

`BAYESIFY_DATA=... python -m experiments.abnn_clinc --model <folder>` trains all-MiniLM-L6-v2 (`experiments/clinc.py`)
with a linear head, makes it Bayesian, and prints accuracy, NLL and ECE on the test queries and how well out-of-scope
test queries are told from them. `--part tuning` compares settings on the validation queries alone. Rows go to
`experiments/results/abnn_clinc_*.json`; a run that was stopped goes on. `--model tiny` keeps nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

import bayesify
from bayesify import ABNN
from experiments.clinc import Parts, classifier, encoder_layers
from experiments.rows import Rows
from experiments.scoring import scored

RESULTS = Path(__file__).parent / "results"
DRAWS = 9

OURS = ABNN(epochs=1, optimiser="adam", lr=1e-3, weight_decay=0.0)
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
    foreign = {"out of scope": data.outside}
    if tuning:
        return {**row, **scored(posterior, data.val, None, num_samples=DRAWS, seed=seed)}
    return {**row, **scored(posterior, data.val, data.test, foreign, num_samples=DRAWS, seed=seed)}


def main() -> None:
    """Train the classifier and make the rows of a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the encoder, or tiny")
    parser.add_argument("--part", choices=("main", "tuning"), default="main")
    parser.add_argument("--each", type=int, default=20, help="training queries of every intent")
    parser.add_argument("--every", type=int, default=5, help="take every so many-th validation and test query")
    parser.add_argument("--epochs", type=int, default=5, help="of the plain classifier")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", help="names of rows")
    parser.add_argument("--work", type=Path, default=Path("clinc-work"), help="folder for checkpoints")
    arguments = parser.parse_args()
    network, data = classifier(
        arguments.model, each=arguments.each, every=arguments.every, epochs=arguments.epochs, work=arguments.work
    )
    path = None if arguments.model == "tiny" else RESULTS / f"abnn_clinc_{arguments.part}.json"
    rows = Rows(
        path, f"python -m experiments.abnn_clinc --model <folder> --part {arguments.part} --each {arguments.each}"
    )
    tuning = arguments.part == "tuning"
    for name, method in (TUNING if tuning else METHODS).items():
        for seed in arguments.seeds if name == "abnn" else [0]:
            if arguments.only is None or name in arguments.only:
                seeded = dataclasses.replace(method, seed=seed) if hasattr(method, "seed") else method
                make = partial(measured, network, data, name, seeded, seed=seed, work=arguments.work, tuning=tuning)
                rows.row(f"{name}, seed {seed}", make)


if __name__ == "__main__":
    main()
