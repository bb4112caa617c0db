"""MNIST as the APD experiments use it: pixels on [-1, 1], flat, and foreign images on the same scale."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify.data import load

__all__ = ["NETWORKS", "flat", "foreign", "loader", "mlp", "posteriors"]

NETWORKS = {"fcNN1": (784, 100, 10), "fcNN2": (784, 400, 400, 10)}


def mlp(*sizes: int, dropout: float = 0.0) -> nn.Sequential:
    """Return linear layers with ReLU, and dropout, between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        layers += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers[: -2 if dropout else -1])


def flat(images: Tensor) -> Tensor:
    """Map images on [0, 1], (N, C, H, W), to grey 28 x 28 ones on [-1, 1], (N, 784)."""
    grey = images.mean(1, keepdim=True)
    if grey.shape[-1] != 28:
        grey = interpolate(grey, size=28, mode="bilinear", antialias=True).clamp(0, 1)
    return 2 * grey.flatten(1) - 1


def loader(split: str, *, number: int | None = None, batch: int = 100) -> DataLoader[tuple[Tensor, ...]]:
    """Return batches of MNIST."""
    part = load("mnist", split)
    data = TensorDataset(flat(part.inputs[:number]), part.targets[:number])
    return DataLoader(data, batch, shuffle=split == "train")


def foreign(number: int = 2000) -> dict[str, Tensor]:
    """Return the five foreign sets, all on [-1, 1]; the paper's are on five scales."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(number, 784, generator=generator)
    sets = {
        "notMNIST": flat(load("notmnist", "test").inputs[:number]),
        "Omniglot": flat(load("omniglot", "test").inputs[:number]),
        "CIFAR-10, grey": flat(load("cifar10", "test").inputs[:number]),
    }
    return {**sets, "Gaussian": noise, "uniform": 2 * torch.rand(number, 784, generator=generator) - 1}


def posteriors(
    sizes: tuple[int, ...], train: DataLoader, val: DataLoader, *, epochs: int, sgld: bayesify.SGLD, steps: int,
    held_out: Tensor, num_samples: int, seed: int = 0,
) -> dict[str, bayesify.Posterior]:  # fmt: skip
    """Return the four of the paper, SGD, MC dropout, SGLD, APD, and the baselines of the distillation."""
    torch.manual_seed(seed)
    settings = {"epochs": epochs, "lr": 0.05, "weight_decay": 1e-3}
    options = {"progress": False, "seed": seed, "accuracy_tolerance": 1.0}
    made: dict[str, bayesify.Posterior] = {}
    for name, network, method in (
        ("SGD", mlp(*sizes), bayesify.MAP(**settings)),
        ("MC dropout", mlp(*sizes, dropout=0.5), bayesify.MCDropout(**settings)),
        ("SGLD", mlp(*sizes), sgld),
    ):
        made[name] = bayesify.convert(network, method)
        bayesify.fit(made[name], train, val_loader=val, **options)
    bank = bayesify.sample_bank(made["SGLD"], num_samples)
    made["APD"] = bayesify.distill(bank, inputs=held_out, steps=steps, seed=seed, progress=False)
    made["PCA"] = bayesify.distill(bank, "pca", residual=True, progress=False)
    made["mixture"] = bayesify.distill(bank, "mixture", components=min(60, len(bank) // 4), progress=False)
    return made
