"""What views and pooling cost: time in plain passes, and memory, against the number of views.

`BAYESIFY_DATA=... OMP_WAIT_POLICY=passive python -m benchmarks.views` times predictions of the pretrained ResNet-20 on
128 images, with one thread, interleaved with plain passes, and prints medians of ratios: V views of one network are V
passes; eight draws that take turns among views are eight. Memory is the largest sum of tensors that a prediction holds
at a time beside the weights, as torch's profiler counts them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import bayesify
from benchmarks.timing import keep, medians
from experiments.networks import pretrained

SHIFTS = ("shift(1,0)", "mirror+shift(-1,0)", "shift(-1,0)", "mirror+shift(1,0)")
ALL = ("identity", "mirror", *SHIFTS, "flip", "mirror+flip")
BATCH = 128


def peak(function: Callable[[], Any]) -> float:
    """Return the largest memory that a call holds at a time, in MiB."""
    function()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        function()
    held = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return round(most / 2**20, 2)


def main() -> None:
    """Print the tables and keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    network = pretrained("resnet20").eval()
    x = torch.randn(BATCH, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    functions: dict[str, Callable[[], Any]] = {"a plain pass": partial(_plain, network, x)}
    plain, pooled = (bayesify.convert(network, "map") for _ in range(2))
    pooled.likelihood.exponent = 0.0
    adapter = bayesify.convert(network, bayesify.BayesAdapter())
    for number in (1, 2, 4, 8):
        views = bayesify.Views(*ALL[:number])
        functions[f"plain, {number} views, probabilities"] = partial(bayesify.predict, plain, x, views=views)
        functions[f"plain, {number} views, log-probabilities"] = partial(bayesify.predict, pooled, x, views=views)
        functions[f"BayesAdapter, 8 draws, {number} views"] = partial(
            bayesify.predict, adapter, x, views=views, num_draws=8
        )
    keep("views", {"time in plain passes": medians(functions, arguments.repeats)}, batch=BATCH)
    keep("views", {"memory in MiB": {name: peak(function) for name, function in functions.items()}}, batch=BATCH)


@torch.no_grad()
def _plain(network: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = network(x)
    return found


if __name__ == "__main__":
    main()
