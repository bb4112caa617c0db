"""Gradient variance of the kinds of noise in BayesAdapter's toy (its figure 3): one convolution, squared error.

`python -m experiments.adapter_gradients` prints the variance of each kind's gradients, summed over weights, as a
multiple of exemplar noise's, over 500 repeats (about three minutes on two cores). The paper has more than 100 for one
shared draw. Rows go to `experiments/results/adapter_gradients.json`.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import bayesify
from experiments.records import RESULTS, Records

PAPER = {"shared": "> 100", "exemplar": "1", "flipout": "-", "auto": "-"}


def variances(kind: str, *, channels: int, rows: int, size: int, repeats: int) -> Tensor:
    """Return the summed variances of the gradients of the means and of psi, (2,)."""
    torch.manual_seed(0)
    x, target = torch.rand(rows, channels, size, size), torch.rand(rows, 16, size, size)
    network = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(network.weight)
    posterior = bayesify.convert(network, bayesify.BayesAdapter(estimator=kind), likelihood="regression")
    parameters = [posterior.network.weight, posterior.law.log_std.get_parameter("weight")]
    gradients = []
    for _ in range(repeats):
        loss = (posterior(x) - target).square().mean()
        gradients.append(torch.stack([g.flatten() for g in torch.autograd.grad(loss, parameters)]))
    return torch.stack(gradients).var(0).sum(1)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", type=int, default=3, help="of the input; with 16 auto takes flipout")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=500)
    parser.add_argument("--trial", action="store_true", help="a few small images, and nothing is kept")
    options = vars(parser.parse_args())
    trial = options.pop("trial")
    if trial:
        options |= {"rows": 4, "size": 4, "repeats": 4}
    records = Records(None if trial else RESULTS / "adapter_gradients.json", {"script": "adapter_gradients", **options})

    def measured(kind: str) -> dict[str, Any]:
        return dict(zip(("means", "psi"), variances(kind, **options).tolist(), strict=True))

    name = f"{options['channels']} channels"
    made = {kind: records.row(f"{kind}, {name}", partial(measured, kind)) for kind in PAPER}
    print(f"{'noise':10} {'means':>8} {'psi':>8} {'paper':>8}")
    for kind, values in made.items():
        means, log_stds = (values[key] / made["exemplar"][key] for key in ("means", "psi"))
        print(f"{kind:10} {means:8.2f} {log_stds:8.2f} {PAPER[kind]:>8}")


if __name__ == "__main__":
    main()
