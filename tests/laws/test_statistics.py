"""OOD rows apart: ordinary rows, and all statistics, are what they would be without them."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import bayesify
from bayesify import ABNN, IBNN, BayesAdapter, MCDropout, OODRegularizer
from bayesify.laws import Pass, ShapeError

EXACT = {"rtol": 1e-12, "atol": 1e-12}


class Derived(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: batch normalisation with an activation in it, and its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.silu(super().forward(x), inplace=True)


class OwnStatistics(nn.Module):
    """A normalisation that is none of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 1, 1))
        self.register_buffer("running_var", torch.ones(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.weight * x / self.running_var.sqrt()
        var = x.var((0, 2, 3), correction=0)[:, None, None]
        self.running_var.lerp_(var.detach(), 0.1)
        return self.weight * x / var.sqrt()


def batch_norm_act() -> nn.Module:
    from timm.layers import BatchNormAct2d

    return BatchNormAct2d(3)


NORMS = {
    "batch": lambda: nn.BatchNorm2d(3),
    "batch, cumulative average": lambda: nn.BatchNorm2d(3, momentum=None),
    "batch, no statistics": lambda: nn.BatchNorm2d(3, track_running_stats=False),
    "batch, no parameters": lambda: nn.BatchNorm2d(3, affine=False),
    "batch, neither": lambda: nn.BatchNorm2d(3, affine=False, track_running_stats=False),
    "batch of several processes": lambda: nn.SyncBatchNorm(3),
    "batch of several processes, no statistics": lambda: nn.SyncBatchNorm(3, track_running_stats=False),
    "derived": lambda: Derived(3),
    "derived, no statistics": lambda: Derived(3, track_running_stats=False),
    "timm's": batch_norm_act,
    "instance": lambda: nn.InstanceNorm2d(3, affine=True),
    "instance with statistics": lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
    "instance with statistics, no parameters": lambda: nn.InstanceNorm2d(3, track_running_stats=True),
    "statistics of its own": OwnStatistics,
}
QUIET = {
    "exemplar": BayesAdapter(start_std=(0.0, 0.0), estimator="exemplar"),
    "auto": BayesAdapter(start_std=(0.0, 0.0)),
    "shared": BayesAdapter(start_std=(0.0, 0.0), estimator="shared"),
    "mc-dropout": MCDropout(p=0.0, insert_before="linear"),
    "abnn": ABNN(alpha=0.0, eta=0.0, members=1, statistics="updated"),
    "ibnn": IBNN(means_std=0.0, start_std=(0.0, 0.0), repeats=1),
}
UNKNOWN = ("derived", "derived, no statistics", "statistics of its own")  # to ABNN
CASES = [(norm, method) for norm in NORMS for method in QUIET if method != "abnn" or norm not in UNKNOWN]
X = torch.randn(8, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
OOD = 50 * torch.randn(5, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) + 9


def _network(norm: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 2), NORMS[norm](), nn.Flatten(), nn.Linear(27, 3)).double()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("norm", "method"), CASES)
def test_the_ordinary_loss_and_all_statistics_do_not_see_ood_rows(norm: str, method: str, training: bool):
    posterior = bayesify.convert(_network(norm), QUIET[method]).train(training)
    batch = (X, torch.arange(8) % 3)
    alone = copy.deepcopy(posterior)
    for _ in range(2):
        found = posterior.loss(batch, num_data=8, ood=OOD, regularizer=OODRegularizer())
        torch.testing.assert_close(found["nll"], alone.loss(batch, num_data=8)["nll"], **EXACT)
    for name, buffer in alone.named_buffers():
        torch.testing.assert_close(posterior.get_buffer(name), buffer, **EXACT)


@pytest.mark.parametrize("method", ["exemplar", "shared"])
@pytest.mark.parametrize("norm", [norm for norm in NORMS if "instance" not in norm and "own" not in norm])
def test_ood_rows_are_normalised_by_the_others_statistics(norm: str, method: str):
    network = _network(norm).train()
    posterior = bayesify.convert(network, QUIET[method]).train()
    features = network[0](X).detach()
    found = posterior.outputs(torch.cat([X, OOD]), Pass(ood_rows=5))[8:]
    network.eval()
    network[1].running_mean, network[1].running_var = features.mean((0, 2, 3)), features.var((0, 2, 3), correction=0)
    torch.testing.assert_close(found, network(OOD), **EXACT)


@pytest.mark.parametrize("method", ["exemplar", "shared"])
@pytest.mark.parametrize("norm", [norm for norm in NORMS if "instance" in norm])
def test_instances_are_normalised_each_by_itself(norm: str, method: str):
    network = _network(norm).train()
    posterior = bayesify.convert(network, QUIET[method]).train()
    found = posterior.outputs(torch.cat([X, OOD]), Pass(ood_rows=5))
    torch.testing.assert_close(found, network(torch.cat([X, OOD])), **EXACT)


@pytest.mark.parametrize("method", ["exemplar", "shared"])
def test_rows_that_cannot_be_told_get_a_sentence(method: str):
    class Odd(nn.Module):
        """A batch in which examples are no rows: pairs of them are joined."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(torch.cat([x, x[:1]]))[: len(x)]

    posterior = bayesify.convert(Odd(), QUIET[method]).train()
    with pytest.raises(ShapeError, match="statistics='together'"):
        posterior.outputs(torch.randn(6, 4), Pass(ood_rows=2))
