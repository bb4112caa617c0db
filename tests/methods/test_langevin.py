"""The sampler against hand-written steps and against stationary distributions that are known exactly.

The statistical tests run many independent chains at once, so that their draws are independent, and reject at five
standard errors: a false alarm in two million runs for each number.
"""

import math

import pytest
import torch
from torch import Tensor, nn

from bayesify.laws import Key, generator_for
from bayesify.methods.langevin import Langevin

N = 50
FIVE = 5.0


def sampler(weights: Tensor, **settings) -> Langevin:
    options = {"lr": 0.1, "weight_decay": 0.3, "seed": 7, **settings}
    return Langevin([{"params": [weights]}], torch.tensor(N), **options)


def noise(weights: Tensor, step: int) -> Tensor:
    return torch.empty_like(weights).normal_(generator=generator_for(Key(7, step), "weights", weights.device))


@pytest.mark.parametrize("kind", ["sgld", "sghmc", "psgld"])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.3])
def test_steps_are_the_papers(kind: str, temperature: float):
    lr, wd, friction = 0.1, 0.3, 0.2
    target = torch.randn(5, dtype=torch.float64)
    weights = nn.Parameter(torch.randn(5, dtype=torch.float64))
    optimizer = sampler(weights, kind=kind, temperature=temperature, friction=friction)
    optimizer.param_groups[0]["adapt_steps"] = 3
    w, v, square = weights.detach().clone(), torch.zeros(5, dtype=torch.float64), None
    for step in range(1, 7):
        optimizer.zero_grad()
        (0.5 * (weights - target) ** 2).sum().backward()
        optimizer.step()
        z = noise(w, step)
        gradient = w - target
        if kind == "sgld":
            w = w - lr / 2 * (gradient + wd * w) + math.sqrt(temperature * lr / N) * z
        elif kind == "sghmc":
            v = (1 - friction) * v - lr / 2 * (gradient + wd * w) + math.sqrt(friction * temperature * lr / N) * z
            w = w + v
        else:
            if step <= 3:
                square = gradient**2 if square is None else 0.99 * square + 0.01 * gradient**2
            G = 1 / (1e-5 + square.sqrt())
            w = w - lr / 2 * G * (gradient + wd * w) + (temperature * lr * G / N).sqrt() * z
        torch.testing.assert_close(weights.detach(), w, rtol=1e-12, atol=1e-12)


def test_friction_one_is_sgld():
    starts = torch.randn(4, dtype=torch.float64)
    ends = []
    for kind in ("sgld", "sghmc"):
        weights = nn.Parameter(starts.clone())
        optimizer = sampler(weights, kind=kind, friction=1.0)
        for _ in range(5):
            weights.grad = weights.detach() ** 3
            optimizer.step()
        ends.append(weights.detach())
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-12)


def test_prior_std_is_weight_decay():
    ends = []
    for settings in ({"weight_decay": 0.3}, {"prior_std": 1 / math.sqrt(N * 0.3)}):
        weights = nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer = sampler(weights, **settings)
        weights.grad = torch.zeros_like(weights)
        optimizer.step()
        ends.append(weights.detach())
    torch.testing.assert_close(*ends)


def test_groups_that_are_not_sampled_descend():
    weights = nn.Parameter(torch.ones(3))
    optimizer = Langevin([{"params": [weights], "sampled": False}], torch.tensor(N), lr=0.1, weight_decay=1.0)
    weights.grad = torch.full((3,), 2.0)
    optimizer.step()
    assert torch.equal(weights.detach(), torch.full((3,), 0.9))


def test_an_unknown_number_of_data_is_said():
    weights = nn.Parameter(torch.ones(3))
    optimizer = Langevin([{"params": [weights]}], torch.tensor(0), lr=0.1)
    weights.grad = torch.zeros(3)
    with pytest.raises(ValueError, match="num_data=n"):
        optimizer.step()


# -- stationary distributions -------------------------------------------------------------------------------------


def run(start: Tensor, gradient, steps: int, **settings) -> tuple[Tensor, Langevin]:
    weights = nn.Parameter(start)
    optimizer = sampler(weights, **settings)
    for group in optimizer.param_groups:
        group["adapt_steps"] = 1
    for _ in range(steps):
        weights.grad = gradient(weights.detach())
        optimizer.step()
    return weights.detach(), optimizer


