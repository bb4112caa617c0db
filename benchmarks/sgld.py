"""What sampling, banks and distillation cost, as multiples in one run.

`python -m benchmarks.sgld` prints, and keeps in `benchmarks/results/sgld.json`:

- a step of each sampler over a plain SGD step, 784-400-400-10, batch 100, beside a minimal hand-written SGLD loop (the
  floor) and, where it is installed (`benchmarks/requirements.txt`), the `posteriors` library's;
- a step of four chains that move together over four steps of one;
- a prediction over T = 200 samples of a bank over T plain passes, for small networks;
- a generator step with five critic steps of the published generator (z 32, 3 x 100, D = 79,510, 2,000 samples), in the
  samples' span over one in all weights, and with the penalty by the Gram matrix over one by autograd; and how many
  networks the generator costs.

One thread's CPU time, the median of interleaved repeats. `--parts` takes some of these tables.
`--trial` takes small settings, to see that it runs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bayesify
from bayesify.laws import BankLaw
from bayesify.methods import gan
from bayesify.methods.pca import reduce_samples
from benchmarks.timing import keep, medians, seconds

N = 50_000


def mlp(*sizes: int) -> nn.Sequential:
    """Return linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def repeated(function: Callable[[], object], times: int) -> Callable[[], None]:
    """Return a function that calls another so many times."""

    def call() -> None:
        for _ in range(times):
            function()

    return call


def steps(sizes: tuple[int, ...], repeats: int) -> dict[str, float]:
    """Return step times by sampler, over SGD's."""
    x, y = torch.randn(100, sizes[0]), torch.randint(sizes[-1], (100,))
    plain, floor = mlp(*sizes), mlp(*sizes)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.05, weight_decay=1e-3)

    def plain_step() -> None:
        sgd.zero_grad(set_to_none=True)
        cross_entropy(plain(x), y).backward()
        sgd.step()

    def minimal_step() -> None:
        for parameter in floor.parameters():
            parameter.grad = None
        cross_entropy(floor(x), y).backward()
        with torch.no_grad():
            for p in floor.parameters():
                assert p.grad is not None
                p.add_(p.grad + 1e-3 * p, alpha=-0.025).add_(torch.randn_like(p), alpha=math.sqrt(0.05 / N))

    functions: dict[str, Callable[[], object]] = {"SGD": plain_step, "a minimal SGLD loop": minimal_step}
    for kind in ("sgld", "sghmc", "psgld"):
        functions[kind] = sampler_step(mlp(*sizes), bayesify.SGLD(kind=kind, samples_per_chain=2), x, y)
    functions |= posteriors_library(mlp(*sizes), x, y)
    return medians({name: repeated(function, 10) for name, function in functions.items()}, repeats)


def chains(sizes: tuple[int, ...], repeats: int) -> dict[str, float]:
    """Return the time of a step of four chains together, over four steps of one."""
    x, y = torch.randn(100, sizes[0]), torch.randint(sizes[-1], (100,))
    one = sampler_step(mlp(*sizes), bayesify.SGLD(samples_per_chain=2), x, y)
    four = sampler_step(mlp(*sizes), bayesify.SGLD(samples_per_chain=2, chains=4, together=True), x, y)
    found = medians({"one after another": repeated(one, 40), "together": repeated(four, 10)}, repeats)
    return {"-".join(map(str, sizes)) + ", together": found["together"]}


def sampler_step(network: nn.Module, method: bayesify.SGLD, x: Tensor, y: Tensor) -> Callable[[], object]:
    """Return a step of the first stage."""
    posterior = bayesify.convert(network, method)
    stage = method.stages(posterior)[0]
    optimizer = method.make_optimizer(stage.groups)
    method.prepare_optimizer(posterior, optimizer, N)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with stage.context():
            posterior.loss((x, y), num_data=N).total.backward()
        optimizer.step()

    return step


