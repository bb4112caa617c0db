"""What prediction without draws costs, in multiples of a plain pass, and how it agrees with Monte Carlo.

`BAYESIFY_DATA=... python -m benchmarks.streamlined mlp resnet20` puts independent Gaussian noise on trained weights
of networks, a share of each tensor's root mean square (`--noise`), and prints for each predictor: its cost, timed in
turns with the plain network (the process' own time, so run it with one thread: OMP_NUM_THREADS=1); the ratio of its
variance of the centred logits to Monte Carlo's, summed; and Spearman's correlation of the examples' sums. Monte Carlo
with fewer draws stands beside it, against the others' draws. `minilm` needs `--encoder`, a folder with
all-MiniLM-L6-v2; its head is random.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bayesify
from bayesify._tree import call
from bayesify.check import _rank_correlation
from bayesify.posteriors import GaussianPosterior

RESULTS = Path(__file__).parent / "results" / "streamlined.json"
HOW = ("streamlined", "moments", "principal", "margin", "linearised")


def noisy(network: nn.Module, share: float, names: Callable[[str], bool]) -> GaussianPosterior:
    """Return a posterior with noise on some parameters, a share of each one's root mean square."""
    log_stds = {
        name: torch.full_like(p, float(p.detach().square().mean().sqrt() * share + 1e-8)).log().detach()
        for name, p in network.named_parameters()
        if names(name)
    }
    return GaussianPosterior(network, bayesify.MAP(), log_stds=log_stds)


def mlp(arguments: argparse.Namespace) -> dict[str, tuple[nn.Module, GaussianPosterior, Any]]:
    """Train 784-400-400-10 on MNIST for three passes over 8,192 digits."""
    torch.manual_seed(0)
    train, test = (bayesify.data.load("mnist", part) for part in ("train", "test"))
    x, y = train.inputs[:8192].float().flatten(1), train.targets[:8192]
    network = nn.Sequential(
        nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10)
    )  # fmt: skip
    optimiser = torch.optim.Adam(network.parameters(), 1e-3)
    for _ in range(3):
        for inputs, targets in zip(torch.split(x, 128), torch.split(y, 128), strict=True):
            optimiser.zero_grad()
            cross_entropy(network(inputs), targets).backward()
            optimiser.step()
    inputs = test.inputs[: arguments.examples].float().flatten(1)
    return {"MLP, all layers": (network.eval(), noisy(network, arguments.noise, lambda _: True), inputs)}


def resnet20(arguments: argparse.Namespace) -> dict[str, tuple[nn.Module, GaussianPosterior, Any]]:
    """Load the pretrained CIFAR-10 network."""
    from experiments.networks import cifar_inputs, pretrained

    network = pretrained("resnet20")
    inputs = cifar_inputs(bayesify.data.load("cifar10", "test").inputs[: arguments.examples])
    return {"ResNet-20, all layers": (network, noisy(network, arguments.noise, lambda _: True), inputs)}


