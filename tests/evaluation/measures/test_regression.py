"""Regression scores against scipy, numerical integration and all pairs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from sklearn import metrics

from bayesify import measure


def _gaussians(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mean, target = torch.randn(2, 30, 2, generator=generator, dtype=torch.float64)
    variance = torch.rand(30, 2, generator=generator, dtype=torch.float64) + 0.1
    return mean, variance, target


def test_rmse_and_nll_equal_references() -> None:
    """Rmse is scikit-learn's, the log score scipy's normal density."""
    mean, variance, target = _gaussians()
    expected = metrics.mean_squared_error(target.flatten(), mean.flatten()) ** 0.5
    assert measure.rmse(mean, target) == pytest.approx(expected, rel=1e-13)
    log_density = stats.norm.logpdf(target.numpy(), mean.numpy(), variance.sqrt().numpy())
    assert measure.gaussian_nll(mean, variance, target) == pytest.approx(-log_density.mean(), rel=1e-13)


@pytest.mark.parametrize(("mean", "variance", "target"), [(0.0, 1.0, 0.3), (2.0, 9.0, -4.0), (1.0, 0.04, 1.0)])
def test_crps_gaussian_equals_integral(mean: float, variance: float, target: float) -> None:
    """The closed form is the integral of (F(x) - [x >= y])^2."""
    normal = stats.norm(mean, math.sqrt(variance))
    left, _ = integrate.quad(lambda x: normal.cdf(x) ** 2, -40, target, limit=200, epsabs=1e-12)
    right, _ = integrate.quad(lambda x: normal.sf(x) ** 2, target, 40, limit=200, epsabs=1e-12)
    result = measure.crps_gaussian([mean], [variance], [target])
    assert result == pytest.approx(left + right, rel=1e-8)


def test_crps_gaussian_limits() -> None:
    """A vanishing variance leaves the absolute error; a change of unit only scales."""
    assert measure.crps_gaussian([1.0], [1e-20], [3.0]) == pytest.approx(2.0, rel=1e-9)
    mean, variance, target = _gaussians(1)
    scaled = measure.crps_gaussian(5 * mean, 25 * variance, 5 * target)
    assert scaled == pytest.approx(5 * measure.crps_gaussian(mean, variance, target), rel=1e-12)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), num=st.integers(1, 12), shift=st.sampled_from([0.0, 1e6]))
def test_crps_samples_equals_all_pairs(seed: int, num: int, shift: float) -> None:
    """Both normalisations equal the sum over all pairs, also far from zero."""
    rng = np.random.default_rng(seed)
    x, y = shift + rng.normal(size=(num, 5)).round(1), shift + rng.normal(size=5)
    error = np.abs(x - y).mean()
    pairs = np.abs(x[:, None] - x[None]).sum((0, 1)).mean() / 2
    assert measure.crps_samples(x, y, fair=False) == pytest.approx(error - pairs / num**2, abs=1e-9)
    if num > 1:
        assert measure.crps_samples(x, y) == pytest.approx(error - pairs / (num * (num - 1)), abs=1e-9)


def test_fair_crps_is_unbiased() -> None:
    """Two fair samples already give the closed form on average; unfair ones are too high.

    The mean of 200 000 scores has a standard error of about 0.002: five of them fail one run
    in a million, and the seed is fixed.
    """
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(2, 200_000, generator=generator, dtype=torch.float64)
    target = torch.full((200_000,), 0.5, dtype=torch.float64)
    exact = measure.crps_gaussian([0.0], [1.0], [0.5])
    assert measure.crps_samples(samples, target) == pytest.approx(exact, abs=0.01)
    spread = 1 / math.sqrt(math.pi)
    unfair = measure.crps_samples(samples, target, fair=False)
    assert unfair == pytest.approx(exact + spread / 2, abs=0.01)


def test_intervals() -> None:
    """Ends belong to the interval; 1.96 standard deviations cover 95 %."""
    assert measure.interval_coverage([0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 1.5, -1]) == 0.5
    target = stats.norm.ppf((np.arange(1000) + 0.5) / 1000)
    bound = np.full(1000, stats.norm.ppf(0.975))
    assert measure.interval_coverage(-bound, bound, target) == 0.95
    assert measure.interval_width(-bound, bound) == pytest.approx(2 * 1.959963985, rel=1e-9)


def test_bad_input() -> None:
    """Each mistake is named together with its remedy."""
    with pytest.raises(ValueError, match="mean \\(2,\\), target \\(2, 1\\)"):
        measure.rmse([1.0, 2.0], [[1.0], [2.0]])
    for function in (measure.gaussian_nll, measure.crps_gaussian):
        with pytest.raises(ValueError, match="not positive"):
            function([0.0], [0.0], [0.0])
        with pytest.raises(ValueError, match="target contains NaN"):
            function([0.0], [1.0], [math.nan])
        with pytest.raises(ValueError, match="mean contains infinite"):
            function([math.inf], [1.0], [0.0])
    with pytest.raises(ValueError, match="two samples or more"):
        measure.crps_samples([[1.0]], [1.0])
    with pytest.raises(ValueError, match="draws first"):
        measure.crps_samples([[1.0], [2.0]], [1.0, 2.0])
    with pytest.raises(ValueError, match="lower exceeds upper"):
        measure.interval_coverage([1.0], [0.0], [0.5])
    with pytest.raises(ValueError, match="lower exceeds upper"):
        measure.interval_width([1.0], [0.0])
    with pytest.raises(ValueError, match="mean is empty"):
        measure.rmse([], [])
