"""Out-of-scope queries on CLINC150: a sentence encoder with Gaussian weights, without and with supervision.

`BAYESIFY_DATA=... python -m experiments.adapter_clinc --model <folder>` trains all-MiniLM-L6-v2 with a linear head
(`experiments/clinc.py`), fine-tunes Gaussian weights, and prints accuracy, NLL and ECE on the test queries and how well
out-of-scope test queries are told from them. The supervised rows ask for uncertainty on the 100 out-of-scope training
queries. `--part tuning` compares settings on validation queries alone, in and out of scope. Rows go to
`experiments/results/adapter_clinc_*.json`; a run that was stopped goes on. `--model tiny` keeps nothing.
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
from bayesify import BayesAdapter, UncertaintyRegulariser
from experiments.clinc import Parts, classifier, encoder_layers
from experiments.rows import Rows
from experiments.scoring import scored

RESULTS = Path(__file__).parent / "results"

# Adam with rates of its own: SGD's of the paper are for convolutions with batch normalisation.
OURS = BayesAdapter(
    epochs=2, optimiser="adam", lr=1e-4, log_std_lr=0.02, start_std=(0.005, 0.01), schedule="cosine",
    log_std_schedule="cosine",
)  # fmt: skip
TUNING: dict[str, bayesify.Method] = {
    f"start_std={std}{kind}": dataclasses.replace(OURS, start_std=(std, 2 * std))
    for kind in ("", ", supervised")
    for std in (0.005, 0.01, 0.02)
}
METHODS: dict[str, bayesify.Method] = {
    "map": bayesify.MAP(),
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
    supervised = {"ood_loader": data.foreign, "regulariser": UncertaintyRegulariser()} if "supervised" in name else {}
    began = time.perf_counter()
    bayesify.fit(
        posterior, data.train, checkpoint=folder, seed=seed, progress=False, accuracy_tolerance=1.0, **supervised
    )
    row: dict[str, Any] = {"seed": seed, "fit seconds": round(time.perf_counter() - began, 1)}
    draws = 10 if isinstance(method, BayesAdapter) else None
    if tuning:
        # "test" here are the validation queries again, beside out-of-scope validation queries.
        shown = scored(posterior, data.val, data.val, {"out of scope": data.outside_val}, num_samples=draws, seed=seed)
        return {**row, **{key.replace("test", "validation"): value for key, value in shown.items()}}
    return {
        **row,
        **scored(posterior, data.val, data.test, {"out of scope": data.outside}, num_samples=draws, seed=seed),
    }


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
    path = None if arguments.model == "tiny" else RESULTS / f"adapter_clinc_{arguments.part}.json"
    rows = Rows(
        path, f"python -m experiments.adapter_clinc --model <folder> --part {arguments.part} --each {arguments.each}"
    )
    tuning = arguments.part == "tuning"
    for name, method in (TUNING if tuning else METHODS).items():
        for seed in arguments.seeds if isinstance(method, BayesAdapter) and not tuning else [0]:
            if arguments.only is None or name in arguments.only:
                seeded = dataclasses.replace(method, seed=seed) if isinstance(method, BayesAdapter) else method
                make = partial(measured, network, data, name, seeded, seed=seed, work=arguments.work, tuning=tuning)
                rows.row(f"{name}, seed {seed}", make)


if __name__ == "__main__":
    main()
