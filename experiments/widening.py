"""How wide the noise of methods that were not fitted should be, on CIFAR-10's validation images.

`BAYESIFY_DATA=... python -m experiments.widening [NAME ...]` widens posteriors of the pretrained ResNet-20 on the first
2,000 test images, with eight draws, and prints what was tried. Laplace sees 1,000 training images for its curvature.
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import ABNN, IBNN, BayesAdapter, Laplace, MCDropout, Method
from experiments.cifar import NUM_DATA
from experiments.data import load
from experiments.networks import cifar_inputs, pretrained

__all__ = ["METHODS", "widened"]

METHODS: dict[str, Method] = {
    "bayes-adapter": BayesAdapter(),
    "ibnn": IBNN(means_std=0.0),
    "abnn": ABNN(eta=0.0),
    "mc-dropout, last layer": MCDropout(p=0.1, insert_before="linear"),
    "laplace, last layer": Laplace(),
    "laplace, diagonal": Laplace(structure="diagonal", mc_labels=1),
}
SEEN, DRAWS = 1000, 8


def widened(method: Method, train: DataLoader[Any], val: DataLoader[Any]) -> tuple[bayesify.Posterior, float]:
    """Return a posterior that was not trained, as wide as it should be, and the seconds that this took."""
    network = pretrained("resnet20").to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    posterior = bayesify.convert(network, method).eval()
    if method.surveys:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the prior is chosen below
            bayesify.fit(posterior, train, epochs=0, num_data=NUM_DATA, progress=False)
    start = time.perf_counter()
    bayesify.widen(posterior, val, num_draws=DRAWS)
    return posterior, time.perf_counter() - start


def main() -> None:
    """Print what was tried."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*METHODS, []])
    names = parser.parse_args().names or list(METHODS)
    sets = {split: load("cifar10", split) for split in ("train", "val")}
    train = DataLoader(TensorDataset(cifar_inputs(sets["train"].inputs[:SEEN]), sets["train"].targets[:SEEN]), 100)
    val = DataLoader(TensorDataset(cifar_inputs(sets["val"].inputs), sets["val"].targets), 256)
    for name in names:
        posterior, seconds = widened(METHODS[name], train, val)
        print(f"{name}, {seconds:.0f} s\n{posterior.widening}\n", flush=True)


if __name__ == "__main__":
    main()
