"""What prediction without draws costs, in multiples of a plain pass, and how it agrees with Monte Carlo.

`BAYESIFY_DATA=... python -m benchmarks.streamlined mlp resnet20` puts independent Gaussian noise on trained weights
of networks, a share of each tensor's root mean square (`--noise`), with `--spread` another for each weight, and prints
for each predictor: its cost, timed in turns with the plain network (the process' own time, so run it with one thread:
OMP_NUM_THREADS=1); the ratio of its variance of the centred logits to Monte Carlo's, summed; Spearman's correlation of
the examples' sums, with a 95 % interval; and the ratio of the mutual information, of the means and as the median over
examples. Monte Carlo with fewer draws stands beside it, against the others' draws, and so do suq and laplace-torch, on
the MLP, where they are installed. `--draws 0` compares with the exact first-order variances instead, which takes a
hundredth of the time. `minilm` needs `--encoder`, a folder with all-MiniLM-L6-v2; its head is random.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import bayesify
from bayesify import Linearised, Streamlined
from bayesify._core.maths import entropy
from bayesify._core.trees import call
from bayesify.evaluation.checking import _interval, _rank_correlation
from bayesify.laws import GaussianLaw, Posterior
from bayesify.prediction import Predictor
from benchmarks.timing import keep
from experiments.data import load

HOW: dict[str, Predictor] = {
    "streamlined": Streamlined(),
    "moments": Streamlined(engine="moments"),
    "principal": Streamlined(engine="principal"),
    "whole-sum": Streamlined(engine="principal", sketch=0),
    "two-directions": Streamlined(engine="principal", directions=2),
    "three-directions": Streamlined(engine="principal", directions=3),
    "margin": Streamlined(engine="margin"),
    "linearised": Linearised(),
    "linearised-sketch": Linearised(sketch=1),
    "linearised-sketch-4": Linearised(sketch=4),
    "per-head": Streamlined(covariance="per-head"),  # for attention alone
}


def noisy(network: nn.Module, arguments: argparse.Namespace, names: Callable[[str], bool]) -> Posterior:
    """Return a posterior with noise on some parameters, a share of each one's root mean square."""
    generator = torch.Generator().manual_seed(0)
    log_stds = {
        name: (p.detach().square().mean().sqrt() * arguments.noise + 1e-8).log()
        + arguments.spread * torch.randn(p.shape, generator=generator)
        for name, p in network.named_parameters()
        if names(name)
    }
    return Posterior(network, GaussianLaw(network, log_stds=log_stds), method=bayesify.MAP())


def mlp(arguments: argparse.Namespace) -> dict[str, tuple[nn.Module, Posterior, Any]]:
    """Train 784-400-400-10 on MNIST for three passes over 8,192 digits."""
    torch.manual_seed(0)
    train, test = (load("mnist", part) for part in ("train", "test"))
    x, y = train.inputs[:8192].float().flatten(1), train.targets[:8192]
    network = nn.Sequential(
        nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10)
    )  # fmt: skip
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    for _ in range(3):
        for inputs, targets in zip(torch.split(x, 128), torch.split(y, 128), strict=True):
            optimizer.zero_grad()
            cross_entropy(network(inputs), targets).backward()
            optimizer.step()
    inputs = test.inputs[: arguments.examples].float().flatten(1)
    return {"MLP, all layers": (network.eval(), noisy(network, arguments, lambda _: True), inputs)}


def resnet(depth: int, arguments: argparse.Namespace) -> dict[str, tuple[nn.Module, Posterior, Any]]:
    """Load a pretrained CIFAR-10 network."""
    from experiments.networks import cifar_inputs, pretrained

    network = pretrained(f"resnet{depth}")
    inputs = cifar_inputs(load("cifar10", "test").inputs[arguments.skip :][: arguments.examples])
    return {f"ResNet-{depth}, all layers": (network, noisy(network, arguments, lambda _: True), inputs)}


