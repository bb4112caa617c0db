"""The three divergences against closed forms, integration and Monte Carlo. Bounds are 4.9 standard errors."""

import math

import pytest
import torch
from torch.distributions import Categorical, MixtureSameFamily, Normal, kl_divergence

from bayesify.laws.input_factors.kl import average_kl, divergence, mean_kl, mixture_log_prob, sampled_kl

EXACT = {"rtol": 1e-12, "atol": 1e-12}
S = 0.3
PRIOR = Normal(torch.ones(()).double(), torch.full((), S, dtype=torch.float64))


def mixture(components: int, nodes: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    means = 1 + 0.2 * torch.randn(components, nodes, dtype=torch.float64, generator=generator)
    stds = 0.1 + 0.3 * torch.rand(components, nodes, dtype=torch.float64, generator=generator)
    return means, stds


def test_one_component_is_exact():
    means, stds = mixture(1, 7)
    expected = kl_divergence(Normal(means, stds), PRIOR).sum()
    for kind in ("mean", "average"):
        torch.testing.assert_close(divergence(kind, means, stds, S), expected, **EXACT)


def test_the_mean_is_the_law_of_the_average_of_draws():
    means, stds = mixture(5, 7)
    average = Normal(means.mean(0), stds.square().sum(0).sqrt() / 5)
    torch.testing.assert_close(mean_kl(means, stds, S), kl_divergence(average, PRIOR).sum(), **EXACT)


@pytest.mark.parametrize("components", [2, 16])
def test_the_mean_at_the_prior_is_not_zero(components):
    means = torch.ones(components, 3, dtype=torch.float64)
    each = (math.log(components) + 1 / components - 1) / 2
    found = mean_kl(means, S * torch.ones_like(means), S)
    torch.testing.assert_close(found, torch.tensor(3 * each, dtype=torch.float64), **EXACT)


def test_the_mean_pulls_each_std_to_root_k_times_the_priors():
    components = 4
    rho = torch.zeros(components, 1, dtype=torch.float64).requires_grad_()
    stds = (components**0.5 * S * torch.ones_like(rho)).detach().requires_grad_()
    mean_kl(torch.ones_like(rho), stds, S).backward()
    torch.testing.assert_close(stds.grad, torch.zeros_like(stds), **EXACT)
    assert mean_kl(torch.ones_like(rho), stds, S) < mean_kl(torch.ones_like(rho), 0.9 * stds, S)
    assert mean_kl(torch.ones_like(rho), stds, S) < mean_kl(torch.ones_like(rho), 1.1 * stds, S)


def test_the_mean_does_not_see_how_far_components_lie_apart():
    _, stds = mixture(2, 3)
    near = torch.tensor([[0.9], [1.1]], dtype=torch.float64).expand(2, 3)
    far = torch.tensor([[-4.0], [6.0]], dtype=torch.float64).expand(2, 3)
    torch.testing.assert_close(mean_kl(near, stds, S), mean_kl(far, stds, S), **EXACT)
    assert average_kl(near, stds, S) < average_kl(far, stds, S)


def test_the_density_is_the_mixture_with_one_component_for_all_nodes():
    means, stds = mixture(3, 4)
    z = 1 + torch.randn(6, 4, dtype=torch.float64)
    law = MixtureSameFamily(
        Categorical(torch.ones(3, dtype=torch.float64)), torch.distributions.Independent(Normal(means, stds), 1)
    )
    torch.testing.assert_close(mixture_log_prob(z, means, stds), law.log_prob(z), **EXACT)


def _integral(means: torch.Tensor, stds: torch.Tensor) -> torch.Tensor:
    z = torch.linspace(-6, 8, 400_001, dtype=torch.float64)[:, None]
    log_q = mixture_log_prob(z, means, stds)
    log_p = PRIOR.log_prob(z[:, 0])
    return torch.trapezoid(log_q.exp() * (log_q - log_p), z[:, 0])


@pytest.mark.slow
def test_the_estimate_has_the_right_mean():
    means, stds = mixture(3, 1)
    exact = _integral(means, stds)
    generator = torch.Generator().manual_seed(0)
    found = torch.stack(
        [sampled_kl(means, stds, S, torch.randn(3, 1, dtype=torch.float64, generator=generator)) for _ in range(4000)]
    )
    assert abs(found.mean() - exact) < 4.9 * found.std() / 4000**0.5
    assert abs(mean_kl(means, stds, S) - exact) > 1e-2  # another thing for more than one component


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.slow
def test_the_average_bounds_the_whole_networks_divergence_within_ln_k(seed):
    """A - ln K <= KL(q || p) <= A, by Monte Carlo over many nodes, and exactly for one."""
    means, stds = mixture(4, 30, seed)
    noise = torch.randn(2000, 4, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    draws = torch.stack([sampled_kl(means, stds, S, e) for e in noise])
    bound, error = average_kl(means, stds, S), 4.9 * draws.std() / 2000**0.5
    assert bound - math.log(4) - error <= draws.mean() <= bound + error
    one = means[:, :1], stds[:, :1]
    assert average_kl(*one, S) - math.log(4) <= _integral(*one) <= average_kl(*one, S)


def test_far_components_reach_the_lower_bound_and_equal_ones_the_upper():
    stds = torch.full((4, 3), 0.05, dtype=torch.float64)
    far = torch.arange(4.0).double()[:, None].expand(4, 3)
    noise = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    # Apart, ln q(z_k) is ln N_k(z_k) - ln 4 on every draw; together it is ln N_k(z_k).
    gap = sampled_kl(far, stds, S, noise) - sampled_kl_alone(far, stds, noise)
    torch.testing.assert_close(gap, torch.tensor(-math.log(4), dtype=torch.float64), rtol=1e-9, atol=1e-9)
    same = torch.ones(4, 3, dtype=torch.float64)
    torch.testing.assert_close(sampled_kl(same, stds, S, noise), sampled_kl_alone(same, stds, noise), **EXACT)


def sampled_kl_alone(means: torch.Tensor, stds: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    z = means + stds * noise
    return (Normal(means, stds).log_prob(z) - PRIOR.log_prob(z)).sum(-1).mean()


@pytest.mark.parametrize("kind", ["mean", "average", "mc"])
def test_gradients_are_right_and_finite_without_noise(kind):
    means, stds = (t.requires_grad_() for t in mixture(3, 2))
    noise = torch.randn(3, 2, dtype=torch.float64)

    def function(m: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return sampled_kl(m, s, S, noise) if kind == "mc" else divergence(kind, m, s, S)

    assert torch.autograd.gradcheck(function, (means, stds))
    silent = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    if kind != "mc":
        function(means, silent).backward()
        assert silent.grad.isfinite().all()
