"""What an input costs a core, in one pass and by sampling: the figures that docs/scale.md computes machines from.

`python -m benchmarks.scale` times, interleaved in one run and on one thread, a batch of 128 images (32 x 32) through
ResNet-20: the plain network; a prediction of it with a temperature (one plain pass); dropout before the last layer with
20 draws, in which what lies before the noise runs once; Gaussian weights everywhere (`BayesAdapter`), streamlined (one
pass) and with 20 draws. Seconds are of CPU, the least of the repeats. Weights are random: they do not change the cost.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bayesify import MAP, BayesAdapter, MCDropout, convert, predict
from experiments.networks import CifarResNet
from experiments.records import Records

__all__ = ["WAYS"]

BATCH, DRAWS = 128, 20
WAYS = (
    "plain network",
    "plain network + temperature",
    "dropout before the last layer, 20 draws",
    "Gaussian weights, streamlined",
    "Gaussian weights, 20 draws",
)


def ways(x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Return what is timed, by name."""
    torch.manual_seed(0)
    network = CifarResNet(3).eval()
    plain = convert(network, MAP())
    dropout = convert(network, MCDropout(p=0.1, insert_before="linear")).eval()
    gaussian = convert(network, BayesAdapter()).eval()

    def alone() -> Any:
        with torch.no_grad():
            return network(x).softmax(1)

    made: tuple[Callable[[], Any], ...] = (
        alone,
        partial(predict, plain, x, how="mean"),
        partial(predict, dropout, x, num_draws=DRAWS),
        partial(predict, gaussian, x, how="streamlined"),
        partial(predict, gaussian, x, num_draws=DRAWS),
    )
    return dict(zip(WAYS, made, strict=True))


def main() -> None:
    """Print and keep seconds for each input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    timed = ways(torch.randn(BATCH, 3, 32, 32))
    small = ways(torch.randn(2, 3, 32, 32))
    for run in small.values():
        run()  # imports
    least = dict.fromkeys(timed, float("inf"))
    start = time.time()
    for _ in range(repeats):
        for name, run in timed.items():
            before = time.process_time()
            run()
            least[name] = min(least[name], time.process_time() - before)
            print(name, least[name] / BATCH, flush=True)
    records = Records(Path(__file__).parent / "results" / "scale.json", {"batch": BATCH, "draws": DRAWS})
    figures = {name: seconds / BATCH for name, seconds in least.items()}
    records.append("seconds for each input", {"figures": figures}, seconds=time.time() - start)


if __name__ == "__main__":
    main()
