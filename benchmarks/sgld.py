"""What sampling, banks and distillation cost, as ratios in one run.

`python benchmarks/sgld.py` prints, and keeps in `benchmarks/results/sgld.json`:

- an SGLD step over a plain SGD step, 784-400-400-10, batch 100, beside a minimal hand-written SGLD loop and, if it is
  installed, the `posteriors` library's;
- a prediction over T = 200 samples of a bank over T plain passes, for small networks;
- a critic step of the published generator (z 32, 3 x 100), plain and in the samples' span, and the storage of both.

Times are of one thread's CPU, the median of interleaved repeats. `--quick` takes small settings, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

import bayesify
from bayesify.distill._gan import Game
from bayesify.distill._reduction import reduce_samples
from bayesify.methods import Bank

RESULTS = Path(__file__).parent / "results" / "sgld.json"
N = 50_000


def mlp(*sizes: int) -> nn.Sequential:
    """Return linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def medians(functions: dict[str, Callable[[], object]], repeats: int, calls: int) -> dict[str, float]:
    """Return the CPU seconds of a call of each, the median over interleaved repeats."""
    for function in functions.values():
        function(), function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            began = time.process_time()
            for _ in range(calls):
                function()
            times[name].append((time.process_time() - began) / calls)
    return {name: statistics.median(values) for name, values in times.items()}


def steps(sizes: tuple[int, ...], repeats: int) -> dict[str, float]:
    """Return step times by sampler, relative to SGD's."""
    x, y = torch.randn(100, sizes[0]), torch.randint(sizes[-1], (100,))
    plain, floor = mlp(*sizes), mlp(*sizes)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.05, weight_decay=1e-3)

    def plain_step() -> None:
        sgd.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(plain(x), y).backward()
        sgd.step()

    def minimal_step() -> None:
        for parameter in floor.parameters():
            parameter.grad = None
        nn.functional.cross_entropy(floor(x), y).backward()
        with torch.no_grad():
            for p in floor.parameters():
                p.add_(p.grad + 1e-3 * p, alpha=-0.025).add_(torch.randn_like(p), alpha=math.sqrt(0.05 / N))

    functions: dict[str, Callable[[], object]] = {"sgd": plain_step, "a minimal sgld loop": minimal_step}
    for kind in ("sgld", "sghmc", "psgld"):
        functions[kind] = _sampler_step(mlp(*sizes), kind, x, y)
    functions |= _posteriors_library(mlp(*sizes), x, y)
    found = medians(functions, repeats, 20)
    return {name: round(seconds / found["sgd"], 2) for name, seconds in found.items()}


def _sampler_step(network: nn.Module, kind: str, x: Tensor, y: Tensor) -> Callable[[], object]:
    posterior = bayesify.convert(network, bayesify.SGLD(kind=kind, num_samples=2))
    stage = posterior.method.stages(posterior)[0]
    optimiser = posterior.method.make_optimiser(stage.groups)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        with stage.context():
            posterior.loss((x, y), num_data=N).total.backward()
        optimiser.step()

    return step


def _posteriors_library(network: nn.Module, x: Tensor, y: Tensor) -> dict[str, Callable[[], object]]:
    try:
        import posteriors
    except ImportError:
        return {}
    parameters = dict(network.named_parameters())

    def log_posterior(weights: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        output = torch.func.functional_call(network, weights, (batch[0],))
        prior = posteriors.diag_normal_log_prob(weights, sd_diag=math.sqrt(1 / (N * 1e-3)))
        return -nn.functional.cross_entropy(output, batch[1]) + prior / N, output

    transform = posteriors.sgmcmc.sgld.build(log_posterior, lr=0.025, temperature=1 / N)
    state = [transform.init(parameters)]

    def step() -> None:
        state[0] = transform.update(state[0], (x, y))[0]

    return {"posteriors library": step}


def predictions(repeats: int, draws: int) -> dict[str, float]:
    """Return the time of a prediction over `draws` samples, relative to as many plain passes."""
    found = {}
    for sizes in ((2, 10, 10, 2), (64, 100, 10), (784, 100, 10)):
        network = mlp(*sizes).eval()
        bank = bayesify.convert(network, Bank(num_samples=draws))
        for row in 0.1 * torch.randn(draws, bank.samples.shape[1]):
            bank.append(row)
        for rows in (1, 10, 100, 1000):
            x = torch.randn(rows, sizes[0])
            with torch.no_grad():
                times = medians(
                    {
                        "plain": lambda: [network(x) for _ in range(draws)],  # noqa: B023
                        "bank": lambda: bayesify.predict(bank, x, num_samples=draws, seed=0),  # noqa: B023
                    },
                    repeats,
                    2,
                )
            found["-".join(map(str, sizes)) + f", batch {rows}"] = round(times["bank"] / times["plain"], 2)
    return found


def distillation(columns: int, samples: int, hidden: int) -> dict[str, float]:
    """Return seconds of a generator step (with five critic steps), and of finding the samples' span."""
    torch.manual_seed(0)
    bank = 0.05 * torch.randn(samples, columns)
    began = time.process_time()
    reduction = reduce_samples(bank)
    seconds = time.process_time() - began
    games = {}
    for name, matrix in (("all weights", bank), ("the samples' span", reduction.coordinates)):
        random = torch.Generator().manual_seed(0)
        game = Game(
            matrix.shape[1], latent=32, hidden=(hidden,) * 3, kind="wgan-gp", batch=100, critic_steps=5, lr=None,
            like=bank[:0], generator=random,
        )  # fmt: skip
        games[name] = lambda game=game, matrix=matrix: game.step(matrix)
    found = {f"step in {name}, s": round(value, 4) for name, value in medians(games, 3, 1).items()}
    return {
        "reduction, s": round(seconds, 2),
        **found,
        "generator, networks": hidden + 1,
        "bank, networks": samples,
    }


def main() -> None:
    """Print the ratios and keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    record = {
        "step over an SGD step": steps((784, 40, 10) if quick else (784, 400, 400, 10), 3 if quick else 15),
        "prediction over as many plain passes": predictions(2 if quick else 7, 20 if quick else 200),
        "distillation": distillation(*((2_000, 50, 10) if quick else (79_510, 2_000, 100))),
    }
    for title, values in record.items():
        print(title)
        for name, value in values.items():
            print(f"  {name:32}{value}")
    if not quick:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
