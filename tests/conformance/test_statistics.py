"""What a method trains is what it predicts with: one stochastic pass is as good in evaluation mode as in training."""

import copy
import functools

import pytest
import torch
from torch import Tensor, nn

import bayesify
from bayesify import ABNN, APD, IBNN, IVON, MAP, SGLD, SWAG, BayesAdapter, DeepEnsemble, Laplace, MCDropout, Posterior
from bayesify.methods import list_methods
from tests.marks import slow_but

ROWS = 128

METHODS = {
    "map": MAP(),
    "mc-dropout": MCDropout(p=0.2, insert_before="linear"),
    "deep-ensemble": DeepEnsemble(members=2, start="perturbed"),
    "swag": SWAG(),
    "abnn": ABNN(alpha=0.3),
    "abnn, statistics updated": ABNN(alpha=0.3, statistics="updated"),
    "bayes-adapter": BayesAdapter(start_std=(0.05, 0.1)),
    "bayes-adapter, flipout": BayesAdapter(start_std=(0.05, 0.1), estimator="flipout"),
    "ivon": IVON(start_std=0.07),
    "laplace": Laplace(structure="diagonal"),
    "sgld": SGLD(),
    "apd": APD(),
    "ibnn": IBNN(means_std=0.4),
    "ibnn, K = S": IBNN(means_std=0.4, repeats=4),
    "ibnn, two components": IBNN(means_std=0.4, components=2),
    "ibnn, the same component": IBNN(means_std=0.4, assign="same"),
}


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 24), nn.BatchNorm1d(24), nn.ReLU(),
        nn.Linear(24, 3),
    )  # fmt: skip


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 12, 2, padding=1), nn.BatchNorm2d(12), nn.ReLU(),
        nn.Conv2d(12, 12, 2), nn.BatchNorm2d(12), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3),
    )  # fmt: skip


@functools.cache
def _data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(ROWS) % 3
    centres = torch.randn(3, 8, generator=generator)
    return 1.2 * centres[labels] + torch.randn(ROWS, 8, generator=generator), labels


@functools.cache
def _trained(make) -> nn.Module:
    torch.manual_seed(1)
    network = make().train()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    inputs, labels = _data()
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(inputs), labels).backward()
        optimizer.step()
    return network.eval()


@torch.no_grad()
def _nll(posterior: Posterior, training: bool, passes: int) -> Tensor:
    """Return the NLL of passes of the kind that is trained; those of the two modes have the same noise, one by one."""
    posterior.train(training)
    found = []
    for seed in range(passes):
        torch.manual_seed(seed)
        found.append(posterior.loss(_data(), num_data=ROWS)["nll"])
    return torch.stack(found)


def _ratio(posterior: Posterior, passes: int) -> float:
    """Return the NLL in evaluation mode over that in training mode, once the statistics have settled."""
    _nll(posterior, True, 60)
    train, evaluation = (_nll(posterior, mode, passes) for mode in (True, False))
    change = (evaluation - train) / train.mean()
    assert change.std() < 0.01 * passes**0.5  # a fifth of what the test allows
    return 1 + float(change.mean())


@functools.cache
def _plain_ratio(make) -> float:
    return _ratio(bayesify.convert(_trained(make), MAP()), 2)


def test_every_method_is_in_the_table():
    assert {method.name for method in METHODS.values()} == set(list_methods())


@pytest.mark.parametrize(
    "make", [mlp, pytest.param(convolutions, marks=pytest.mark.slow)], ids=lambda make: make.__name__
)
@pytest.mark.parametrize("name", slow_but(("bayes-adapter", "ibnn"), METHODS))
@pytest.mark.slow
def test_a_pass_is_as_good_in_evaluation_mode_as_in_training_mode(name: str, make):
    """The NLL differs by 5 % at most; with components apart in the passes of a step it was up to 87 %."""
    posterior = bayesify.convert(copy.deepcopy(_trained(make)), METHODS[name])
    assert abs(_ratio(posterior, 80) - 1) < max(0.05, abs(_plain_ratio(make) - 1))