def posteriors_library(network: nn.Module, x: Tensor, y: Tensor) -> dict[str, Callable[[], object]]:
    """Return a step of the `posteriors` library's SGLD, where it is installed."""
    try:
        import posteriors
    except ImportError:
        return {}
    parameters = dict(network.named_parameters())

    def log_posterior(weights: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        output = torch.func.functional_call(network, weights, (batch[0],))
        prior = posteriors.diag_normal_log_prob(weights, sd_diag=math.sqrt(1 / (N * 1e-3)))
        return -cross_entropy(output, batch[1]) + prior / N, output

    transform = posteriors.sgmcmc.sgld.build(log_posterior, lr=0.025, temperature=1 / N)
    state = [transform.init(parameters)]

    def step() -> None:
        state[0] = transform.update(state[0], (x, y))[0]

    return {"posteriors library": step}


def predictions(repeats: int, draws: int) -> dict[str, float]:
    """Return the time of a prediction over `draws` samples, over as many plain passes."""
    found = {}
    for sizes in ((2, 10, 10, 2), (64, 100, 10), (784, 100, 10)):
        network = mlp(*sizes).eval()
        law = BankLaw(network, names=[name for name, _ in network.named_parameters()], size=draws)
        for row in 0.1 * torch.randn(draws, law.samples.shape[1]):
            law.append(row)
        bank = bayesify.Posterior(network, law)
        for rows in (1, 10, 100, 1000):
            x = torch.randn(rows, sizes[0])

            def plain(network: nn.Module = network, x: Tensor = x) -> None:
                with torch.no_grad():
                    for _ in range(draws):
                        network(x)

            def predict(bank: bayesify.Posterior = bank, x: Tensor = x) -> None:
                bayesify.predict(bank, x, num_draws=draws, seed=0)

            times = medians({"plain": plain, "bank": predict}, repeats)
            found["-".join(map(str, sizes)) + f", batch {rows}"] = times["bank"]
    return found


def naive_penalty(critic: nn.Sequential, real: Tensor, fake: Tensor, mix: Tensor) -> Tensor:
    """Return the gradient penalty by autograd through the inputs."""
    x = torch.lerp(real, fake, mix).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


def distillation(columns: int, samples: int, hidden: int) -> dict[str, Any]:
    """Return times of a generator step with its five critic steps, and the storage of generator and bank."""
    torch.manual_seed(0)
    bank = 0.05 * torch.randn(samples, columns)
    found: dict[str, float] = {}
    reductions: list[Any] = []
    reducing = seconds(lambda: reductions.append(reduce_samples(bank)))
    times = {}
    for name, matrix in (("in all weights", bank), ("in the samples' span", reductions[0].coordinates)):
        random = torch.Generator().manual_seed(0)
        players = gan.make_players(matrix.shape[1], 32, (hidden,) * 3, bank, random)
        game = gan.Game(*players, random=random)
        game.step(matrix)
        times[name] = min(seconds(lambda game=game, matrix=matrix: game.step(matrix)) for _ in range(2))
        critic, real, mix = players[1], game.real(matrix), torch.rand(game.batch, 1)
        fake = game.fake().detach()
        ours = min(
            seconds(lambda: gan.gradient_penalty(critic, critic[0](real), critic[0](fake), mix).backward())  # noqa: B023
            for _ in range(2)
        )
        naive = min(seconds(lambda: naive_penalty(critic, real, fake, mix).backward()) for _ in range(2))  # noqa: B023
        found[f"penalty {name}, by the Gram matrix over by autograd"] = round(ours / naive, 3)
    whole, span = times.values()
    return {
        "a step in the samples' span over one in all weights": round(span / whole, 4),
        "finding the span, in steps of the first": round(reducing / whole, 2),
        **found,
        "generator, networks": hidden + 1,
        "bank, networks": samples,
        "minutes of 5,000 steps in the span": round(5000 * span / 60, 2),
    }


def main() -> None:
    """Print the ratios and keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trial", action="store_true")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tables = {name: PARTS[name](arguments.trial) for name in arguments.parts}
    if arguments.trial:
        print(tables)
    else:
        keep("sgld", tables)


PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "steps": lambda trial: steps((784, 40, 10) if trial else (784, 400, 400, 10), 2 if trial else 25),
    "chains": lambda trial: chains((64, 20, 10) if trial else (64, 100, 10), 2 if trial else 9),
    "predictions over as many plain passes": lambda trial: predictions(1 if trial else 9, 20 if trial else 200),
    "distillation": lambda trial: distillation(*((2_000, 50, 10) if trial else (79_510, 2_000, 100))),
}

if __name__ == "__main__":
    main()
