"""Bayesian linear regression, whose mean-field posterior is known: what BayesAdapter finds beside the answer.

`python -m experiments.adapter_regression` fits y = w.x + e for each kind of noise, and prints the fitted means and
standard deviations beside those of the best diagonal Gaussian, the exact mean and 1 / sqrt(diag(precision)); twenty
seconds. The last column is the standard deviation of the exact posterior's marginals, which no diagonal Gaussian has.
Rows go to `experiments/results/adapter_regression.json`.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import Tensor, nn

import bayesify
from bayesify import Gaussian
from experiments.records import RESULTS, Records

NOISE_STD, PRIOR_STD, ROWS = 0.5, 1.5, 40


def problem() -> tuple[Tensor, Tensor]:
    """Return inputs that are correlated, and targets."""
    torch.manual_seed(0)
    mixing = torch.tensor([[1.0, 0.6, 0.0], [0.0, 1.0, 0.3], [0.0, 0.0, 1.0]], dtype=torch.float64)
    x = torch.randn(ROWS, 3, dtype=torch.float64) @ mixing
    weights = torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    return x, x @ weights + NOISE_STD * torch.randn(ROWS, 1, dtype=torch.float64)


def measured(noise: str, x: Tensor, y: Tensor, epochs: int) -> dict[str, list[float]]:
    """Return the means and standard deviations that BayesAdapter finds."""
    method = bayesify.BayesAdapter(
        estimator=noise, start_std=(0.02, 0.02), prior_std=PRIOR_STD, lr=0.02, log_std_lr=0.1, epochs=epochs,
        schedule="cosine", log_std_schedule="cosine",
    )  # fmt: skip
    network = nn.Linear(3, 1, bias=False).double()
    posterior = bayesify.convert(network, method, likelihood=Gaussian(noise_std=NOISE_STD))
    bayesify.fit(posterior, [(x, y)] * 4, num_data=ROWS, progress=False)
    found = {"mean": posterior.network.weight[0], "std": posterior.law.log_std.get_parameter("weight").exp()[0]}
    return {name: [round(value, 6) for value in values.tolist()] for name, values in found.items()}


def answer(x: Tensor, y: Tensor) -> dict[str, list[float]]:
    """Return the best diagonal Gaussian, and the standard deviations of the exact posterior's marginals."""
    precision = x.T @ x / NOISE_STD**2 + torch.eye(3, dtype=torch.float64) / PRIOR_STD**2
    mean = torch.linalg.solve(precision, x.T @ y / NOISE_STD**2)[:, 0]
    found = {"mean": mean, "std": precision.diagonal().rsqrt(), "marginal": precision.inverse().diagonal().sqrt()}
    return {name: [round(value, 6) for value in values.tolist()] for name, values in found.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trial", action="store_true", help="one epoch, and nothing is kept")
    trial = parser.parse_args().trial
    epochs = 1 if trial else 300
    path = None if trial else RESULTS / "adapter_regression.json"
    records = Records(path, {"script": "adapter_regression", "epochs": epochs})
    x, y = problem()
    exact = records.row("exact", partial(answer, x, y))
    mean, std, marginal = (exact[key] for key in ("mean", "std", "marginal"))
    print(f"{'noise':10} weight {'mean':>9} {'exact':>9} {'std':>8} {'mean-field':>10} {'marginal':>9}")
    for noise in ("local", "exemplar", "flipout", "shared"):
        row = records.row(noise, partial(measured, noise, x, y, epochs))
        for index, (m, s) in enumerate(zip(row["mean"], row["std"], strict=True)):
            print(
                f"{noise:10} {index:6} {m:9.4f} {mean[index]:9.4f} {s:8.4f} {std[index]:10.4f} {marginal[index]:9.4f}"
            )


if __name__ == "__main__":
    main()
