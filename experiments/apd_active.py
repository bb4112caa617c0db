"""Active learning on MNIST from 20 labels, ten more in each round (APD, section 5.3, Figure 4).

`BAYESIFY_DATA=... python -m experiments.apd_active` learns with SGLD at temperature 1, with SGLD at the temperature
1/1000 that the paper's code uses and its text does not mention, with APD, and with a plain network; chooses by
entropy, BALD, variation ratio, model variance, BatchBALD or at random; and keeps a learning curve for each seed in
`experiments/results/apd_active.json`, with a picture. The comparisons with random choice and with the plain network
have five seeds, other variants the first of them. The public code never trains its generator and its "MC dropout"
is a plain softmax, so there are no numbers of the paper's to stand beside these. `--trial` takes seconds.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import bayesify
from bayesify import measure
from bayesify.decide import active_learning
from experiments.apd_common import Data, arguments_of, draw_curves, mlp, mnist, rows_of

AT_ONCE = 100  # steps in what `fit` calls an epoch, all on the same batch
COLD = "SGLD at temperature 1/1000"


def learners(steps: int, game: int) -> dict[str, bayesify.Method]:
    """Return what learns from the labelled examples, all of them in each step, anew in each round."""
    chain: dict[str, Any] = {"epochs": steps // AT_ONCE, "samples_per_chain": 50, "start": "reset"}
    # One prior whatever the number of labels, the best of .05, .1 and .2 on validation images by NLL.
    warm = {**chain, "lr": 0.05, "prior_std": 0.2}
    return {
        "SGLD": bayesify.SGLD(**warm),
        # The paper's weight decay, and twice its rate: the first half of the run, which is burn-in, then is longer
        # than the prior's relaxation time, 400 steps.
        COLD: bayesify.SGLD(temperature=1e-3, lr=0.1, weight_decay=0.05, **chain),
        "APD": bayesify.APD(latent=100, steps=game, batch=32, **warm),
        # With momentum .9 this moves as far as .05 without, which is the rate of the cold chain.
        "plain network": bayesify.MAP(epochs=steps // AT_ONCE, lr=0.005, weight_decay=0.01),
    }


RUNS = (
    ("SGLD", "bald"), ("SGLD", "random"), (COLD, "bald"), (COLD, "entropy"), (COLD, "random"),
    ("plain network", "entropy"), ("plain network", "random"),
)  # fmt: skip
VARIANTS = (
    ("SGLD", "entropy"), ("SGLD", "variation-ratio"), ("SGLD", "model-variance"), ("SGLD", "batch-bald"),
    ("APD", "bald"),
)  # fmt: skip


def curve(data: Data, method: bayesify.Method, how: Any, seed: int, rounds: int, pool: int) -> dict[str, Any]:
    """Return the test accuracy and NLL, on as many images as the pool has, by the number of labels."""
    x, y = data.train
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    start = [int(i) for digit in range(10) for i in order[y[order] == digit][:2]]

    def learn(labelled: list[int], before: bayesify.Posterior | None) -> bayesify.Posterior:
        del before  # every round begins anew
        torch.manual_seed(seed)
        posterior = bayesify.convert(mlp(784, 100, 10), method)
        batches = [(x[labelled], y[labelled])] * AT_ONCE
        bayesify.fit(posterior, batches, num_data=len(labelled), seed=seed, progress=False, accuracy_tolerance=1)
        return posterior

    def predict(posterior: bayesify.Posterior, indices: list[int]) -> bayesify.Prediction:
        return bayesify.predict(posterior, x[indices], num_draws=50, seed=seed, keep_samples=how == "batch-bald")

    def result(posterior: bayesify.Posterior) -> dict[str, float]:
        images, labels = (part[:pool] for part in data.test)
        prediction = bayesify.predict(posterior, images, num_draws=50, seed=seed)
        return {
            "accuracy": round(measure.accuracy(prediction.probs, labels), 4),
            "nll": round(-float(prediction.log_probs.gather(-1, labels[:, None]).mean()), 4),
        }

    history = active_learning(
        learn,
        predict,
        result,
        start=start,
        pool=order[:pool].tolist(),
        num=10,
        rounds=rounds,
        acquisition=how,
        seed=seed,
    )
    return {
        "labels": [len(found.labelled) for found in history],
        **{name: [found.results[name] for found in history] for name in ("accuracy", "nll")},
    }


def mean_curve(curves: list[dict[str, Any]]) -> dict[float, float]:
    """Return the mean accuracy over seeds by the number of labels."""
    mean = torch.tensor([one["accuracy"] for one in curves]).mean(0)
    return dict(zip(curves[0]["labels"], mean.tolist(), strict=True))


def main() -> None:
    """Make the learning curves."""
    arguments = arguments_of(__doc__, "apd_active", seeds=[0, 1, 2, 3, 4], rounds=16, pool=2000, steps=1000, game=500)
    if arguments.trial:
        arguments.seeds, arguments.rounds, arguments.pool, arguments.steps, arguments.game = [0], 2, 100, 100, 5
    data = mnist(trial=arguments.trial, number=50)
    rows = rows_of("apd_active", arguments)
    methods = learners(arguments.steps, arguments.game)
    found: dict[str, list[dict[str, Any]]] = {}
    for index, seed in enumerate(arguments.seeds):
        for name, how in (*RUNS, *VARIANTS) if index == 0 else RUNS:
            make = partial(curve, data, methods[name], how, seed, arguments.rounds, arguments.pool)
            found.setdefault(f"{name}, {how}", []).append(
                rows.row(f"{name}, {how}", make, config={"method": methods[name]}, seed=seed)
            )
    curves = {f"{name}, {how}": mean_curve(found[f"{name}, {how}"]) for name, how in RUNS}
    draw_curves(curves, "apd_active", arguments, x="labels", y="test accuracy", scale="linear")


if __name__ == "__main__":
    main()
