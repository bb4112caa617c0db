"""Accuracy and anomaly detection on MNIST (APD, sections 5.2.2 and 5.2.3, Tables 1 and 2).

`BAYESIFY_DATA=... python -m experiments.apd_mnist` trains fcNN1 with SGD, MC dropout and SGLD, distils SGLD's samples,
and prints accuracy, and AUROC, AUPR+ and AUPR- of entropy, BALD, variation ratio and maximum probability (which is what
the paper's "VR" rows are) against five foreign sets, multiplied by `--scale`. About half an hour on two cores.
`--quick` takes minutes off everything, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import bayesify
from bayesify import measure
from experiments.mnist import NETWORKS, foreign, loader, posteriors

RESULTS = Path(__file__).parent / "results"
SCORES = {"entropy": "total", "BALD": "epistemic", "VR": "variation_ratio", "max": "max_probability"}
PAPER = {
    "accuracy": {"fcNN1": {"SGD": 0.981, "MC dropout": 0.973, "SGLD": 0.979, "APD": 0.978}},
    "AUROC, fcNN1, notMNIST, x5": {"entropy": {"SGLD": 92.3, "APD": 92.2}, "BALD": {"SGLD": 97.8, "APD": 97.6}},
}


def main() -> None:
    """Run, print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=list(NETWORKS), default="fcNN1")
    parser.add_argument("--scale", type=float, nargs="*", default=[1.0, 5.0])
    parser.add_argument("--epochs", type=int, default=200, help="of SGLD")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--weight-decay", type=float, default=1e-3)
    parser.add_argument("--chains", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    quick = arguments.quick
    train = loader("train", number=2000 if quick else None)
    test = loader("test", number=500 if quick else None, batch=1000)
    inside = test.dataset.tensors[0][:2000]
    sgld = bayesify.SGLD(
        epochs=2 if quick else arguments.epochs, lr=arguments.lr, weight_decay=0.0 if quick else arguments.weight_decay,
        chains=arguments.chains, start="reset", num_samples=10 if quick else 2000 // arguments.chains,
    )  # fmt: skip
    made = posteriors(
        NETWORKS[arguments.network], train, loader("val", number=500 if quick else None, batch=1000),
        epochs=1 if quick else 40, sgld=sgld, steps=10 if quick else 5000,
        held_out=loader("val", number=500).dataset.tensors[0], num_samples=10 if quick else 2000,
    )  # fmt: skip
    outside = foreign(200 if quick else 2000)
    draws = 10 if quick else 200
    record: dict[str, object] = {"paper": PAPER, "settings": vars(arguments), "rows": []}
    rows: list[dict[str, object]] = []
    for name, posterior in made.items():
        whole = bayesify.predict(posterior, test, num_samples=draws, seed=0)
        accuracy = measure.accuracy(whole.probs, test.dataset.tensors[1])
        known = bayesify.predict(posterior, inside, num_samples=draws, seed=0)
        for scale in arguments.scale:
            for kind, images in outside.items():
                found = bayesify.predict(posterior, scale * images, num_samples=draws, seed=0)
                row = {"posterior": name, "accuracy": accuracy, "scale": scale, "foreign": kind}
                for label, score in SCORES.items():
                    pair = known.score(score), found.score(score)
                    row[label] = [
                        round(100 * value, 1)
                        for value in (
                            measure.auroc(*pair),
                            measure.aupr(*pair),
                            measure.aupr(*pair, positive="id"),
                        )
                    ]
                rows.append(row)
                print(row, flush=True)
    record["rows"] = rows
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"apd_mnist_{arguments.network}.json").write_text(json.dumps(record, indent=1))
    try:
        with torch.no_grad():
            print(bayesify.diagnose(made["SGLD"], inside[:20]))
    except (ImportError, ValueError) as reason:
        print(reason)


if __name__ == "__main__":
    main()