def assert_covariance(draws: Tensor, expected: Tensor, mean: Tensor) -> None:
    """Draws (K, d) are independent N(mean, expected)."""
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(expected), (draws - mean).T, upper=False)
    size = draws.shape[0]
    assert (white.mean(1).abs() < FIVE / math.sqrt(size)).all()
    products = white @ white.T / size
    assert ((products.diagonal() - 1).abs() < FIVE * math.sqrt(2 / size)).all()
    outside = products - products.diagonal().diag()
    assert (outside.abs() < FIVE / math.sqrt(size)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_without_data_the_variance_is_the_priors(dtype: torch.dtype):
    # 1/(n wd), with the discretisation's own factor 1/(1 - lr wd/4), which is known.
    lr, wd = 0.2, 0.5
    weights, _ = run(torch.zeros(100_000, dtype=dtype), torch.zeros_like, 120, lr=lr, weight_decay=wd)
    expected = 1 / (N * wd) / (1 - lr * wd / 4)
    assert abs(weights.double().var().item() / expected - 1) < FIVE * math.sqrt(2 / 100_000)
    assert abs(expected * N * wd - 1) < 0.03


PRECISION = torch.tensor([[2.0, 0.6, 0.0], [0.6, 1.0, -0.3], [0.0, -0.3, 0.5]], dtype=torch.float64)
MEAN = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


@pytest.mark.parametrize("temperature", [1.0, 0.1])
@pytest.mark.slow
def test_sgld_on_a_gaussian(temperature: float):
    lr = 0.1
    draws, _ = run(
        torch.zeros(40_000, 3, dtype=torch.float64), lambda w: (w - MEAN) @ PRECISION, 500,
        lr=lr, weight_decay=0.0, temperature=temperature,
    )  # fmt: skip
    # S = (I - h A) S (I - h A) + T lr/n I has the solution T/n A^-1 (I - h A/2)^-1.
    exact = temperature / N * torch.linalg.inv(PRECISION)
    stationary = exact @ torch.linalg.inv(torch.eye(3, dtype=torch.float64) - lr / 4 * PRECISION)
    assert_covariance(draws, stationary, MEAN)
    assert (stationary - exact).norm() < 0.06 * exact.norm()


@pytest.mark.slow
def test_sghmc_on_a_gaussian():
    lr, friction = 0.02, 0.1
    draws, _ = run(
        torch.zeros(20_000, 3, dtype=torch.float64), lambda w: (w - MEAN) @ PRECISION, 600,
        kind="sghmc", lr=lr, weight_decay=0.0, friction=friction,
    )  # fmt: skip
    # (w, v) is linear: x <- F x + noise. Its covariance is the fixed point of S = F S F' + Q.
    eye, h = torch.eye(3, dtype=torch.float64), lr / 2 * PRECISION
    F = torch.cat([torch.cat([eye - h, (1 - friction) * eye], 1), torch.cat([-h, (1 - friction) * eye], 1)])
    Q = (friction * lr / N * eye).repeat(2, 2)
    system = torch.eye(36, dtype=torch.float64) - torch.kron(F, F)
    stationary = torch.linalg.solve(system, Q.flatten()).view(6, 6)[:3, :3]
    assert_covariance(draws, stationary, MEAN)
    exact = torch.linalg.inv(PRECISION) / N
    assert (stationary - exact).norm() < 0.03 * exact.norm()


@pytest.mark.slow
def test_psgld_on_a_gaussian():
    lr, curvature = 0.05, torch.tensor([4.0, 1.0, 0.25], dtype=torch.float64)
    torch.manual_seed(0)
    start = MEAN + torch.randn(30_000, 3, dtype=torch.float64).sign() * (1 + torch.rand(30_000, 3, dtype=torch.float64))
    draws, optimizer = run(
        start, lambda w: (w - MEAN) * curvature, 800, kind="psgld", lr=lr, weight_decay=0.0
    )  # fmt: skip
    G = 1 / (1e-5 + next(iter(optimizer.state.values()))["square"].sqrt())
    stationary = lr * G / N / (1 - (1 - lr / 2 * G * curvature) ** 2)
    assert_covariance((draws - MEAN) / stationary.sqrt(), torch.eye(3, dtype=torch.float64), torch.zeros(3))
    exact = 1 / (N * curvature)
    assert (stationary / exact - 1).abs().max() < 0.02


# -- noise --------------------------------------------------------------------------------------------------------


def test_steps_have_normal_noise_with_its_tails():
    """A million numbers have some beyond 4.5 standard deviations; a table of 65,536 quantiles has none."""
    from scipy import stats

    weight = torch.zeros(1_000_000, requires_grad=True)
    optimizer = Langevin([{"params": [weight]}], torch.tensor(N), lr=0.1, seed=0)
    noise = []
    for _ in range(2):
        with torch.no_grad():
            weight.zero_()
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        noise.append(weight.detach().double() / math.sqrt(0.1 / N))
    size = len(noise[0])
    for z in noise:
        for power, (moment, variance) in {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96)}.items():
            assert abs((z**power).mean().item() - moment) < FIVE * math.sqrt(variance / size), power
        assert stats.kstest(z.numpy()[:200_000], "norm").pvalue > 1e-6
        for lag in range(1, 9):
            assert abs((z[lag:] * z[:-lag]).mean().item()) < FIVE / math.sqrt(size), lag
        # Of 6.8 expected: none has a probability of .001, more than 25 one of 1e-8.
        assert 1 <= (z.abs() > 4.5).sum() <= 25
    assert abs((noise[0] * noise[1]).mean().item()) < FIVE / math.sqrt(size)
