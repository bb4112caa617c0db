"""What ABNN costs, as multiples of the plain network in the same run.

`BAYESIFY_DATA=... python -m benchmarks.abnn` times training steps and predictions of the pretrained ResNet-20,
interleaved with the plain network's, and measures what members take on disk. TorchUncertainty's ABNN stands beside ours
where it is installed (`benchmarks/requirements.txt`). `--matched` measures `Streamlined(members="matched")` alone: its
cost beside nine draws, and its variances of the centred logits beside those of many draws (`--draws`), on CIFAR-10's
first test images. Members are not trained: their scales and shifts are the network's, moved by random numbers of
`--apart` times their own root mean square.
"""

from __future__ import annotations

import argparse
import copy
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import bayesify
from bayesify import ABNN, DeepEnsemble, Streamlined
from bayesify.evaluation.checking import _interval, _rank_correlation
from benchmarks.timing import keep, medians, plain_step, settle_allocator
from experiments.data import load
from experiments.networks import cifar_inputs, pretrained

STEPS = {
    "all gradients": ABNN(train="all"),
    "all gradients, statistics updated": ABNN(train="all", statistics="updated"),
    "all gradients, statistics updated, no noise": ABNN(train="all", statistics="updated", alpha=0.0, eta=0.0),
    "norm only (the default)": ABNN(),
    "norm only, statistics updated": ABNN(statistics="updated"),
    "norm only, noise per channel": ABNN(noise="channel"),
    "norm only, noise per element": ABNN(noise="element"),
    "all gradients, updated, noise per element": ABNN(train="all", statistics="updated", noise="element"),
}
PREDICTIONS = {
    "ABNN, 3 members": ABNN(),
    "ABNN, one member": ABNN(members=1),
    "ABNN, 3 members, noise per element": ABNN(noise="element"),
    "deep ensemble of 20": DeepEnsemble(members=20, start="perturbed"),
}


def abnn_step(network: nn.Module, method: ABNN, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Return a training step of one member."""
    posterior = bayesify.convert(network, method).train()
    stage = method.stages(posterior)[0]
    optimizer = torch.optim.SGD(stage.groups, lr=1e-4, momentum=0.9, nesterov=True, weight_decay=5e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with stage.context():
            posterior.loss((x, y), num_data=50_000).total.backward()
        optimizer.step()

    return step


def predictions(network: nn.Module, x: Tensor, draws: int) -> dict[str, Callable[[], None]]:
    """Return the plain pass, and a prediction with `draws` draws of each posterior."""
    functions: dict[str, Callable[[], None]] = {"plain pass": torch.no_grad()(lambda: network(x))}
    for name, method in PREDICTIONS.items():
        posterior = bayesify.convert(network, method)

        def run(posterior: bayesify.Posterior = posterior) -> None:
            bayesify.predict(posterior, x, num_draws=draws, seed=0)

        functions[name] = run
    return functions


def storage(network: nn.Module, members: int) -> dict[str, float]:
    """Return the bytes of the network and its posterior over those of the network, after every member has moved."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "network.safetensors"
        save_file(network.state_dict(), plain)
        for name, method in {
            "ABNN": ABNN(members=members),
            "ABNN, statistics updated": ABNN(members=members, statistics="updated"),
            "deep ensemble": DeepEnsemble(members=members, start="perturbed"),
        }.items():
            posterior = bayesify.convert(network, method)
            with torch.no_grad():
                for tensor in posterior.members.state_dict().values():
                    tensor.add_(1)
            target = Path(folder) / name
            bayesify.save(posterior, target)
            added = sum(file.stat().st_size for file in target.glob("*.safetensors"))
            found[name] = round((plain.stat().st_size + added) / plain.stat().st_size, 3)
    return found


def peer() -> tuple[Callable[..., None], Callable[..., nn.Module]] | None:
    """Return what TorchUncertainty makes ABNN of: its noisy layers, and its ensemble of copies.

    Its `fit` trains all parameters with Lightning; a step here is that step without the trainer around it.
    """
    try:
        from tests.torchvision_stub import declare_torchvision_operators

        declare_torchvision_operators()
        from torch_uncertainty.methods import deep_ensembles
        from torch_uncertainty.post_processing.abnn import _replace_bn_layers
    except ImportError as error:
        print(f"TorchUncertainty is not in the table: {error}.")
        return None
    return _replace_bn_layers, deep_ensembles


def peer_storage(number: int) -> float:
    """Return the bytes of so many copies over those of the network."""
    plain, noisy = (
        sum(tensor.numel() * tensor.element_size() for tensor in network.state_dict().values())
        for network in (pretrained("resnet20"), *peer_copies(1, 0.1))
    )
    return round(number * noisy / plain, 3)


def peer_copies(number: int, alpha: float) -> list[nn.Module]:
    """Return noisy copies of the network, as TorchUncertainty stores one for each member and draw."""
    found = peer()
    assert found is not None
    network = pretrained("resnet20")
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d) and module.num_batches_tracked is None:
            module.num_batches_tracked = torch.tensor(0)
    found[0](network, alpha)
    return [copy.deepcopy(network) for _ in range(number)]


