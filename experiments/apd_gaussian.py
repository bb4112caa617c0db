"""SGLD, SGHMC and pSGLD on targets that are known: Gaussians, no data at all, and Bayesian linear regression.

`python -m experiments.apd_gaussian` runs many independent chains of each, compares means and covariances with the
exact posterior, and prints how far they are, in standard errors, beside the largest deviation that is expected by
chance. A minute on one core; `--trial` seconds. Rows go to `experiments/results/apd_gaussian.json`.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.methods.langevin import Langevin
from experiments.apd_common import arguments_of, rows_of

FALSE_ALARMS = 1e-3  # of a row: the bound is the quantile for all its figures together
# How many steps, and their size: lr/2 times the largest curvature of the mean loss, preconditioned where it is, is
# about a hundredth, so that the bias is far below what so many chains can show.
KINDS = {"sgld": 5000, "sghmc": 2500, "psgld": 5000}


def regression() -> tuple[Tensor, Tensor, int]:
    """Return precision and mean of the exact posterior of a linear model, noise .5 and prior N(0, 1), and n."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(50, 3, dtype=torch.float64, generator=generator)
    y = x @ torch.tensor([1.0, -0.5, 0.2], dtype=torch.float64) + 0.5
    y = y + 0.5 * torch.randn(50, dtype=torch.float64, generator=generator)
    design = torch.cat([x, torch.ones(50, 1, dtype=torch.float64)], 1)
    precision = design.T @ design / 0.25 + torch.eye(4, dtype=torch.float64)
    return precision, torch.linalg.solve(precision, design.T @ y / 0.25), 50


def targets() -> dict[str, tuple[Tensor, Tensor, int]]:
    """Return precision, mean and number of data of each target, exp(-1/2 (w - mean)' precision (w - mean))."""
    correlated = torch.tensor([[2.0, 0.6, 0.0], [0.6, 1.0, -0.3], [0.0, -0.3, 0.5]], dtype=torch.float64)
    mean = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    return {
        "no data": (100 * 0.5 * torch.eye(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64), 100),
        "Gaussian": (100 * correlated, mean, 100),
        "linear regression": regression(),
    }


def row(target: tuple[Tensor, Tensor, int], kind: str, chains: int, share: float, seed: int) -> dict[str, Any]:
    """Run chains with exact gradients, and compare the last states with the target."""
    precision, mean, n = target
    steps, largest = KINDS[kind], float(torch.linalg.eigvalsh(precision).max())
    # Gradients are about as large as the roots of the curvatures over n, by which pSGLD divides.
    lr = {"sgld": 0.02 * n / largest, "sghmc": 0.008 * n / largest, "psgld": 0.02 / math.sqrt(largest)}[kind]
    covariance = torch.linalg.inv(precision)
    factor = torch.linalg.cholesky(covariance)
    noise = torch.randn(chains, len(mean), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    weights = nn.Parameter(mean + 2 * noise @ factor.T)  # with four times the variance
    sampler = Langevin([{"params": [weights]}], torch.tensor(n), kind=kind, lr=lr, friction=0.1, seed=seed)
    for group in sampler.param_groups:
        group["adapt_steps"] = int(0.1 * steps * share)
    for _ in range(max(10, int(steps * share))):
        weights.grad = (weights.detach() - mean) @ precision / n
        sampler.step()
    white = torch.linalg.solve_triangular(factor, (weights.detach() - mean).T, upper=False)
    products = white @ white.T / chains
    size = len(mean)
    figures = {
        "mean": white.mean(1).abs().max() * math.sqrt(chains),
        "variances": (products.diagonal() - 1).abs().max() * math.sqrt(chains / 2),
        "covariances": (products - products.diagonal().diag()).abs().max() * math.sqrt(chains),
    }
    number = 2 * size + size * (size - 1) // 2
    bound = math.sqrt(2) * float(torch.special.erfinv(torch.tensor(1 - FALSE_ALARMS / number, dtype=torch.float64)))
    return {
        **{f"{name}, standard errors": round(float(value), 2) for name, value in figures.items()},
        "bound": round(bound, 2),
        "relative error of the variance": round(float(products.diagonal().mean()) - 1, 4),
        "lr": round(lr, 5),
        "chains": chains,
    }


def main() -> None:
    """Make the rows."""
    arguments = arguments_of(__doc__, "apd_gaussian", chains=2000)
    rows = rows_of("apd_gaussian", arguments)
    chains, share = (50, 0.02) if arguments.trial else (arguments.chains, 1.0)
    # Every row has noise of its own.
    for seed, ((name, target), kind) in enumerate(product(targets().items(), KINDS)):
        rows.row(f"{name}, {kind}", partial(row, target, kind, chains, share, seed))


if __name__ == "__main__":
    main()
