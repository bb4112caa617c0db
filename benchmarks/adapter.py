"""What a training step with Gaussian weights costs, as a multiple of a plain one in the same run.

`BAYESIFY_DATA=... python -m benchmarks.adapter` times forward, backward and optimiser step of the pretrained ResNet-20
(batch 128) and of an MLP 784-400-400-10 (batch 100) for each kind of noise, interleaved with the plain network, and
prints medians of ratios and the peak memory of a step. `--layers` times single convolutions instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bayesify
from bayesify.posteriors._gaussian import _functions
from bayesify.posteriors._gaussian._operations import Convolution
from experiments.networks import CifarResNet, pretrained

RESULTS = Path(__file__).parent / "results" / "adapter.json"
KINDS = ("auto", "exemplar", "flipout", "shared")


def mlp() -> nn.Module:
    """Return the MLP of the iBNN and APD papers."""
    return nn.Sequential(nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10))


def plain_step(network: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Return a step of plain training."""
    optimiser = torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.9, nesterov=True, weight_decay=2e-4)
    network.train()

    def step() -> None:
        optimiser.zero_grad()
        cross_entropy(network(x), y).backward()
        optimiser.step()

    return step


def random_step(network: nn.Module, x: Tensor, y: Tensor, kind: str) -> Callable[[], None]:
    """Return a step of BayesAdapter."""
    method = bayesify.BayesAdapter(noise=kind, lr=1e-4, log_std_lr=1e-4, prior_gradient="built-in")
    posterior = bayesify.convert(network, method).train()
    optimiser = method.make_optimiser(method.stages(posterior)[0].groups)
    method.prepare_optimiser(posterior, optimiser, 50_000)

    def step() -> None:
        optimiser.zero_grad()
        posterior.loss((x, y), num_data=50_000).total.backward()
        optimiser.step()

    return step


def seconds(function: Callable[[], object]) -> float:
    """Return the time of one call."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def case(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network and a batch."""
    torch.manual_seed(0)
    if name == "mlp":
        return mlp(), torch.randn(100, 784), torch.randint(10, (100,))
    network = CifarResNet(3) if name == "untrained" else pretrained("resnet20")
    return network, torch.randn(128, 3, 32, 32), torch.randint(10, (128,))


def ratios(name: str, repeats: int, kinds: list[str]) -> dict[str, float]:
    """Return, for each kind of noise, the median of its step's time over the plain one's beside it."""
    network, x, y = case(name)
    plain = plain_step(network, x, y)
    steps = {kind: random_step(network, x, y, kind) for kind in kinds}
    for step in (plain, *steps.values()):
        step(), step()
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(repeats):
        for kind, step in steps.items():
            base = seconds(plain)
            found[kind].append(seconds(step) / base)
    return {kind: round(statistics.median(values), 3) for kind, values in found.items()}


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
            "exemplar": lambda x=x, m=mean, s=std, o=operation: _functions.exemplar(x, m, s, o, 1),
            "flipout": lambda x=x, m=mean, s=std, o=operation: _functions.flipout(x, m, s, o, 1),
            "flipout, weights each": lambda x=x, m=mean, s=std, o=operation: _functions.flipout(
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
    record: dict[str, object] = {"threads": torch.get_num_threads()}
    for name in ("resnet20", "mlp"):
        record[name] = {
            "time": ratios(name, arguments.repeats, arguments.kinds),
            "memory": memory(name, arguments.kinds) if name == "resnet20" else None,
        }
        print(name, record[name], flush=True)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
