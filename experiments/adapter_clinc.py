"""Out-of-scope queries on CLINC150: a sentence encoder with Gaussian weights, without and with supervision.

`BAYESIFY_DATA=... python -m experiments.adapter_clinc --model <folder>` trains all-MiniLM-L6-v2 with a linear head
(`experiments/clinc.py`), fine-tunes Gaussian weights, and prints accuracy, NLL and ECE on the test queries and how well
out-of-scope test queries are told from them. The supervised rows ask for uncertainty on the 100 out-of-scope training
queries. `--part tuning` compares settings on validation queries alone, in and out of scope. Rows go to
`experiments/results/adapter_clinc_*.json`; a run that was stopped goes on. `--model tiny` keeps nothing.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

from torch import nn

import bayesify
from bayesify import BayesAdapter, OODRegularizer
from experiments.clinc import Parts, encoder_layers, main
from experiments.scoring import scored

# Adam with rates of its own: SGD's of the paper are for convolutions with batch normalisation.
OURS = BayesAdapter(
    epochs=2, optimizer="adam", lr=1e-4, log_std_lr=0.002, start_std=(0.005, 0.01), schedule="cosine",
    log_std_schedule="cosine",
)  # fmt: skip
TUNING: dict[str, bayesify.Method] = {
    f"start_std={std}, log_std_lr={rate}": dataclasses.replace(OURS, start_std=(std, 2 * std), log_std_lr=rate)
    for std, rate in ((0.002, 0.002), (0.005, 0.002), (0.005, 0.02))
}
METHODS: dict[str, bayesify.Method] = {
    "map": bayesify.MAP(),
    "map, trained on": bayesify.MAP(epochs=2, optimizer="adam", lr=1e-4, weight_decay=0.0, schedule="cosine"),
    "bayes-adapter": OURS,
    "bayes-adapter, supervised": OURS,
    "bayes-adapter, last layer, supervised": OURS,
}


def measured(
    network: nn.Module, data: Parts, name: str, method: bayesify.Method, *, seed: int, work: Path, tuning: bool
) -> dict[str, Any]:
    """Convert, fit and measure; tuning sees validation queries alone."""
    last = [f"encoder.encoder.layer.{encoder_layers(network) - 1}", "head"]
    posterior = bayesify.convert(network, method, include=last if "last layer" in name else None)
    folder = work / "".join(c if c.isalnum() else "-" for c in f"adapter-{name}-{seed}")
    supervised = {"ood_loader": data.ood, "regularizer": OODRegularizer()} if "supervised" in name else {}
    began = time.perf_counter()
    bayesify.fit(
        posterior, data.train, checkpoint=folder, seed=seed, progress=False, accuracy_tolerance=1.0, **supervised
    )
    row: dict[str, Any] = {"seed": seed, "fit seconds": round(time.perf_counter() - began, 1)}
    draws = 10 if isinstance(method, BayesAdapter) else None
    if tuning:
        # "test" here are the validation queries again, beside out-of-scope validation queries.
        shown = scored(posterior, data.val, data.val, {"out of scope": data.outside_val}, num_draws=draws, seed=seed)
        return {**row, **{key.replace("test", "validation"): value for key, value in shown.items()}}
    return {
        **row,
        **scored(posterior, data.val, data.test, {"out of scope": data.outside}, num_draws=draws, seed=seed),
    }


if __name__ == "__main__":
    main("adapter_clinc", __doc__, METHODS, TUNING, measured, repeated=lambda label: label.startswith("bayes-adapter"))
