"""Which inputs drive the uncertainty: against closed forms, and against autograd through all draws at once."""

import pytest
import torch
from torch import nn

from bayesify import Gaussian, Streamlined, convert, input_sensitivity, predict
from tests.prediction.linearised.networks import NETWORKS, gaussian, randn

EXACT = {"rtol": 1e-9, "atol": 1e-12}


def test_gradient_is_that_of_the_variance_over_draws():
    make, x = NETWORKS["residual"]
    posterior = gaussian(make())
    found = input_sensitivity(posterior, x, num_draws=6, seed=3)
    leaf = x.clone().requires_grad_()
    draws = torch.stack([posterior.evaluate(leaf, [key])[0] for key in posterior.keys(6, 3)])
    centred = draws - draws.mean(-1, keepdim=True)
    variance = centred.var(0, correction=0).sum(-1)
    torch.testing.assert_close(found.variance, variance.detach(), **EXACT)
    torch.testing.assert_close(found.gradient, torch.autograd.grad(variance.sum(), leaf)[0], **EXACT)


def test_a_linear_network_in_closed_form():
    """With weights W_s: V = sum_i Var_s(W_s x + b_s)_i, dV/dx = 2 sum_i Cov_s(W_si, f_si), and v_j sum_i E[W_ij]^2."""
    posterior = gaussian(nn.Linear(4, 3), std=0.3, likelihood=Gaussian(0.5))
    x, spread = randn(5, 4), torch.tensor([1.0, 2.0, 0.0, 0.5], dtype=torch.float64)
    found = input_sensitivity(posterior, x, num_draws=7, input_variance=spread)
    corners = torch.cat([torch.eye(4, dtype=torch.float64), torch.zeros(1, 4, dtype=torch.float64)])
    with torch.no_grad():
        at = torch.stack([posterior.evaluate(corners, [key])[0] for key in posterior.keys(7, 0)])
        draws = torch.stack([posterior.evaluate(x, [key])[0] for key in posterior.keys(7, 0)])
    weights = (at[:, :4] - at[:, 4:]).mT  # (S, 3, 4)
    moved = draws - draws.mean(0)
    torch.testing.assert_close(found.variance, moved.square().mean(0).sum(1), **EXACT)
    torch.testing.assert_close(found.gradient, 2 * torch.einsum("sij,sbi->bj", weights, moved) / 7, **EXACT)
    expected = weights.mean(0).square().sum(0) * spread
    torch.testing.assert_close(found.contribution, expected.expand(5, 4), **EXACT)


def test_contributions_are_what_an_input_variance_adds():
    """Without random weights, one linear layer: the sum over entries equals what how='moments' adds."""
    torch.manual_seed(0)
    posterior = convert(nn.Linear(4, 3).double(), "map", likelihood=Gaussian(0.5))
    x, spread = randn(5, 4), torch.tensor([0.1, 0.0, 0.3, 0.2], dtype=torch.float64)
    found = input_sensitivity(posterior, x, input_variance=spread)
    added = predict(posterior, x, how=Streamlined(engine="moments"), input_variance=spread).epistemic.sum(1)
    torch.testing.assert_close(found.contribution.sum(1), added, **EXACT)
    assert (found.gradient == 0).all()


def test_bad_inputs():
    posterior = gaussian(nn.Linear(4, 3))
    with pytest.raises(ValueError, match="must not be negative"):
        input_sensitivity(posterior, randn(2, 4), input_variance=-1.0)
    with pytest.raises(ValueError, match="does not broadcast"):
        input_sensitivity(posterior, randn(2, 4), input_variance=torch.ones(3), num_draws=2)
    with pytest.raises(ValueError, match="no tensor of numbers"):
        input_sensitivity(posterior, torch.ones(2, 4, dtype=torch.long))
