"""What many draws cost, as multiples of one plain pass in the same run.

`BAYESIFY_DATA=... python -m benchmarks.predict` times 20 draws of several posteriors of the pretrained ResNet-20 at
several batch sizes, interleaved with the plain network, and prints medians of ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import bayesify
from benchmarks.timing import keep
from experiments.networks import pretrained

POSTERIORS: dict[str, Callable[[nn.Module], bayesify.Posterior]] = {
    "dropout before the last layer": lambda n: bayesify.convert(n, bayesify.MCDropout(p=0.1, insert_before="linear")),
    "channel dropout before each convolution": lambda n: bayesify.convert(
        n, bayesify.MCDropout(p=0.1, insert_before="conv")
    ),
    "20 members": lambda n: bayesify.convert(n, bayesify.DeepEnsemble(members=20, start="perturbed")),
    "swag": lambda n: bayesify.convert(n, bayesify.SWAG()),
    "swag, last layer": lambda n: bayesify.convert(n, bayesify.SWAG(), include="linear"),
}


def seconds(function: Callable[[], object]) -> float:
    """Return the time of one call."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def ratio(network: nn.Module, posterior: bayesify.Posterior, inputs: Tensor, draws: int, repeats: int) -> float:
    """Return the median, over interleaved pairs, of the time of a prediction over that of a plain pass."""
    plain_passes = max(1, 64 // inputs.shape[0])

    @torch.no_grad()
    def plain() -> None:
        for _ in range(plain_passes):
            network(inputs)

    def predicted() -> None:
        bayesify.predict(posterior, inputs, num_draws=draws, seed=0)

    plain(), predicted()
    pairs = [(seconds(plain) / plain_passes, seconds(predicted)) for _ in range(repeats)]
    return statistics.median(made / base for base, made in pairs)


def main() -> None:
    """Print the table and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    network = pretrained("resnet20").eval()
    rows: dict[str, dict[int, float]] = {}
    print(f"{'':42}" + "".join(f"batch {size:<6}" for size in arguments.batches))
    for name, make in POSTERIORS.items():
        posterior = make(network)
        rows[name] = {}
        for size in arguments.batches:
            inputs = torch.randn(size, 3, 32, 32, generator=torch.Generator().manual_seed(0))
            rows[name][size] = round(ratio(network, posterior, inputs, arguments.draws, arguments.repeats), 2)
        print(f"{name:42}" + "".join(f"{value:<12}" for value in rows[name].values()), flush=True)
    keep("predict", {"ratios": rows}, draws=arguments.draws, repeats=arguments.repeats)


if __name__ == "__main__":
    main()
