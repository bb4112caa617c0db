"""What `torch.compile` gives: a draw, and a prediction without draws, each as one graph without a break.

`OMP_NUM_THREADS=1 python -m benchmarks.compiled mlp resnet20` prints times as multiples of the plain network's pass, of
the same batch, interleaved: a draw as a plain network (`posterior.draw(0).network()`), `predict(how="streamlined")`,
and its program (`export(...).module()`), each as it is and compiled with `fullgraph=True`, which fails at a graph
break. The compiler's own time is not in them.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from bayesify import BayesAdapter, convert, export, predict
from benchmarks.timing import keep, medians
from experiments.networks import CifarResNet


def mlp() -> tuple[nn.Module, Tensor]:
    """Return the MLP 784-400-400-10 and images for it."""
    layers = [nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10)]
    return nn.Sequential(*layers).eval(), torch.randn(128, 784)


def resnet20() -> tuple[nn.Module, Tensor]:
    """Return ResNet-20 and images for it."""
    return CifarResNet(3).eval(), torch.randn(32, 3, 32, 32)


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {"mlp": mlp, "resnet20": resnet20}


def measured(name: str, repeats: int) -> dict[str, float]:
    """Return the times of one network over that of its plain pass."""
    torch.manual_seed(0)
    network, x = NETWORKS[name]()
    posterior = convert(network, BayesAdapter())
    drawn = posterior.draw(0).network().eval()
    program = export(posterior, x[:2]).module()
    compiled = torch.compile(drawn, fullgraph=True)
    whole = torch.compile(program, fullgraph=True)
    functions: dict[str, Callable[[], object]] = {
        "plain": lambda: network(x),
        "draw": lambda: drawn(x),
        "draw, compiled": lambda: compiled(x),
        "streamlined": lambda: predict(posterior, x, how="streamlined"),
        "streamlined, program": lambda: program(x),
        "streamlined, compiled": lambda: whole(x),
    }
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler, about itself
        found, expected = whole(x), predict(posterior, x, how="streamlined")
        torch.testing.assert_close(found["probs"], expected.probs, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(compiled(x), drawn(x), rtol=1e-3, atol=1e-4)
        return medians(functions, repeats)  # type: ignore[arg-type]


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", choices=sorted(NETWORKS), default=sorted(NETWORKS))
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    for name in arguments.networks:
        keep("compiled", {name: measured(name, arguments.repeats)}, threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
