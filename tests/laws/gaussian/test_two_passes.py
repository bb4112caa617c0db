"""Several passes in one graph: the gradient of their sum is the sum of their gradients."""

import itertools

import pytest
import torch
from torch import Tensor, nn

import bayesify
from bayesify import BayesAdapter

NORMS = {
    "batch": lambda: nn.BatchNorm1d(6),
    "batch, cumulative average": lambda: nn.BatchNorm1d(6, momentum=None),
    "batch, no statistics": lambda: nn.BatchNorm1d(6, track_running_stats=False),
    "instance": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 2)), nn.InstanceNorm1d(3, affine=True, track_running_stats=True), nn.Flatten()
    ),
}
KINDS = ("mean", "noisy", "drawn", "autocast")


def _pass(posterior: nn.Module, kind: str, x: Tensor) -> Tensor:
    if kind == "mean":
        with posterior.mean():
            return posterior(x).square().sum()
    if kind == "drawn":
        return posterior.draw(3)(x).square().sum()
    if kind == "autocast":
        with torch.autocast("cpu"):
            return posterior(x).float().square().sum()
    return posterior(x).square().sum()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("noise", ["exemplar", "flipout", "shared"])
@pytest.mark.slow
def test_passes_of_any_two_kinds_share_a_graph(norm: str, noise: str):
    """Consistency losses and distillation to the mean take such; an update of running statistics must not count."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), NORMS[norm](), nn.ReLU(), nn.Linear(6, 3))
    posterior = bayesify.convert(network, BayesAdapter(estimator=noise, start_std=(0.1, 0.2))).train()
    inputs = [torch.randn(5, 4) for _ in range(2)]
    start = {name: buffer.clone() for name, buffer in posterior.named_buffers()}
    for kinds in itertools.product(KINDS, repeat=2):
        gradients = []
        for together in (True, False):
            for name, buffer in start.items():
                posterior.get_buffer(name).data.copy_(buffer)
            torch.manual_seed(1)
            posterior.zero_grad()
            if together:
                sum(_pass(posterior, kind, x) for kind, x in zip(kinds, inputs, strict=True)).backward()
            else:
                for kind, x in zip(kinds, inputs, strict=True):
                    _pass(posterior, kind, x).backward()
            gradients.append([p.grad for p in posterior.parameters()])
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
