"""The abstainer: largest coverage on the data, and the guarantee on new data."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from bayesify import measure
from bayesify.decide import Abstainer


def _calibration(seed: int, count: int = 1000) -> tuple[Tensor, Tensor]:
    """Uniform uncertainty u, error probability u / 2: the true risk below t is t / 4."""
    generator = torch.Generator().manual_seed(seed)
    u, noise = torch.rand(2, count, generator=generator, dtype=torch.float64)
    return u, noise > u / 2


@settings(max_examples=50, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=30),
    max_risk=st.sampled_from([0.0, 0.1, 0.3, 0.5]),
)
def test_empirical_coverage_is_the_largest(pairs: list[tuple[int, bool]], max_risk: float) -> None:
    """Applied to its own data the abstainer keeps exactly the coverage at that risk."""
    u, correct = [u for u, _ in pairs], torch.tensor([c for _, c in pairs])
    best = measure.coverage_at_risk(u, correct, max_risk=max_risk)
    if best == 0:
        with pytest.raises(ValueError, match="No threshold reaches"):
            Abstainer.fit(u, correct, max_risk=max_risk)
        return
    abstainer = Abstainer.fit(u, correct, max_risk=max_risk)
    result = abstainer(u)
    assert result.coverage == abstainer.coverage == best
    risk = 1 - correct[result.keep].double().mean().item()
    assert risk == pytest.approx(abstainer.risk, abs=1e-15)
    assert risk <= max_risk + 1e-15


@pytest.mark.parametrize("monotone", [True, False])
def test_guaranteed_threshold_against_scipy(monotone: bool) -> None:
    """A naive search with scipy over the stated candidates finds the same threshold."""
    u, correct = _calibration(0)
    abstainer = Abstainer.fit(u, correct, max_risk=0.15, confidence=0.9, monotone=monotone)
    level = 0.1 if monotone else 0.1 / 33
    start = max(2 * math.ceil(math.log(level) / math.log(0.85)), 200)
    best = None
    for step in range(33):
        rank = start + (1000 - start) * step // 32
        threshold = u.sort().values[rank].item() if rank < 1000 else math.inf
        below = u < threshold
        kept, errors = int(below.sum()), int((below & ~correct).sum())
        if stats.binom.cdf(errors, kept, 0.15) <= level:
            best = (threshold, kept / 1000, errors / kept)
            bound = float(stats.beta.ppf(1 - level, errors + 1, kept - errors))
        elif monotone:
            break
    assert (abstainer.threshold, abstainer.coverage, abstainer.risk) == best
    assert abstainer.risk_bound == pytest.approx(bound, rel=1e-8)
    assert abstainer(u).coverage == abstainer.coverage
    assert 0.2 < abstainer.coverage < Abstainer.fit(u, correct, max_risk=0.15).coverage


@pytest.mark.slow
def test_guarantee_holds_on_new_data() -> None:
    """The true risk exceeds the limit in at most delta of the calibration sets.

    With delta = 0.2 the failures of 200 sets are at most Binomial(200, 0.2), of mean 40: 65 or
    more happen once in 40 000 runs. Without confidence about half of the sets fail.
    """
    failures = dict.fromkeys(["none", "monotone", "any"], 0)
    for seed in range(200):
        u, correct = _calibration(seed, count=1000)
        fitted = {
            "none": Abstainer.fit(u, correct, max_risk=0.18),
            "monotone": Abstainer.fit(u, correct, max_risk=0.18, confidence=0.8),
            "any": Abstainer.fit(u, correct, max_risk=0.18, confidence=0.8, monotone=False),
        }
        for name, abstainer in fitted.items():
            failures[name] += min(abstainer.threshold, 1) / 4 > 0.18
    assert failures["any"] <= failures["monotone"] < 65
    assert failures["none"] > 70


def test_only_the_union_bound_survives_a_misleading_uncertainty() -> None:
    """Errors that come first stop the sequence; without the assumption the search goes on."""
    u = torch.arange(4000)
    correct = (u < 50) | (u >= 100)
    with pytest.raises(ValueError, match="closest has a bound"):
        Abstainer.fit(u, correct, max_risk=0.05, confidence=0.95)
    abstainer = Abstainer.fit(u, correct, max_risk=0.05, confidence=0.95, monotone=False)
    assert (abstainer.coverage, abstainer.risk) == (1.0, 50 / 4000)


def test_flawless_predictions_are_all_kept() -> None:
    """Without errors everything is kept once there are ln(0.05) / ln(0.95) = 58.4 examples."""
    abstainer = Abstainer.fit(torch.arange(59), torch.ones(59), max_risk=0.05, confidence=0.95)
    assert (abstainer.threshold, abstainer.coverage) == (math.inf, 1.0)
    assert abstainer.risk_bound == pytest.approx(1 - 0.05 ** (1 / 59), rel=1e-12)
    with pytest.raises(ValueError, match="give at least 59"):
        Abstainer.fit(torch.arange(58), torch.ones(58), max_risk=0.05, confidence=0.95)


def test_equal_uncertainties_stay_together() -> None:
    """With three levels of uncertainty the guarantee keeps whole levels."""
    u = torch.tensor([0.0, 1.0, 2.0]).repeat_interleave(400)
    correct = torch.ones(1200)
    correct[800:1000] = 0
    abstainer = Abstainer.fit(u, correct, max_risk=0.05, confidence=0.95)
    assert (abstainer.threshold, abstainer.coverage, abstainer.risk) == (2.0, 2 / 3, 0.0)


def test_hopeless_uncertainty_is_an_error() -> None:
    """No threshold gives a sentence with the closest bound, not an empty selection."""
    u = torch.arange(500)
    with pytest.raises(ValueError, match=r"closest has a bound of 0\."):
        Abstainer.fit(u, u % 2 == 0, max_risk=0.05, confidence=0.95)


def test_new_uncertainties() -> None:
    """Kept is strictly below the threshold, in the given shape; infinity is never kept."""
    abstainer = Abstainer.fit([0.1, 0.2, 0.3], [True, True, False])
    result = abstainer(torch.tensor([[0.25, 0.3], [math.inf, -1.0]], dtype=torch.float64))
    assert abstainer.threshold == result.threshold == 0.3
    assert result.keep.tolist() == [[True, False], [False, True]]
    assert result.coverage == 0.5
    assert not Abstainer.fit([0.1], [True])([math.inf]).keep.item()


@pytest.mark.parametrize("confidence", [None, 0.9])
@pytest.mark.parametrize("max_risk", [0.1, 0.5])
def test_round_trip_through_json(max_risk: float, confidence: float | None) -> None:
    """What was saved is equal when loaded, a threshold at infinity included."""
    abstainer = Abstainer.fit(*_calibration(1), max_risk=max_risk, confidence=confidence)
    assert math.isinf(abstainer.threshold) == (max_risk == 0.5)
    text = json.dumps(abstainer.to_dict(), allow_nan=False)
    assert Abstainer.from_dict(json.loads(text)) == abstainer


def test_bad_input_and_frozen() -> None:
    """Each mistake is named; fitted is fixed."""
    with pytest.raises(ValueError, match="uncertainty contains infinite"):
        Abstainer.fit([math.inf], [True])
    with pytest.raises(ValueError, match="predicted == labels"):
        Abstainer.fit([0.1], [3])
    with pytest.raises(ValueError, match="max_risk is 0"):
        Abstainer.fit([0.1], [True], max_risk=0.0, confidence=0.9)
    with pytest.raises(ValueError, match="confidence is 1"):
        Abstainer.fit([0.1], [True], confidence=1.0)
    with pytest.raises(ValueError, match="version 9 is unknown"):
        Abstainer.from_dict({**Abstainer.fit([0.1], [True]).to_dict(), "version": 9})
    with pytest.raises(ValueError, match="uncertainty contains NaN"):
        Abstainer.fit([0.1], [True])([math.nan])
    with pytest.raises(dataclasses.FrozenInstanceError):
        Abstainer.fit([0.1], [True]).threshold = 1.0  # type: ignore[misc]
