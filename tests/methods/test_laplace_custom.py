"""Laplace with a likelihood of one's own: Poisson counts, and residuals with heavy tails."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesify
from bayesify import Custom, Gaussian, Laplace
from tests.curvature.naive import diagonal_ggn, full_ggn

EXACT = {"rtol": 1e-9, "atol": 1e-11}
ROWS, FREEDOM = 12, 3.0


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def poisson(output, target):
    return (target * output - output.exp() - torch.lgamma(target + 1)).sum(-1)


def student(output, target):
    return torch.distributions.StudentT(FREEDOM, output).log_prob(target).sum(-1)


def poisson_hessian(output, target):
    del target
    return output.exp()


def student_hessian(output, target):
    """Of -ln p: (v + 1) (v - r^2) / (v + r^2)^2, which is negative beyond sqrt(v) and then counts as zero."""
    squares = (output - target) ** 2
    return ((FREEDOM + 1) * (FREEDOM - squares) / (FREEDOM + squares) ** 2).clamp_min(0)


LIKELIHOODS = {"poisson": (poisson, poisson_hessian), "student": (student, student_hessian)}


def problem(name, outputs=2, rows=ROWS):
    log_prob, hessian = LIKELIHOODS[name]
    network = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs)).double()
    x = randn(rows, 3)
    y = 3 * randn(rows, outputs)
    y = y.abs().round() if name == "poisson" else y
    lambdas = hessian(network(x), y).detach().diag_embed()
    if name == "student":
        assert 0 < int((lambdas.diagonal(dim1=1, dim2=2) == 0).sum()) < lambdas[..., 0].numel()
    return network, x, y, Custom(log_prob), lambdas


def fitted(network, x, y, likelihood, **options):
    posterior = bayesify.convert(network, Laplace(prior_precision=0.3, **options), likelihood=likelihood)
    half = len(x) // 2
    batches = [(x[:half], y[:half]), (x[half:], y[half:])] if half else [(x, y)]
    bayesify.fit(posterior, batches, num_data=len(x), progress=False)
    return posterior


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_last_layer_has_the_analytic_ggn(name):
    network, x, y, likelihood, hessians = problem(name)
    posterior = fitted(network, x, y, likelihood)
    extended = nn.Linear(6, 2, bias=False).double()
    features = torch.cat([network[:2](x).detach(), torch.ones(ROWS, 1)], 1)
    ggn = full_ggn(extended, features, [extended.weight], hessians)
    assert_close(posterior.law.covariance(), torch.linalg.inv(ggn + 0.3 * torch.eye(12, dtype=torch.float64)), **EXACT)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_diagonal_is_that_of_the_analytic_ggn(name):
    network, x, y, likelihood, hessians = problem(name)
    posterior = fitted(network, x, y, likelihood, structure="diagonal")
    expected = diagonal_ggn(network, x, dict(network.named_parameters()), hessians)
    for key, found in posterior.law.curvature.as_dict().items():
        assert_close(found, expected[key], **EXACT)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_kronecker_factors_are_exact_for_one_example(name):
    _, _, _, likelihood, _ = problem(name)
    network, x = nn.Linear(3, 4).double(), randn(1, 3)
    y = torch.tensor([[0.0, 2.0, 1.0, 5.0]], dtype=torch.float64)
    posterior = fitted(network, x, y, likelihood, structure="kronecker")
    hessian = LIKELIHOODS[name][1](network(x), y).detach()[0].diag()
    extended = torch.cat([x, torch.ones(1, 1)], 1)
    left, right = posterior.law.left.as_dict()["weight"][0], posterior.law.right.as_dict()["weight"][0]
    basis = torch.kron(left, right)
    found = basis @ posterior.law.eigenvalues("weight").flatten().diag() @ basis.T
    assert_close(found, torch.kron(hessian, extended.T @ extended), **EXACT)


@pytest.mark.parametrize("structure", ["last-layer", "diagonal", "kronecker"])
def test_a_gaussian_written_by_hand_is_the_gaussian(structure):
    network, x, _, _, _ = problem("student")
    y, std = randn(ROWS, 2), 0.4
    mine = Custom(lambda output, target: torch.distributions.Normal(output, std).log_prob(target))
    one, two = (fitted(network, x, y, likelihood, structure=structure) for likelihood in (mine, Gaussian(std)))
    assert one.law.log_marginal_likelihood() == pytest.approx(two.law.log_marginal_likelihood(), rel=1e-9)
    if structure == "last-layer":  # its eigenvectors have no order
        assert_close(one.law.covariance(), two.law.covariance(), **EXACT)
        return
    key = one.keys(1, 0)[0]
    for name, tensor in one.law.drawn(key).items():
        assert_close(tensor, two.law.drawn(key)[name], **EXACT)


def test_the_prior_is_chosen_by_the_users_own_density():
    """Not by the density of a Gaussian without noise, which predictions of a `Custom` are."""
    torch.manual_seed(0)
    network = nn.Linear(2, 1).double()
    x = randn(400, 2)
    y = torch.poisson((x @ torch.tensor([[0.5], [-0.3]], dtype=torch.float64)).exp())
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[0.5, -0.3]]))
        network.bias.zero_()
    method = Laplace(prior_precision="validation")
    posterior = bayesify.convert(network, method, likelihood=Custom(poisson))
    bayesify.fit(posterior, [(x[:40], y[:40])], num_data=40, val_loader=[(x[40:], y[40:])], progress=False)

    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    nodes, weights = torch.from_numpy(nodes), torch.from_numpy(weights / weights.sum())

    def nll(precision):
        phi = torch.cat([x, torch.ones(400, 1)], 1)
        curvature = (phi[:40] * network(x[:40]).exp()).T @ phi[:40]
        spread = (phi @ torch.linalg.inv(curvature + precision * torch.eye(3)) * phi).sum(1)
        outputs = network(x)[40:, 0] + spread[40:].sqrt() * nodes[:, None]
        density = torch.distributions.Poisson(outputs.exp()).log_prob(y[40:, 0]).exp()
        return -(weights @ density).log().mean().item()

    chosen = posterior.law.prior_precision.item()
    with torch.no_grad():
        best = min(nll(value) for value in np.geomspace(1e-3, 1e4, 60))
        assert nll(chosen) < best + 1e-3
        assert nll(1e-3) > best + 1e-3
