"""The exact binomial tail and bound against scipy."""

from __future__ import annotations

import pytest
from scipy import stats

from bayesify.decide._binomial import binomial_cdf, upper_bound

CASES = [
    (0, 1),
    (0, 50),
    (3, 50),
    (49, 50),
    (50, 50),
    (12, 1000),
    (40_000, 1_000_000),
    (600_000, 1_000_000),
]


@pytest.mark.parametrize(("errors", "trials"), CASES)
@pytest.mark.parametrize("rate", [1e-6, 0.02, 0.05, 0.5, 0.99])
def test_cdf_equals_scipy(errors: int, trials: int, rate: float) -> None:
    """The tail is exact relative to its own size, down to the smallest numbers."""
    expected = float(stats.binom.cdf(errors, trials, rate))
    assert binomial_cdf(errors, trials, rate) == pytest.approx(expected, rel=1e-7, abs=1e-300)


@pytest.mark.parametrize(("errors", "trials"), CASES)
@pytest.mark.parametrize("delta", [0.3, 0.05, 1e-6])
def test_bound_equals_clopper_pearson(errors: int, trials: int, delta: float) -> None:
    """The bound is the beta quantile of Clopper and Pearson."""
    expected = 1.0 if errors == trials else stats.beta.ppf(1 - delta, errors + 1, trials - errors)
    assert upper_bound(errors, trials, delta) == pytest.approx(float(expected), rel=1e-8)


def test_bound_without_errors() -> None:
    """Closed form at zero errors: 1 - delta^(1/n)."""
    assert upper_bound(0, 59, 0.05) == pytest.approx(1 - 0.05 ** (1 / 59), rel=1e-13)