def minilm(arguments: argparse.Namespace) -> dict[str, tuple[nn.Module, GaussianPosterior, Any]]:
    """Load a sentence encoder, with a random head on the mean over tokens."""
    from experiments.clinc import Classifier, make_encoder
    from tests.torchvision_stub import declare_torchvision_operators

    declare_torchvision_operators()
    torch.manual_seed(0)
    encoder, width, tokenise = make_encoder(arguments.encoder)
    network = Classifier(encoder, width, 10).eval()
    texts = bayesify.data.load("clinc150", "test").texts
    inputs = dict(tokenise(tuple(texts[:: max(1, len(texts) // arguments.examples)][: arguments.examples])))
    layers = sorted({int(n.split("layer.")[1].split(".")[0]) for n, _ in network.named_parameters() if "layer." in n})
    last = tuple(f"layer.{index}." for index in layers[-2:])
    chosen: dict[str, Callable[[str], bool]] = {
        "MiniLM, last two blocks": lambda n: any(part in n for part in last) or n.startswith("head"),
        "MiniLM, all blocks": lambda n: "layer." in n or n.startswith("head"),
    }
    return {name: (network, noisy(network, arguments.noise, names), inputs) for name, names in chosen.items()}


NETWORKS = {"mlp": mlp, "resnet20": resnet20, "minilm": minilm}


def cost(plain: Callable[[], object], other: Callable[[], object], repeats: int) -> float:
    """Return the median of the ratios of interleaved pairs."""
    plain(), other()
    ratios = []
    for _ in range(repeats):
        times = []
        for function in (plain, other):
            began = time.process_time()
            function()
            times.append(time.process_time() - began)
        ratios.append(times[1] / times[0])
    return statistics.median(ratios)


@torch.no_grad()
def draws(posterior: GaussianPosterior, inputs: Any, number: int) -> Tensor:
    """Return the centred logits of draws, (S, B, C)."""
    outputs = torch.stack([posterior.evaluate(inputs, [key])[0] for key in posterior.keys(number, 0)])
    return outputs - outputs.mean(-1, keepdim=True)


def rows_of(
    network: nn.Module, posterior: GaussianPosterior, inputs: Any, arguments: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Return cost, variance ratio and rank correlation of each predictor."""

    @torch.no_grad()
    def plain() -> None:
        call(network, inputs)

    samples = draws(posterior, inputs, arguments.draws)
    whole = samples.var(0).sum(-1)
    found: dict[str, dict[str, float]] = {}
    for how in arguments.how:
        prediction = bayesify.predict(posterior, inputs, how=how)
        spread = prediction.logits_variance.sum(-1)  # type: ignore[attr-defined]
        found[how] = _row(plain, lambda how=how: bayesify.predict(posterior, inputs, how=how), spread, whole, arguments)
        print(f"  {how:14}{_words(found[how])}   {prediction.predictor}", flush=True)  # type: ignore[attr-defined]
    for number in (4, 20):
        if number * 2 > arguments.draws:
            continue
        spread, rest = samples[:number].var(0).sum(-1), samples[number:].var(0).sum(-1)
        name = f"{number} draws"
        made = lambda number=number: bayesify.predict(posterior, inputs, num_samples=number, seed=0)  # noqa: E731
        found[name] = _row(plain, made, spread, rest, arguments)
        print(f"  {name:14}{_words(found[name])}", flush=True)
    return found


def _row(
    plain: Callable[[], object],
    made: Callable[[], object],
    spread: Tensor,
    reference: Tensor,
    arguments: argparse.Namespace,
) -> dict[str, float]:
    return {
        "cost": round(cost(plain, made, arguments.repeats), 2),
        "ratio": round(float(spread.sum() / reference.sum()), 3),
        "rank": round(_rank_correlation(spread.double(), reference.double()), 3),
    }


def _words(row: dict[str, float]) -> str:
    return f"cost {row['cost']:6.2f}   variance ratio {row['ratio']:6.3f}   rank correlation {row['rank']:6.3f}"


def main() -> None:
    """Print the tables and keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", choices=[*NETWORKS, []], default=["mlp", "resnet20"])
    parser.add_argument("--noise", type=float, default=0.02)
    parser.add_argument("--examples", type=int, default=128)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--how", nargs="*", choices=HOW, default=list(HOW))
    parser.add_argument("--encoder", default="tiny")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    tables = {}
    for name in arguments.networks:
        for title, (network, posterior, inputs) in NETWORKS[name](arguments).items():
            print(f"{title}: noise {arguments.noise}, {arguments.draws} draws, {arguments.examples} examples")
            tables[title] = rows_of(network, posterior, inputs, arguments)
    settings = {"noise": arguments.noise, "draws": arguments.draws, "examples": arguments.examples}
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps({**settings, "threads": torch.get_num_threads(), "tables": tables}, indent=1))


if __name__ == "__main__":
    main()
