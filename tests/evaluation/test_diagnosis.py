"""Diagnostics on chains whose mixing is known."""

import math

import pytest
import torch
from torch import nn

import bayesify
from bayesify import SGLD
from bayesify.laws import Posterior

pytest.importorskip("arviz")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def bank(correlation: float, shift: float, draws: int = 400) -> Posterior:
    """Four chains of a linear network's weights: AR(1) series around means that differ by `shift`."""
    made = bayesify.convert(nn.Linear(2, 1).double(), SGLD(chains=4, samples_per_chain=draws), likelihood="regression")
    generator = torch.Generator().manual_seed(0)
    for chain in range(4):
        state = torch.randn(3, dtype=torch.float64, generator=generator)
        for _ in range(draws):
            noise = torch.randn(3, dtype=torch.float64, generator=generator)
            state = correlation * state + math.sqrt(1 - correlation**2) * noise
            made.append(state + chain * shift, chain=chain)
    return made


X = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_independent_draws_are_all_effective():
    found = bayesify.diagnose(bank(0.0, 0.0), X)
    assert found.draws == 1600
    assert found.ess.shape == (5,)
    assert found.weight_ess.shape == (3,)
    assert ((found.ess > 1200) & (found.ess < 2000)).all()
    assert (found.r_hat < 1.01).all()


def test_correlated_draws_are_fewer():
    # 1600 (1 - rho)/(1 + rho) = 178; the estimate's own error is some tens of per cent.
    found = bayesify.diagnose(bank(0.8, 0.0), X)
    assert 90 < found.weight_ess.median() < 360


def test_chains_that_stay_apart_are_found():
    found = bayesify.diagnose(bank(0.0, 3.0), X)
    assert found.weight_r_hat.min() > 1.5
    assert "split-R-hat" in str(found)


def one_chain(drift: float) -> Posterior:
    made = bayesify.convert(nn.Linear(2, 1).double(), SGLD(samples_per_chain=200), likelihood="regression")
    generator = torch.Generator().manual_seed(0)
    for step in range(200):
        made.append(torch.randn(3, dtype=torch.float64, generator=generator) + drift * step)
    return made


def test_a_single_chain_is_compared_with_itself():
    assert (bayesify.diagnose(one_chain(0.0), X).weight_r_hat < 1.05).all()
    assert (bayesify.diagnose(one_chain(0.05), X).weight_r_hat > 1.5).all()


def test_few_samples_are_said():
    with pytest.raises(ValueError, match="at least 4 samples"):
        bayesify.diagnose(bank(0.0, 0.0, draws=3), X)
