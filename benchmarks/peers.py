"""Networks with Gaussian weights as other libraries make them, to stand beside ours.

They are built with the libraries' own layers and converters; what is not installed is left out with a word. How to make
an environment with them is in `benchmarks/requirements.txt`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

__all__ = ["gaussian_networks", "peer_prediction", "peer_step"]

Divergence = Callable[[nn.Module], Tensor]


def gaussian_networks(network: nn.Module) -> dict[str, tuple[nn.Module, Divergence]]:
    """Return copies of a network whose linear layers and convolutions are Gaussian, and the functions for their KL."""
    found: dict[str, tuple[nn.Module, Divergence]] = {}
    for make in (_bayesian_torch, _torch_uncertainty):
        with suppress(ImportError):
            found.update(make(network))
    if len(found) < 3:
        print("bayesian-torch or TorchUncertainty is not installed, and not in the table.")
    return found


def _bayesian_torch(network: nn.Module) -> dict[str, tuple[nn.Module, Divergence]]:
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

    found: dict[str, tuple[nn.Module, Divergence]] = {}
    for kind in ("Reparameterization", "Flipout"):
        converted = copy.deepcopy(network)
        dnn_to_bnn(
            converted,
            {
                "prior_mu": 0.0,
                "prior_sigma": 1.0,
                "posterior_mu_init": 0.0,
                "posterior_rho_init": -5.0,
                "type": kind,
                "moped_enable": True,
                "moped_delta": 0.01,
            },
        )
        found[f"bayesian-torch, {kind.lower()}"] = (converted, get_kl_loss)
    return found


def _torch_uncertainty(network: nn.Module) -> dict[str, tuple[nn.Module, Divergence]]:
    from tests.torchvision_stub import declare_torchvision_operators

    declare_torchvision_operators()
    from torch_uncertainty.layers.bayesian import BayesConv2d, BayesLinear
    from torch_uncertainty.losses.bayesian import KLDiv

    converted = copy.deepcopy(network)
    for name, module in list(converted.named_modules()):
        if isinstance(module, nn.Conv2d):
            layer = BayesConv2d(
                module.in_channels, module.out_channels, module.kernel_size, module.stride, module.padding,
                module.dilation, bias=module.bias is not None,
            )  # fmt: skip
        elif isinstance(module, nn.Linear):
            layer = BayesLinear(module.in_features, module.out_features, bias=module.bias is not None)
        else:
            continue
        layer.weight_mu.data.copy_(module.weight.data)
        if module.bias is not None:
            layer.bias_mu.data.copy_(module.bias.data)
        owner, _, last = name.rpartition(".")
        setattr(converted.get_submodule(owner), last, layer)

    return {"TorchUncertainty's Bayesian layers": (converted, lambda made: KLDiv(made)())}


def peer_step(
    network: nn.Module, divergence: Divergence, x: Tensor, y: Tensor, num_data: int = 50_000
) -> Callable[[], None]:
    """Return a step of mean NLL + KL/n."""
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.9, nesterov=True)
    network.train()

    def step() -> None:
        optimizer.zero_grad()
        loss = cross_entropy(network(x), y)
        (loss + divergence(network) / num_data).backward()
        optimizer.step()

    return step


def peer_prediction(network: nn.Module, x: Tensor, draws: int) -> Callable[[], None]:
    """Return the average over draws."""
    network.eval()

    @torch.no_grad()
    def predict() -> None:
        torch.stack([network(x).softmax(-1) for _ in range(draws)]).mean(0)

    return predict
