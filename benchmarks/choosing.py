"""What `choose` costs, in plain predictions of the validation data.

`BAYESIFY_DATA=... OMP_WAIT_POLICY=passive python -m benchmarks.choosing` lets `choose` find what two and four passes
allow for the pretrained ResNet-20 on the first 2,000 test images of CIFAR-10, with one thread, between two plain
predictions of these, and prints its CPU time over the mean of theirs.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from benchmarks.timing import keep, seconds
from experiments.data import load
from experiments.networks import cifar_inputs, pretrained


def main() -> None:
    """Print the table and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--passes", type=int, nargs="*", default=[2, 4])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    network = pretrained("resnet20").eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    data = load("cifar10", "val").part(slice(arguments.examples))
    loader = DataLoader(TensorDataset(cifar_inputs(data.inputs), data.targets), 500)
    plain = bayesify.convert(network, "map")
    figures: dict[str, Any] = {}
    found: list[bayesify.Posterior] = []
    predicted = partial(bayesify.predict, plain, loader, how="mean")
    predicted()
    for passes in arguments.passes:
        before = seconds(predicted)
        took = seconds(lambda passes=passes: found.append(bayesify.choose(network, loader, passes=passes)))  # type: ignore[misc]
        figures[f"{passes} passes: plain predictions"] = round(2 * took / (before + seconds(predicted)), 2)
        figures[f"{passes} passes: chosen"] = getattr(found[-1].choice, "chosen", "")
    keep("choosing", {"cost": figures}, examples=arguments.examples)


if __name__ == "__main__":
    main()
