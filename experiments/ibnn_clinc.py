"""Out-of-scope queries on CLINC150: a sentence encoder with a mixture posterior over the inputs of its layers.

`BAYESIFY_DATA=... python -m experiments.ibnn_clinc --model <folder>` takes the encoder and the plain classifier of
`experiments.abnn_clinc`, makes it Bayesian, and prints accuracy, NLL and ECE on the test queries and how well the
out-of-scope test queries are told from them. Transformers are what the paper names as future work. Rows that are in
`experiments/results/ibnn_clinc.json` are not run again. `--model tiny` runs a small random encoder on characters.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import torch

import bayesify
from bayesify import IBNN, measure
from bayesify.evaluate import evaluate
from experiments.abnn_clinc import Classifier, make_encoder, text_loader
from experiments.ledger import Ledger

_ADAM: dict[str, Any] = {"epochs": 2, "optimiser": "adam", "latent_lr": 1e-3, "slow_lr": 1e-5, "weight_decay": 0.0}
METHODS: dict[str, bayesify.Method] = {
    "map": bayesify.MAP(),
    "mc-dropout": bayesify.MCDropout(p=0.1),
    "ibnn-4": IBNN(**_ADAM),
    "ibnn-8": IBNN(components=8, **_ADAM),
    "ibnn-4, weights frozen": IBNN(weights="frozen", **_ADAM),
    "ibnn-4, last layer and head": IBNN(**_ADAM),
}


def main() -> None:
    """Train the classifier, convert it, evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the encoder, or tiny")
    parser.add_argument("--epochs", type=int, default=3, help="of the plain classifier")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", default=list(METHODS))
    parser.add_argument("--number", type=int, help="of queries in each part, for a trial whose results are not kept")
    parser.add_argument("--work", type=Path, default=Path("ibnn-clinc-work"), help="folder for checkpoints")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    encoder, width, tokenise = make_encoder(arguments.model)
    number = arguments.number
    train = text_loader("train", tokenise, number, shuffle=True)
    val, test, outside = (text_loader(part, tokenise, number) for part in ("val", "test", "oos-test"))
    training = bayesify.MAP(optimiser="adam", lr=3e-4, schedule="cosine")
    plain = bayesify.convert(Classifier(encoder, width, 150), training)
    bayesify.fit(
        plain, train, epochs=arguments.epochs, checkpoint=arguments.work / "plain", progress=False,
        accuracy_tolerance=1.0,
    )  # fmt: skip
    network = plain.network.eval()
    last = [f"encoder.encoder.layer.{network.encoder.config.num_hidden_layers - 1}", "head"]

    def run(name: str, seed: int) -> dict[str, Any]:
        method = METHODS[name]
        if isinstance(method, IBNN):
            method = dataclasses.replace(method, seed=seed)
        posterior = bayesify.convert(network, method, include=last if name.endswith("head") else None)
        folder = arguments.work / f"{name}-{seed}".replace(" ", "-").replace(",", "")
        began = time.perf_counter()
        bayesify.fit(posterior, train, checkpoint=folder, seed=seed, progress=False, accuracy_tolerance=1.0)
        row: dict[str, Any] = {"fit seconds": round(time.perf_counter() - began, 1)}
        row["validation nll"] = evaluate(posterior, val, seed=seed).metrics["nll"]
        for kind in ("test", "test, calibrated"):
            found = evaluate(posterior, test, foreign={"out of scope": outside}, seed=seed)
            scores = found.prediction.score("total"), found.foreign["out of scope"].score("total")
            row[kind] = {**found.metrics, "aupr/out of scope": measure.average_precision(*scores)}
            if kind == "test":
                bayesify.calibrate(posterior, val)
        return row

    command = "python -m experiments.ibnn_clinc --model <folder>"
    ledger = Ledger("ibnn_clinc", command, kept=number is None and arguments.model != "tiny")
    for name in arguments.only:
        for seed in arguments.seeds if name != "map" else arguments.seeds[:1]:
            ledger.row(lambda name=name, seed=seed: run(name, seed), name=name, seed=seed)  # type: ignore[misc]


if __name__ == "__main__":
    main()
