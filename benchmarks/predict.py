"""What many draws cost, as multiples of one plain pass in the same run.

`BAYESIFY_DATA=... python -m benchmarks.predict` times 20 draws of several posteriors of the pretrained ResNet-20 at
several batch sizes, interleaved with the plain network, and prints medians of ratios: of the process's own time with
one thread (OMP_NUM_THREADS=1). `--network mlp` takes an MLP 784-400-400-10 instead, `--methods` some of the
posteriors. "reading the weights" is what the numbers that 20 draws have in tensors of their own take to be read once.
Predictions have one seed, so that weights which are kept are there from the second on; `--new-seeds` gives each its
own, whose weights are made first.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from itertools import count, repeat

import torch
from torch import Tensor, nn

import bayesify
from benchmarks.sgld import mlp
from benchmarks.timing import keep, seconds, settle_allocator
from experiments.networks import pretrained

POSTERIORS: dict[str, Callable[[nn.Module], bayesify.Posterior]] = {
    "dropout before the last layer": lambda n: bayesify.convert(
        n, bayesify.MCDropout(p=0.1, insert_before="linear"), include=last_linear(n)
    ),
    "dropout before each linear layer": lambda n: bayesify.convert(
        n, bayesify.MCDropout(p=0.1, insert_before="linear")
    ),
    "channel dropout before each convolution": lambda n: bayesify.convert(
        n, bayesify.MCDropout(p=0.1, insert_before="conv")
    ),
    "20 members": lambda n: bayesify.convert(n, bayesify.DeepEnsemble(members=20, start="perturbed")),
    "swag": lambda n: bayesify.convert(n, bayesify.SWAG()),
    "swag, last layer": lambda n: bayesify.convert(n, bayesify.SWAG(), include=last_linear(n)),
    "bayes-adapter": lambda n: bayesify.convert(n, bayesify.BayesAdapter()),
    "bayes-adapter, last layer": lambda n: bayesify.convert(n, bayesify.BayesAdapter(), include=last_linear(n)),
    "abnn": lambda n: bayesify.convert(n, bayesify.ABNN()),
    "ibnn": lambda n: bayesify.convert(n, bayesify.IBNN()),
}
OF_RESNET = ("channel dropout before each convolution", "abnn")  # what an MLP does not have
OF_MLP = ("dropout before each linear layer",)  # a ResNet has one


def last_linear(network: nn.Module) -> str:
    """Return the name of the last linear layer."""
    return [name for name, module in network.named_modules() if isinstance(module, nn.Linear)][-1]


def network_and_inputs(name: str) -> tuple[nn.Module, Callable[[int], Tensor]]:
    """Return a network and what makes inputs for it."""
    if name == "mlp":
        return mlp(784, 400, 400, 10), lambda rows: torch.randn(rows, 784)
    return pretrained("resnet20"), lambda rows: torch.randn(rows, 3, 32, 32)


def reading(posterior: bayesify.Posterior, inputs: Tensor, draws: int) -> Callable[[], None] | None:
    """Return what reads as many numbers as so many draws have in tensors of their own; None where they have none."""
    stacking = posterior.law.stacking(posterior.trace(inputs))
    if stacking is None:
        return None
    copies = [torch.ones(stacking.size) for _ in range(draws)]

    def read() -> None:
        for copy in copies:
            torch.dot(copy, copy)

    return read


def ratios(
    network: nn.Module,
    posterior: bayesify.Posterior,
    inputs: Tensor,
    draws: int,
    repeats: int,
    seeds: Iterator[int],
) -> dict[str, float]:
    """Return medians, over rounds, of the times of a prediction and of reading its weights, over a plain pass's."""
    plain_passes = max(1, 64 // inputs.shape[0])

    @torch.no_grad()
    def plain() -> None:
        for _ in range(plain_passes):
            network(inputs)

    def predicted() -> None:
        bayesify.predict(posterior, inputs, num_draws=draws, seed=next(seeds))

    functions: dict[str, Callable[[], None]] = {"plain": plain, "": predicted}
    if (read := reading(posterior, inputs, draws)) is not None:
        functions[", reading the weights"] = read
    rounds = [{name: seconds(made) for name, made in functions.items()} for _ in range(repeats + 1)][1:]
    return {
        name: round(statistics.median(r[name] * plain_passes / r["plain"] for r in rounds), 2)
        for name in functions
        if name != "plain"
    }


def main() -> None:
    """Print the table and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=["resnet20", "mlp"], default="resnet20")
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--new-seeds", action="store_true", help="a seed of its own for each prediction")
    parser.add_argument("--methods", nargs="*", choices=[*POSTERIORS, []], default=list(POSTERIORS))
    arguments = parser.parse_args()
    settle_allocator()
    torch.manual_seed(0)
    network, inputs = network_and_inputs(arguments.network)
    network.eval()
    seeds = count() if arguments.new_seeds else repeat(0)
    rows: dict[str, dict[str, float]] = {}
    for name in arguments.methods:
        if name in (OF_RESNET if arguments.network == "mlp" else OF_MLP):
            continue
        posterior = POSTERIORS[name](network)
        rows[name] = {}
        for size in arguments.batches:
            found = ratios(network, posterior, inputs(size), arguments.draws, arguments.repeats, seeds)
            rows[name] |= {f"batch {size}{what}": value for what, value in found.items()}
        print(name, rows[name], flush=True)
    settings = {"draws": arguments.draws, "repeats": arguments.repeats, "threads": torch.get_num_threads()}
    title = f"{arguments.draws} draws of {arguments.network}" + ", new seeds" * arguments.new_seeds
    keep("predict", {title: rows}, network=arguments.network, **settings)


if __name__ == "__main__":
    main()