def minilm(arguments: argparse.Namespace) -> dict[str, tuple[nn.Module, Posterior, Any]]:
    """Load a sentence encoder, with a random head on the mean over tokens."""
    from experiments.clinc import Classifier, make_encoder

    torch.manual_seed(0)
    encoder, width, tokenise = make_encoder(arguments.encoder)
    network = Classifier(encoder, width, 10).eval()
    texts = load("clinc150", "test").texts
    inputs = dict(tokenise(tuple(texts[:: max(1, len(texts) // arguments.examples)][: arguments.examples])))
    layers = sorted({int(n.split("layer.")[1].split(".")[0]) for n, _ in network.named_parameters() if "layer." in n})
    last = tuple(f"layer.{index}." for index in layers[-2:])
    chosen: dict[str, Callable[[str], bool]] = {
        "MiniLM, last two blocks": lambda n: any(part in n for part in last) or n.startswith("head"),
        "MiniLM, all blocks": lambda n: "layer." in n or n.startswith("head"),
    }
    return {name: (network, noisy(network, arguments, names), inputs) for name, names in chosen.items()}


NETWORKS: dict[str, Callable[[argparse.Namespace], dict[str, tuple[nn.Module, Posterior, Any]]]] = {
    "mlp": mlp,
    "resnet20": partial(resnet, 20),
    "resnet44": partial(resnet, 44),
    "minilm": minilm,
}


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
def draws(posterior: Posterior, inputs: Any, number: int) -> Tensor:
    """Return the centred logits of draws, (S, B, C)."""
    outputs = torch.stack([posterior.evaluate(inputs, [key])[0] for key in posterior.keys(number, 0)])
    return outputs - outputs.mean(-1, keepdim=True)


def information(logits: Tensor) -> Tensor:
    """Return the mutual information of draws (S, B, C), (B,)."""
    log_probs = logits.log_softmax(-1)
    return entropy(log_probs.exp().mean(0).log()) - entropy(log_probs).mean(0)


def rows_of(
    network: nn.Module, posterior: Posterior, inputs: Any, hows: list[str], arguments: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Return cost, variance ratio, rank correlation and the ratio of the mutual information of each predictor."""

    @torch.no_grad()
    def plain() -> None:
        call(network, inputs)

    samples = draws(posterior, inputs, arguments.draws) if arguments.draws else None
    exact: Any = None if arguments.draws else bayesify.predict(posterior, inputs, how="linearised")
    found: dict[str, dict[str, float]] = {}

    def add(name: str, cost: float, spread: Tensor, knowledge: Tensor | None, start: int = 0, words: str = "") -> None:
        reference = exact.logits_variance.sum(-1) if samples is None else samples[start:].var(0).sum(-1)
        rank = _rank_correlation(spread.double(), reference.double())
        low, high = _interval(spread, reference) or (rank, rank)
        found[name] = {
            "cost": round(cost, 2),
            "ratio": round(float(spread.sum() / reference.sum()), 3),
            "rank": round(rank, 3),
            "low": round(low, 3),
            "high": round(high, 3),
        }
        if knowledge is not None and samples is not None:
            known = information(samples[start:])
            found[name]["information"] = round(float(knowledge.mean() / known.mean()), 3)
            found[name]["median"] = round(float((knowledge / known).median()), 3)
        numbers = "".join(f"   {key} {value:7.3f}" for key, value in found[name].items())
        print(f"  {name:24}{numbers}   {words}", flush=True)

    for how in hows:
        made = partial(bayesify.predict, posterior, inputs, how=HOW[how])
        prediction: Any = made()
        taken = cost(plain, made, arguments.repeats)
        spread = prediction.logits_variance.sum(-1)
        add(how, taken, spread, prediction.epistemic, words=prediction.predictor)
    for name, function in peers(network, posterior, inputs):
        began = time.process_time()
        spread = function()
        slow = time.process_time() - began > 5
        middle = time.process_time()
        plain()
        once = (middle - began) / (time.process_time() - middle)
        add(name, once if slow else cost(plain, function, arguments.repeats), spread, None)
    for number in (4, 20, 100):
        if samples is not None and number * 2 <= arguments.draws:
            made = partial(bayesify.predict, posterior, inputs, num_draws=number, seed=0)
            few = samples[:number]
            taken = cost(plain, made, arguments.repeats if number < 100 else 1)
            add(f"{number} draws", taken, few.var(0).sum(-1), information(few), start=number)
    return found


def peers(network: nn.Module, posterior: Posterior, inputs: Any) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield other libraries' predictors of the same posterior's centred logits' variances, summed."""
    if not isinstance(network, nn.Sequential):
        return
    log_stds = posterior.law.log_std.as_dict().values()
    variances = torch.cat([(2 * log_std.detach()).exp().flatten() for log_std in log_stds])
    for name, package, make in (("suq", "suq", _suq), ("laplace-torch, GLM", "laplace", _laplace_torch)):
        if find_spec(package) is None:
            print(f"  {name} is not installed, and not in the table.")
        else:
            yield name, make(copy.deepcopy(network), variances, inputs)


def _suq(network: nn.Module, variances: Tensor, inputs: Tensor) -> Callable[[], Tensor]:
    # The published wheel has no suq.utils, of which it takes a data set for its fit of a scale alone.
    missing: Any = ModuleType("suq.utils.utils")
    missing.torch_dataset = TensorDataset
    sys.modules.setdefault("suq.utils.utils", missing)
    from suq import streamline_mlp

    peer = streamline_mlp(network, variances, "diag", "classification")

    def streamlined() -> Tensor:
        variance: Tensor = peer.forward_latent(inputs)[1].detach()
        return variance.sum(-1) * (1 - 1 / variance.shape[-1])

    return streamlined


def _laplace_torch(network: nn.Module, variances: Tensor, inputs: Tensor) -> Callable[[], Tensor]:
    from tests.torchvision_stub import declare_torchvision_operators

    declare_torchvision_operators()
    from laplace import DiagLaplace

    peer = DiagLaplace(network, "classification", prior_precision=1e-12)
    peer.H, peer.mean = 1 / variances, torch.nn.utils.parameters_to_vector(network.parameters()).detach()

    def linearised() -> Tensor:
        # It holds outputs times parameters for each example.
        parts = [peer._glm_predictive_distribution(part)[1].detach() for part in torch.split(inputs, 8)]
        covariance = torch.cat(parts)
        return covariance.diagonal(dim1=1, dim2=2).sum(-1) - covariance.mean(-1).sum(-1)

    return linearised


def main() -> None:
    """Print the tables and keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", choices=[*NETWORKS, []], default=["mlp", "resnet20"])
    parser.add_argument("--noise", type=float, default=0.02)
    parser.add_argument("--spread", type=float, default=0.0, help="of the logarithms of weights' own deviations")
    parser.add_argument("--examples", type=int, default=128)
    parser.add_argument("--skip", type=int, default=0, help="images before the examples")
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--how", nargs="*", choices=HOW, default=list(HOW))
    parser.add_argument("--encoder", default="tiny")
    arguments = parser.parse_args()
    settings = {key: getattr(arguments, key) for key in ("noise", "spread", "examples", "skip", "draws", "repeats")}
    for name in arguments.networks:
        hows = [how for how in arguments.how if how != "per-head" or name == "minilm"]
        for title, (network, posterior, inputs) in NETWORKS[name](arguments).items():
            noise = f"noise {arguments.noise}, spread {arguments.spread}"
            label = f"{title}: {noise}, {arguments.draws} draws, {arguments.examples} examples"
            print(label)
            keep("streamlined", {label: rows_of(network, posterior, inputs, hows, arguments)}, **settings)


if __name__ == "__main__":
    main()
