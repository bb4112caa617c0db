"""One chain of SGLD or four of a quarter of its steps, on validation images: what the default should be.

`python -m experiments.sgld_chains` takes scikit-learn's digits and 64-100-10, at the lengths of `python -m
experiments.apd_mnist --part chains` in relaxation times of the prior: one chain has four of them as burn-in and four
more for its samples, each of four chains has one and one. They begin at new weights or at a trained network; 200
samples in all, three seeds. OOD sets are not looked at. Rows go to `experiments/results/sgld_chains.json`; what is
there is not made again. `--trial` takes seconds.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

import bayesify
from bayesify import measure
from experiments.apd_common import Data, arguments_of, mlp, rows_of
from experiments.apd_digits import SIZES, digits

__all__ = ["main", "one_bank"]

STARTS = {"the trained network": "network", "new weights": "reset"}


def one_bank(data: Data, start: Any, chains: int, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return accuracy and NLL on validation images."""
    torch.manual_seed(seed)
    fit = partial(bayesify.fit, seed=seed, progress=False, accuracy_tolerance=1.0)
    loader = data.loader("train", arguments.batch)
    network: torch.nn.Module = mlp(*SIZES)
    if start == "network":
        trained = bayesify.convert(
            network, bayesify.MAP(epochs=1 if arguments.trial else 100, lr=0.005, weight_decay=1e-3)
        )
        fit(trained, loader)
        network = trained.plain_network()
    method = bayesify.SGLD(
        chains=chains, samples_per_chain=arguments.samples // chains, epochs=max(1, arguments.epochs // chains),
        lr=arguments.rate, prior_std=arguments.prior, start=start, seed=seed,
    )  # fmt: skip
    bank = bayesify.convert(network, method)
    fit(bank, loader)
    x, y = data.val
    found = bayesify.predict(bank.eval(), x, num_draws=arguments.samples, seed=0)
    assert isinstance(found, bayesify.ClassificationPrediction)
    return {"accuracy": round(measure.accuracy(found.probs, y), 4), "nll": round(measure.nll(found.probs, y), 4)}


def main() -> None:
    """Make the rows."""
    # 2 n prior_std^2 / lr is 860 steps of 22 in an epoch: 313 epochs are eight times that.
    arguments = arguments_of(
        __doc__, "sgld_chains", seeds=[0, 1, 2], epochs=313, samples=200, batch=50, rate=0.05, prior=0.02**0.5
    )
    if arguments.trial:
        arguments.seeds, arguments.epochs, arguments.samples = [0], 4, 8
    data = digits(trial=arguments.trial)
    rows = rows_of("sgld_chains", arguments)
    for seed in arguments.seeds:
        for words, start in STARTS.items():
            for number, count in (("one chain", 1), ("four chains", 4)):
                make = partial(one_bank, data, start, count, seed, arguments)
                rows.row(f"{number} from {words}", make, config={"chains": count, "start": start}, seed=seed)


if __name__ == "__main__":
    main()
