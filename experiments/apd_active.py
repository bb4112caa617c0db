"""Active learning on MNIST from 20 labels, ten more in each round (APD, section 5.3, Figure 4).

`BAYESIFY_DATA=... python -m experiments.apd_active` learns with SGLD at temperature 1, with SGLD at the temperature
1/1000 that the paper's code uses and its text does not mention, with APD, and with a plain network; chooses by
entropy, BALD, variation ratio, model variance, BatchBALD or at random; and keeps a learning curve for each of five
seeds in `experiments/results/apd_active.json`, with a picture. The public code never trains its generator and its "MC
dropout" is a plain softmax, so there are no numbers of the paper's to stand beside these. Hours on two cores;
`--trial` seconds.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import measure
from bayesify.decide import active_learning
from experiments.apd_common import RESULTS, Data, arguments_of, mlp, mnist, rows_of


def learners(*, trial: bool) -> dict[str, bayesify.Method]:
    """Return what learns from the labelled examples, all of them in each step, anew in each round."""
    steps = 30 if trial else 3000
    chain: dict[str, Any] = {
        # The paper's lr .05 and weight decay .05; half of the run is burn-in, 1,500 steps of a relaxation time of 800.
        "epochs": steps, "lr": 0.05, "weight_decay": 0.0 if trial else 0.05, "num_samples": 10 if trial else 50,
        "start": "reset",
    }  # fmt: skip
    return {
        "SGLD": bayesify.SGLD(**chain),
        "SGLD at temperature 1/1000": bayesify.SGLD(temperature=1e-3, **chain),
        "APD": bayesify.APD(latent=100, steps=5 if trial else 1000, batch=32, chains=4, **chain),
        "plain network": bayesify.MAP(epochs=steps, lr=0.05, weight_decay=0.05),
    }


RUNS = (
    ("SGLD", "bald"), ("SGLD", "entropy"), ("SGLD", "variation-ratio"), ("SGLD", "model-variance"),
    ("SGLD", "batch-bald"), ("SGLD", "random"), ("SGLD at temperature 1/1000", "entropy"), ("APD", "bald"),
    ("plain network", "entropy"), ("plain network", "random"),
)  # fmt: skip


def curve(data: Data, method: bayesify.Method, how: str, seed: int, rounds: int, pool: int) -> dict[str, Any]:
    """Return the test accuracy and NLL by the number of labels."""
    x, y = data.train
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    start = [int(i) for digit in range(10) for i in order[y[order] == digit][:2]]

    def learn(labelled: list[int], before: bayesify.Posterior | None) -> bayesify.Posterior:
        del before  # every round begins anew
        torch.manual_seed(seed)
        posterior = bayesify.convert(mlp(784, 100, 10), method)
        batches = DataLoader(TensorDataset(x[labelled], y[labelled]), len(labelled))
        bayesify.fit(posterior, batches, seed=seed, progress=False, accuracy_tolerance=1)
        return posterior

    def predict(posterior: bayesify.Posterior, indices: list[int]) -> bayesify.Prediction:
        return bayesify.predict(posterior, x[indices], num_samples=50, seed=seed, keep_samples=how == "batch-bald")

    def result(posterior: bayesify.Posterior) -> dict[str, float]:
        prediction = bayesify.predict(posterior, data.test[0], num_samples=50, seed=seed)
        return {
            "accuracy": round(measure.accuracy(prediction.probs, data.test[1]), 4),
            "nll": round(measure.nll(prediction.probs, data.test[1]), 4),
        }

    history = active_learning(
        learn, predict, result, start=start, pool=order[:pool].tolist(), num=10, rounds=rounds, how=how, seed=seed
    )
    return {
        "labels": [len(found.labelled) for found in history],
        **{name: [found.results[name] for found in history] for name in ("accuracy", "nll")},
    }


def draw(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw the mean learning curves."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.5))
    for name, curves in found.items():
        accuracy = torch.tensor([one["accuracy"] for one in curves])
        line = axis.plot(curves[0]["labels"], accuracy.mean(0), label=name)[0]
        if len(curves) > 1:
            low, high = accuracy.mean(0) - accuracy.std(0), accuracy.mean(0) + accuracy.std(0)
            axis.fill_between(curves[0]["labels"], low, high, alpha=0.15, color=line.get_color())
    axis.set(xlabel="labels", ylabel="test accuracy")
    axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
    print(path)


def main() -> None:
    """Make the learning curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--rounds", type=int, default=51)
    parser.add_argument("--pool", type=int, default=10_000)
    parser.add_argument("--only", nargs="*", help="names of learners")
    arguments = arguments_of(parser, "apd_active")
    if arguments.trial:
        arguments.seeds, arguments.rounds, arguments.pool = [0], 2, 100
    data = mnist(trial=arguments.trial)
    rows = rows_of("apd_active", arguments)
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in arguments.seeds:
        for name, how in RUNS:
            if arguments.only and name not in arguments.only:
                continue
            make = partial(
                curve, data, learners(trial=arguments.trial)[name], how, seed, arguments.rounds, arguments.pool
            )
            found.setdefault(f"{name}, {how}", []).append(rows.row(f"{name}, {how}, seed {seed}", make))
    draw(found, (Path(tempfile.mkdtemp()) if arguments.trial else RESULTS) / "apd_active.svg")


if __name__ == "__main__":
    main()
