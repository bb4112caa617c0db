"""What Laplace costs, as multiples of the plain pass over the same batch in the same run.

`BAYESIFY_DATA=... python -m benchmarks.laplace` times the pass that collects the curvature, and predictions, of the
pretrained ResNet-20 and of an MLP 784-400-400-10, interleaved with the plain network's pass. laplace-torch stands
beside ours where it is installed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import Laplace
from benchmarks.timing import keep
from experiments.networks import pretrained

FITS = {
    "last layer": Laplace(),
    "diagonal, exact": Laplace(structure="diagonal"),
    "diagonal, one drawn label": Laplace(structure="diagonal", mc_labels=1),
    "diagonal, empirical Fisher": Laplace(structure="diagonal", curvature="fisher"),
    "kronecker, exact": Laplace(structure="kronecker"),
    "kronecker, one drawn label": Laplace(structure="kronecker", mc_labels=1),
}
PREDICTIONS: dict[str, dict[str, Any]] = {
    "mean network": {"how": "mean"},
    "closed form": {"how": "closed-form"},
    "closed form, 20 draws of logits": {"how": "closed-form", "num_draws": 20},
    "20 draws of the last layer's weights": {"how": "sampling", "num_draws": 20},
}


def case(name: str, rows: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network with a batch."""
    torch.manual_seed(0)
    if name == "resnet20":
        network: nn.Module = pretrained("resnet20")
        x = torch.randn(rows, 3, 32, 32)
    else:
        layers = nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10)
        network, x = nn.Sequential(*layers), torch.rand(rows, 784)
    return network.eval(), x, torch.randint(10, (rows,))


def ratios(functions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Return the median time of each function over that of the first, run in turn."""
    for function in functions.values():
        function()
    rounds = [{name: _seconds(function) for name, function in functions.items()} for _ in range(repeats)]
    plain = next(iter(functions))
    return {name: round(statistics.median(r[name] / r[plain] for r in rounds), 3) for name in functions}


def _seconds(function: Callable[[], Any]) -> float:
    # With one thread the processor's time is the work, whatever else the machine does.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    function()
    return clock() - began


def fits(network: nn.Module, x: Tensor, y: Tensor, kinds: list[str]) -> dict[str, Callable[[], Any]]:
    """Return the plain pass, and the look at the same batch for each kind of curvature."""
    functions: dict[str, Callable[[], Any]] = {"plain pass": torch.no_grad()(lambda: network(x))}
    for name in kinds:
        posterior = bayesify.convert(network, FITS[name]).eval()
        survey = FITS[name].survey(posterior, len(x))
        survey.reset()
        functions[name] = lambda survey=survey: survey.look((x, y))
    return functions


def predictions(network: nn.Module, x: Tensor, y: Tensor) -> dict[str, Callable[[], Any]]:
    """Return the plain pass, and predictions of a last layer."""
    posterior = bayesify.convert(network, Laplace())
    bayesify.fit(posterior, [(x, y)], num_data=50_000, progress=False, accuracy_tolerance=1.0)
    functions: dict[str, Callable[[], Any]] = {"plain pass": torch.no_grad()(lambda: network(x))}
    for name, options in PREDICTIONS.items():
        functions[name] = lambda options=options: bayesify.predict(posterior, x, seed=0, **options)
    try:
        from laplace import Laplace as Peer
    except ImportError:
        return functions
    peer = Peer(network, "classification", subset_of_weights="last_layer", hessian_structure="full")
    peer.fit(DataLoader(TensorDataset(x, y), len(x)))
    functions["laplace-torch, probit"] = torch.no_grad()(lambda: peer(x, link_approx="probit"))
    return functions


def main() -> None:
    """Print the tables and keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--networks", nargs="*", default=["resnet20", "mlp"])
    parser.add_argument("--parts", nargs="*", default=["predictions", "curvature"])
    arguments = parser.parse_args()
    settings = {"repeats": arguments.repeats, "rows": arguments.rows}
    for name in arguments.networks:
        network, x, y = case(name, arguments.rows)
        if "predictions" in arguments.parts:
            found = ratios(predictions(network, x, y), arguments.repeats)
            keep("laplace", {f"predictions of {name}": found}, **settings)
        if "curvature" in arguments.parts:
            found = ratios(fits(network, x, y, list(FITS)), max(3, arguments.repeats // 5))
            keep("laplace", {f"curvature of a batch of {name}": found}, **settings)


if __name__ == "__main__":
    main()
