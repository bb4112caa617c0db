"""Active learning on MNIST from 20 labels, ten more in each round (APD, section 5.3).

`BAYESIFY_DATA=... python -m experiments.apd_active` runs entropy, BALD and random acquisition with SGLD, at temperature
1 and at the 1/1000 that the paper's code uses and its text does not mention, and entropy with the plain network, five
seeds each, and writes learning curves to `experiments/results/apd_active.json` and `.svg`. Hours on two cores;
`--quick` seconds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import measure
from bayesify.data import load
from bayesify.decide import active_learning
from experiments.mnist import flat, mlp

RESULTS = Path(__file__).parent / "results"


def curves(method: bayesify.Method, how: str, seed: int, *, rounds: int, pool: int) -> list[dict[str, float]]:
    """Return the accuracy after each round; every round learns anew."""
    train, test = load("mnist", "train"), load("mnist", "test")
    x, y = flat(train.inputs), train.targets
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    start = [int(i) for digit in range(10) for i in order[y[order] == digit][:2]]
    held = flat(test.inputs[:2000]), test.targets[:2000]

    def learn(labelled: list[int]) -> bayesify.Posterior:
        torch.manual_seed(seed)
        posterior = bayesify.convert(mlp(784, 100, 10), method)
        data = DataLoader(TensorDataset(x[labelled], y[labelled]), len(labelled))
        bayesify.fit(posterior, data, seed=seed, progress=False, accuracy_tolerance=1)
        return posterior

    def predict(posterior: bayesify.Posterior, indices: list[int]) -> bayesify.Prediction:
        return bayesify.predict(posterior, x[indices], num_samples=50, seed=seed)

    def result(posterior: bayesify.Posterior) -> dict[str, float]:
        prediction = bayesify.predict(posterior, held[0], num_samples=50, seed=seed)
        return {"accuracy": measure.accuracy(prediction.probs, held[1])}

    history = active_learning(
        learn, predict, result, start=start, pool=order[:pool].tolist(), num=10, rounds=rounds, how=how, seed=seed
    )
    return [{"labels": len(found.labelled), **found.results} for found in history]


def main() -> None:
    """Run all, print, and keep the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=51)
    arguments = parser.parse_args()
    quick = arguments.quick
    steps = 20 if quick else 3000
    sgld = {"epochs": steps, "lr": 0.05, "weight_decay": 0.05, "num_samples": 10 if quick else 50, "start": "reset"}
    runs = {
        "SGLD, BALD": (bayesify.SGLD(**sgld), "bald"),
        "SGLD, entropy": (bayesify.SGLD(**sgld), "entropy"),
        "SGLD at temperature 1/1000, entropy": (bayesify.SGLD(temperature=1e-3, **sgld), "entropy"),
        "SGLD, random": (bayesify.SGLD(**sgld), "random"),
        "plain network, entropy": (bayesify.MAP(epochs=steps, lr=0.05, weight_decay=0.05), "entropy"),
    }
    found: dict[str, list[list[dict[str, float]]]] = {}
    for name, (method, how) in runs.items():
        found[name] = [
            curves(method, how, seed, rounds=2 if quick else arguments.rounds, pool=200 if quick else 10_000)
            for seed in range(1 if quick else arguments.seeds)
        ]
        ends = [curve[-1]["accuracy"] for curve in found[name]]
        print(f"{name}: {found[name][0][-1]['labels']} labels, accuracy {sum(ends) / len(ends):.3f}", flush=True)
    if quick:
        return
    import matplotlib.pyplot as plt

    for name, repeats in found.items():
        accuracy = torch.tensor([[point["accuracy"] for point in curve] for curve in repeats])
        plt.plot([point["labels"] for point in repeats[0]], accuracy.mean(0), label=name)
    plt.xlabel("labels")
    plt.ylabel("accuracy")
    plt.legend()
    RESULTS.mkdir(exist_ok=True)
    plt.savefig(RESULTS / "apd_active.svg")
    (RESULTS / "apd_active.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
