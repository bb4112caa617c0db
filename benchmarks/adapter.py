"""What a training step with Gaussian weights costs, as a multiple of a plain one in the same run.

`BAYESIFY_DATA=... python -m benchmarks.adapter` times forward, backward and optimiser step of the pretrained ResNet-20
(batch 128) and of an MLP 784-400-400-10 (batch 100) for each kind of noise, and predictions with 20 draws, interleaved
with the plain network, and prints medians of ratios and the peak memory of a step. bayesian-torch and TorchUncertainty
stand beside ours where they are installed. With one thread the processor's time is taken, which is the work, whatever
else the machine does. `--layers` times single convolutions instead.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import bayesify
from bayesify.laws.gaussian import functions
from bayesify.layers import Convolution
from benchmarks.peers import gaussian_networks, peer_prediction, peer_step
from benchmarks.timing import keep, plain_step, seconds, settle_allocator
from experiments.networks import CifarResNet, pretrained

KINDS = ("auto", "exemplar", "flipout", "shared")


def mlp() -> nn.Module:
    """Return the MLP of the iBNN and APD papers."""
    return nn.Sequential(nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10))


def random_step(network: nn.Module, x: Tensor, y: Tensor, kind: str) -> Callable[[], None]:
    """Return a step of BayesAdapter."""
    method = bayesify.BayesAdapter(estimator=kind, lr=1e-4, log_std_lr=1e-4, prior_gradient="built-in")
    posterior = bayesify.convert(network, method).train()
    optimizer = method.make_optimizer(method.stages(posterior)[0].groups)
    method.prepare_optimizer(posterior, optimizer, 50_000)

    def step() -> None:
        optimizer.zero_grad()
        posterior.loss((x, y), num_data=50_000).total.backward()
        optimizer.step()

    return step


def case(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network and a batch."""
    torch.manual_seed(0)
    if name == "mlp":
        return mlp(), torch.randn(100, 784), torch.randint(10, (100,))
    network = CifarResNet(3) if name == "untrained" else pretrained("resnet20")
    return network, torch.randn(128, 3, 32, 32), torch.randint(10, (128,))


def ratios(plain: Callable[[], None], others: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Return the median of each function's time over the plain one's beside it."""
    for function in (plain, *others.values()):
        function(), function()
    found: dict[str, list[float]] = {name: [] for name in others}
    for _ in range(repeats):
        for name, function in others.items():
            base = seconds(plain)
            found[name].append(seconds(function) / base)
    return {name: round(statistics.median(values), 3) for name, values in found.items()}


def step_ratios(name: str, repeats: int, kinds: list[str]) -> dict[str, float]:
    """Return what a training step costs for each kind of noise, and with other libraries."""
    network, x, y = case(name)
    steps = {kind: random_step(network, x, y, kind) for kind in kinds}
    for label, (converted, divergence) in gaussian_networks(network).items():
        steps[label] = peer_step(converted, divergence, x, y)
    return ratios(plain_step(network, x, y), steps, repeats)


def prediction_ratios(repeats: int, draws: int = 20) -> dict[str, float]:
    """Return what a prediction with some draws costs; the last row has a deterministic prefix."""
    network, x, _ = case("resnet20")

    @torch.no_grad()
    def plain() -> None:
        network(x).softmax(-1)

    def ours(include: list[str] | None) -> Callable[[], None]:
        posterior = bayesify.convert(network, bayesify.BayesAdapter(), include=include)
        return lambda: bayesify.predict(posterior, x, num_draws=draws, seed=0) and None

    found = {"ours": ours(None)}
    for label, (converted, _) in gaussian_networks(network).items():
        found[label] = peer_prediction(converted, x, draws)
    found["ours, layer3 and head random"] = ours(["layer3", "linear"])
    return ratios(plain, found, repeats)


def peak(name: str, kind: str) -> None:
    """Print how much memory three steps take above what the network and the batch do, in megabytes (Linux only)."""
    network, x, y = case(name)
    step = plain_step(network, x, y) if kind == "plain" else random_step(network, x, y, kind)
    with torch.no_grad():
        network(x[:2])
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    before = _status("VmRSS")
    for _ in range(3):
        step()
    print((_status("VmHWM") - before) / 1024)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def memory(name: str, kinds: list[str]) -> dict[str, float]:
    """Return the peak memory of a step over that of a plain one, each in a process of its own."""

    def megabytes(kind: str) -> float:
        command = [sys.executable, "-m", "benchmarks.adapter", "--peak", name, kind]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])

    base = megabytes("plain")
    return {kind: round(megabytes(kind) / base, 2) for kind in kinds}


def layers(repeats: int) -> None:
    """Print what each arrangement costs for single convolutions of ResNet-20, forward and backward."""
    for channels, size in ((16, 32), (32, 16), (64, 8)):
        x = torch.randn(128, 1, channels, size, size, requires_grad=True)
        mean = torch.randn(channels, channels, 3, 3).mul(0.1).requires_grad_()
        std = torch.full_like(mean, 0.01).requires_grad_()
        operation = Convolution((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
        ways: dict[str, Callable[[], Tensor]] = {
            "exemplar": lambda x=x, m=mean, s=std, o=operation: functions.exemplar(x, m, s, o, 1),
            "flipout": lambda x=x, m=mean, s=std, o=operation: functions.flipout(x, m, s, o, 1),
            "flipout, weights each": lambda x=x, m=mean, s=std, o=operation: functions.flipout(
                x, m, s, o, 1, weights_each=True
            ),
        }

        def plain(x: Tensor = x, mean: Tensor = mean) -> Tensor:
            return nn.functional.conv2d(x[:, 0], mean, padding=1)

        pairs: dict[str, list[float]] = {name: [] for name in ways}
        grad = torch.randn(128, channels, size, size)
        for _ in range(repeats):
            for name, way in ways.items():
                base = seconds(lambda g=grad: plain().backward(g))
                pairs[name].append(seconds(lambda w=way, g=grad: w().backward(g[:, None])) / base)
        shown = ", ".join(f"{name} {statistics.median(values):.2f}" for name, values in pairs.items())
        print(f"{channels} channels at {size} x {size}: {shown}", flush=True)


def main() -> None:
    """Print the tables and keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--layers", action="store_true", help="time single convolutions")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        peak(*arguments.peak)
        return
    if arguments.layers:
        layers(arguments.repeats)
        return
    settle_allocator()
    parts: dict[str, Callable[[], dict[str, float]]] = {
        "step of ResNet-20": lambda: step_ratios("resnet20", arguments.repeats, arguments.kinds),
        "step of the MLP": lambda: step_ratios("mlp", 10 * arguments.repeats, arguments.kinds),
        "20 draws of ResNet-20": lambda: prediction_ratios(max(3, arguments.repeats // 3)),
        "peak memory of a step of ResNet-20": lambda: memory("resnet20", arguments.kinds),
    }
    for name, make in parts.items():
        keep("adapter", {name: make()}, repeats=arguments.repeats, kinds=arguments.kinds)


if __name__ == "__main__":
    main()
