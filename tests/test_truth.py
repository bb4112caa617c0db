"""Is the decomposition true? On data whose noise is known, and against posteriors that are known."""

import torch

from experiments.hmc import hmc


def test_hmc_samples_a_posterior_that_is_known():
    """Linear regression: mean and covariance of 64 chains against the closed form (4.9 standard errors)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 3, generator=generator, dtype=torch.float64) @ torch.tensor(
        [[1.0, 0.6, 0.0], [0.0, 1.0, 0.3], [0.0, 0.0, 1.0]], dtype=torch.float64
    )
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    y = y + 0.5 * torch.randn(30, generator=generator, dtype=torch.float64)
    precision = x.T @ x / 0.25 + torch.eye(3, dtype=torch.float64)
    covariance = precision.inverse()
    mean = covariance @ (x.T @ y / 0.25)

    def potential(w):
        return (y - x @ w).square().sum() / (2 * 0.25) + w.square().sum() / 2

    start = torch.zeros(64, 3, dtype=torch.float64)
    settings = {"num_samples": 100, "burn_in": 50, "leapfrogs": 10, "step": 0.1}
    samples, accepted = hmc(potential, start, generator=generator, **settings)
    assert 0.6 < accepted.mean() < 0.95
    # Each chain's mean is an independent estimate: their spread gives the standard error, however slow the chains mix.
    each = samples.mean(0)
    assert ((each.mean(0) - mean).abs() < 4.9 * each.std(0) / 8).all()
    centred = samples - mean
    second = torch.einsum("smi,smj->mij", centred, centred) / len(samples)
    assert ((second.mean(0) - covariance).abs() < 4.9 * second.std(0) / 8).all()