def matched(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return costs in plain passes, and how variances agree with those of many draws."""
    network, generator = pretrained("resnet20"), torch.Generator().manual_seed(0)
    x = cifar_inputs(load("cifar10", "test").inputs[: arguments.batch])
    posterior = bayesify.convert(network, ABNN())
    with torch.no_grad():
        for member in range(len(posterior.law.parts)):
            for tensor in posterior.law.member_tensors(member).values():
                size = tensor.square().mean().sqrt()
                tensor.add_(arguments.apart * size * torch.randn(tensor.shape, generator=generator))
    ways: dict[str, dict[str, Any]] = {
        "nine draws": {"num_draws": 9, "seed": 0},
        "streamlined, a pass for each member": {"how": "streamlined"},
        "streamlined, members matched": {"how": Streamlined(members="matched")},
    }

    def run(options: dict[str, Any]) -> Callable[[], Any]:
        return lambda: bayesify.predict(posterior, x, **options)

    plain = torch.no_grad()(lambda: network(x))
    costs = medians({"plain": plain, **{name: run(options) for name, options in ways.items()}}, arguments.repeats)
    many: Any = bayesify.predict(posterior, x, num_draws=arguments.draws, seed=1)
    wanted = many.logits_variance.sum(-1).double()
    found = {}
    for name, options in ways.items():
        made = run(options)()
        spread = made.logits_variance.sum(-1).double()
        low, high = _interval(spread, wanted) or (math.nan, math.nan)
        found[name] = {
            "cost": costs[name],
            "variance ratio": round(float(spread.sum() / wanted.sum()), 3),
            "rank": round(_rank_correlation(spread, wanted), 3),
            "low": round(low, 3),
            "high": round(high, 3),
            "information ratio": round(float(made.epistemic.sum() / many.epistemic.sum()), 3),
        }
    return found


def main() -> None:
    """Print the tables and keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--matched", action="store_true", help="members in one pass, alone")
    parser.add_argument("--apart", type=float, default=0.05)
    arguments = parser.parse_args()
    if arguments.matched:
        keep("abnn", {"members in one pass": matched(arguments)}, **vars(arguments))
        return
    settle_allocator()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(arguments.batch, 3, 32, 32, generator=generator)
    y = torch.randint(10, (arguments.batch,), generator=generator)
    steps = {"plain step, all gradients": plain_step(pretrained("resnet20").train(), x, y)}
    steps |= {name: abnn_step(pretrained("resnet20").train(), method, x, y) for name, method in STEPS.items()}
    passes = predictions(pretrained("resnet20"), x, arguments.draws)
    stored = storage(pretrained("resnet20"), 3)
    if (found := peer()) is not None:
        name = "TorchUncertainty (all gradients, noise per element)"
        steps[name] = plain_step(peer_copies(1, 0.1)[0].train(), x, y)
        ensemble = found[1](peer_copies(arguments.draws, 0.1)).eval()
        passes["TorchUncertainty"] = torch.no_grad()(lambda: ensemble(x))
        stored["TorchUncertainty, (M + 1) L copies, L = 3"] = peer_storage(4 * 3)
    tables = {
        "training step": medians(steps, arguments.repeats),
        "prediction": medians(passes, max(3, arguments.repeats // 3)),
        "storage, three members": stored,
    }
    keep("abnn", tables, **vars(arguments))


if __name__ == "__main__":
    main()
