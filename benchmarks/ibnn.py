"""What iBNN costs, as multiples of the plain network in the same run, and how small its posterior is.

`python -m benchmarks.ibnn` times training steps and predictions of ResNet-20, interleaved with the plain network's,
measures the memory of a prediction, and prints the size of the posterior for the networks of the paper's Table 1.
`--part sizes` prints the sizes alone, in a second. Results go to `benchmarks/results/ibnn.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import bayesify
from bayesify import IBNN
from bayesify.laws import InputFactorLaw
from benchmarks.timing import keep, medians, plain_step, settle_allocator
from experiments.networks import CifarResNet

STEPS = {
    "S = 1": IBNN(repeats=1),
    "S = 2 (the default)": IBNN(repeats=2),
    "S = 1, weights frozen": IBNN(repeats=1, weights="frozen"),
    "S = 1, KL by Monte Carlo, K = 16": IBNN(repeats=1, components=16, kl="mc"),
}
# Nodes as the paper counts them, but for LeNet, where it has 23: only those of convolutions.
PAPER = {"LeNet": 23, "VGG-16": 5251, "ResNet-50": None, "WRN-28-10": 9475}


def ibnn_step(method: IBNN, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Return a training step of the posterior."""
    posterior = bayesify.convert(CifarResNet(3).train(), method)
    optimizer = method.make_optimizer(method.stages(posterior)[0].groups)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        posterior.loss((x, y), num_data=50_000).total.backward()
        optimizer.step()

    return step


def predictions(x: Tensor, draws: int) -> dict[str, Callable[[], None]]:
    """Return the plain pass, a prediction with `draws` draws, and one with the mean."""
    network = CifarResNet(3).eval()
    posterior = bayesify.convert(network, IBNN())
    return {
        "plain pass": torch.no_grad()(lambda: network(x)),
        f"{draws} draws": lambda: bayesify.predict(posterior, x, num_draws=draws, seed=0),
        "the mean": lambda: bayesify.predict(posterior, x, how="mean"),
    }


def peak_bytes(function: Callable[[], None]) -> int:
    """Return the largest number of bytes that a function holds at once, of what it allocates."""
    function()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        function()
    held = peak = 0
    for event in sorted(found.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def memory(x: Tensor) -> dict[str, float]:
    """Return the peak memory of predictions over that of one draw."""
    posterior = bayesify.convert(CifarResNet(3).eval(), IBNN())
    peaks = {
        f"{draws} draws": peak_bytes(lambda draws=draws: bayesify.predict(posterior, x, num_draws=draws, seed=0))
        for draws in (1, 20)
    }
    return {name: round(value / peaks["1 draws"], 3) for name, value in peaks.items()}


# -- sizes ------------------------------------------------------------------------------------------------------------


def lenet(classes: int = 10) -> nn.Module:
    """Return the LeNet of the authors' README, for 28 x 28 images."""
    convolutions = nn.Conv2d(1, 6, 5), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.MaxPool2d(2), nn.Conv2d(16, 120, 4)
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(120, 64), nn.Linear(64, classes))


def vgg16(classes: int = 10) -> nn.Module:
    """Return VGG-16 for 32 x 32 images, with the small classifier of the paper."""
    widths = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    convolutions = [nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths)]
    return nn.Sequential(*convolutions, nn.Linear(512, 512), nn.Linear(512, 512), nn.Linear(512, classes))


def wide_resnet(classes: int = 10) -> nn.Module:
    """Return the convolutions of WRN-28-10, shortcuts included."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, bias=False)]
    width = 16
    for out in (160, 320, 640):
        for block in range(4):
            layers += [nn.Conv2d(width, out, 3, bias=False), nn.Conv2d(out, out, 3, bias=False)]
            layers += [nn.Conv2d(width, out, 1, bias=False)] if block == 0 else []
            width = out
    return nn.Sequential(*layers, nn.Linear(640, classes))


def resnet50(classes: int = 1000) -> nn.Module:
    """Return the convolutions of ResNet-50, shortcuts included."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, bias=False)]
    width = 64
    for inner, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            sizes = ((width, inner, 1), (inner, inner, 3), (inner, 4 * inner, 1))
            layers += [nn.Conv2d(a, b, k, bias=False) for a, b, k in sizes]
            layers += [nn.Conv2d(width, 4 * inner, 1, bias=False)] if block == 0 else []
            width = 4 * inner
    return nn.Sequential(*layers, nn.Linear(width, classes))


def sizes(components: int) -> list[dict[str, Any]]:
    """Return, for each network, its weights, the nodes, and what K components take of the weights."""
    rows = []
    for name, make in {"LeNet": lenet, "VGG-16": vgg16, "ResNet-50": resnet50, "WRN-28-10": wide_resnet}.items():
        with torch.device("meta"):
            network = make()
        weights = sum(p.numel() for p in network.parameters())
        nodes = sum(m.in_channels if isinstance(m, nn.Conv2d) else m.in_features for m in _layers(network))
        share = {"weights per node": round(weights / nodes), f"K = {components}": 2 * components * nodes / weights}
        rows.append({"network": name, "weights": weights, "nodes": nodes, "paper": PAPER[name], **share})
    posterior = bayesify.convert(lenet(), IBNN(components=components))  # the count is that of a real conversion
    assert isinstance(posterior.law, InputFactorLaw)
    assert posterior.law.component_means.shape[1] == rows[0]["nodes"]
    return rows


def _layers(network: nn.Module) -> list[Any]:
    return [module for module in network.modules() if isinstance(module, nn.Conv2d | nn.Linear)]


def main() -> None:
    """Print the tables and keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("all", "sizes"), default="all")
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    table = sizes(4)
    for row in table:
        print(
            "  ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
        )
    if arguments.part == "sizes":
        return
    settle_allocator()
    torch.manual_seed(0)
    x, y = torch.randn(arguments.batch, 3, 32, 32), torch.randint(10, (arguments.batch,))
    doubled = plain_step(CifarResNet(3), x.repeat(2, 1, 1, 1), y.repeat(2))
    steps = {"plain step": plain_step(CifarResNet(3), x, y), "plain step, twice the batch": doubled}
    steps |= {name: ibnn_step(method, x, y) for name, method in STEPS.items()}
    tables = {
        "sizes": table,
        "training step": medians(steps, arguments.repeats),
        "prediction": medians(predictions(x, arguments.draws), max(3, arguments.repeats // 3)),
        "memory of a prediction": memory(x),
    }
    keep("ibnn", tables, **vars(arguments))


if __name__ == "__main__":
    main()
