"""A prior that ran to an extreme is told of, with its figure; one that did not is not."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import Laplace
from bayesify.laws.laplace import prior_without_effect

STRUCTURES = ("last-layer", "diagonal", "kronecker")


def clusters(rows: int, noise: float, seed: int) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(rows) % 3
    return TensorDataset(3 * torch.eye(3, 4)[labels] + noise * torch.randn(rows, 4, generator=random), labels)


def trained(data: TensorDataset, steps: int) -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(data.tensors[0]), data.tensors[1]).backward()
        optimizer.step()
    return network


def fitted(network, data, **options):
    """Fit, and return the posterior with what it was warned of."""
    method = Laplace(**{key: options.pop(key) for key in ("structure", "prior_precision") if key in options})
    posterior = bayesify.convert(network, method)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bayesify.fit(posterior, DataLoader(data, batch_size=30), progress=False, **options)
    return posterior, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.slow
def test_both_extremes_on_one_small_network_are_told(structure):
    """On a network that was trained until nothing is left to learn, without and with validation data."""
    data = clusters(90, 0.3, seed=0)
    network = trained(data, 400)
    wide, texts = fitted(network, data, structure=structure)
    assert any("The NLL of 90 training examples rose" in text and "too wide" in text for text in texts)
    narrow, texts = fitted(network, data, structure=structure, val_loader=[clusters(60, 0.3, seed=1).tensors])
    assert wide.law.prior_precision.item() < 10 < 1e3 < narrow.law.prior_precision.item()
    assert any(f"{narrow.law.prior_precision.item():.3g}" in text and "the data say nothing" in text for text in texts)
    assert bayesify.predict(narrow, data.tensors[0], seed=0).epistemic.mean() < 1e-4


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.slow
def test_a_network_with_something_left_to_learn_is_no_warning(structure):
    data = clusters(600, 1.6, seed=0)
    network = trained(data, 30)
    val_loaders = [None, [clusters(300, 1.6, seed=1).tensors]]
    for val_loader in val_loaders[: 1 if structure == "diagonal" else 2]:  # whose draws validation data may well refuse
        posterior, texts = fitted(network, data, structure=structure, val_loader=val_loader)
        assert texts == []
        assert prior_without_effect(posterior.law) is None


def test_a_prior_of_the_users_own_is_not_questioned():
    data = clusters(600, 1.6, seed=0)
    _, texts = fitted(trained(data, 30), data, prior_precision=1e7)
    assert texts == []


def test_a_search_that_found_no_best_one_says_so():
    data = clusters(90, 0.3, seed=0)
    posterior, _ = fitted(trained(data, 30), data)
    for end in (1e-6, 1e10):
        posterior.law.set_prior_precision(end)
        assert f"ended at an end of its interval, {end:.3g}" in prior_without_effect(posterior.law)


def test_a_rise_of_the_validation_nll_is_told_with_the_figures():
    data, val = clusters(90, 0.3, seed=0), clusters(60, 0.3, seed=1)
    network = trained(data, 400)
    posterior, texts = fitted(network, data, prior_precision="marginal-likelihood", val_loader=[val.tensors])
    plain = nn.functional.cross_entropy(network(val.tensors[0]), val.tensors[1]).item()
    assert any(f"The NLL of 60 validation examples rose from {plain:.4f}" in text for text in texts)
    assert bayesify.evaluate(posterior, [val.tensors]).metrics["nll"] > plain


def test_parameters_that_the_data_determine_are_counted():
    """All of a linear regression with much data, none under a prior that rules it."""
    torch.manual_seed(0)
    x = torch.randn(200, 3, dtype=torch.float64)
    posterior = bayesify.convert(
        nn.Linear(3, 1).double(), Laplace(prior_precision=1.0), likelihood=bayesify.Gaussian(0.5)
    )
    bayesify.fit(posterior, [(x, x[:, :1])], num_data=200, progress=False)
    phi = torch.cat([x, torch.ones(200, 1)], 1)
    values = torch.linalg.eigvalsh(phi.T @ phi / 0.25)
    for precision in (1e-9, 1.0, 1e4):
        posterior.law.set_prior_precision(precision)
        expected = (values / (values + precision)).sum().item()
        assert posterior.law.determined_parameters() == pytest.approx(expected, rel=1e-9)
