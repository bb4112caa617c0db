"""What many draws cost, as multiples of one plain pass in the same run.

`BAYESIFY_DATA=... python -m benchmarks.predict` times 20 draws of several posteriors of the pretrained ResNet-20 at
several batch sizes, interleaved with the plain network, and prints medians of ratios: of the process's own time with
one thread (OMP_NUM_THREADS=1). `--methods` takes some of them.

The C library's allocator gives memory of some megabytes back after each use, and gets it again page by page, until a
process has freed a larger piece; `settle_allocator` frees one, as loading a data set does, so that it is passes that
are timed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn

import bayesify
from benchmarks.timing import keep, seconds
from experiments.networks import pretrained

POSTERIORS: dict[str, Callable[[nn.Module], bayesify.Posterior]] = {
    "dropout before the last layer": lambda n: bayesify.convert(n, bayesify.MCDropout(p=0.1, insert_before="linear")),
    "channel dropout before each convolution": lambda n: bayesify.convert(
        n, bayesify.MCDropout(p=0.1, insert_before="conv")
    ),
    "20 members": lambda n: bayesify.convert(n, bayesify.DeepEnsemble(members=20, start="perturbed")),
    "swag": lambda n: bayesify.convert(n, bayesify.SWAG()),
    "swag, last layer": lambda n: bayesify.convert(n, bayesify.SWAG(), include="linear"),
    "bayes-adapter": lambda n: bayesify.convert(n, bayesify.BayesAdapter()),
    "abnn": lambda n: bayesify.convert(n, bayesify.ABNN()),
    "ibnn": lambda n: bayesify.convert(n, bayesify.IBNN()),
}


def settle_allocator() -> None:
    """Let the allocator keep what passes free; see above."""
    torch.zeros(2**23 - 2**14)


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
    parser.add_argument("--methods", nargs="*", choices=[*POSTERIORS, []], default=list(POSTERIORS))
    arguments = parser.parse_args()
    settle_allocator()
    network = pretrained("resnet20").eval()
    rows: dict[str, dict[int, float]] = {}
    print(f"{'':42}" + "".join(f"batch {size:<6}" for size in arguments.batches))
    for name in arguments.methods:
        posterior = POSTERIORS[name](network)
        rows[name] = {}
        for size in arguments.batches:
            inputs = torch.randn(size, 3, 32, 32, generator=torch.Generator().manual_seed(0))
            rows[name][size] = round(ratio(network, posterior, inputs, arguments.draws, arguments.repeats), 2)
        print(f"{name:42}" + "".join(f"{value:<12}" for value in rows[name].values()), flush=True)
    keep("predict", {"ratios": rows}, draws=arguments.draws, repeats=arguments.repeats, threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
