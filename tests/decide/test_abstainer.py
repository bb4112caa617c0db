"""The abstainer: largest coverage on the data, and the guarantee on new data."""

from __future__ import annotations

import contextlib
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
from bayesify.decide._binomial import binomial_cdf


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


def test_guaranteed_threshold_against_scipy() -> None:
    """A naive search with scipy over the stated candidates finds the same threshold."""
    u, correct = _calibration(0)
    abstainer = Abstainer.fit(u, correct, max_risk=0.15, confidence=0.9)
    start = max(2 * math.ceil(math.log(0.1) / math.log(0.85)), 200)
    best = None
    for step in range(33):
        rank = start + (1000 - start) * step // 32
        threshold = u.sort().values[rank].item() if rank < 1000 else math.inf
        below = u < threshold
        kept, errors = int(below.sum()), int((below & ~correct).sum())
        if stats.binom.cdf(errors, kept, 0.15) > 0.1:
            break
        best = (threshold, kept / 1000, errors / kept)
        bound = float(stats.beta.ppf(0.9, errors + 1, kept - errors))
    assert (abstainer.threshold, abstainer.coverage, abstainer.risk) == best
    assert abstainer.risk_bound == pytest.approx(bound, rel=1e-8)
    assert abstainer(u).coverage == abstainer.coverage
    assert 0.2 < abstainer.coverage < Abstainer.fit(u, correct, max_risk=0.15).coverage


def test_order_that_other_examples_choose_against_scipy() -> None:
    """Thresholds, their order, and the tests on the rest, by a naive search."""
    u, correct = _calibration(0)
    other, right = _calibration(1, count=300)
    abstainer = Abstainer.fit(u, correct, max_risk=0.15, confidence=0.9, monotone=False, holdout=(other, right))
    ranked = sorted(other.tolist())
    candidates = sorted({ranked[300 * step // 64] if step < 64 else math.inf for step in range(65)})
    safety = []
    for one in candidates:
        below = other < one
        safety.append(stats.binom.cdf(int((below & ~right).sum()) + 1, int(below.sum()), 0.15))
    first = min(range(len(candidates)), key=lambda index: safety[index])
    order = [first, *sorted(range(first + 1, len(candidates)), key=lambda index: safety[index])]
    passed = []
    for index in order:
        below = u < candidates[index]
        kept, errors = int(below.sum()), int((below & ~correct).sum())
        if stats.binom.cdf(errors, kept, 0.15) > 0.1:
            break
        passed.append((candidates[index], kept / 1000, errors / kept))
    assert len(passed) > 3
    assert (abstainer.threshold, abstainer.coverage, abstainer.risk) == max(passed)
    quarter = Abstainer.fit(u, correct, max_risk=0.15, confidence=0.9, monotone=False, seed=3)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(3))
    held, rest = order[:250], order[250:]
    same = Abstainer.fit(
        u[rest], correct[rest], max_risk=0.15, confidence=0.9, monotone=False, holdout=(u[held], correct[held])
    )
    assert quarter == same
    with pytest.raises(ValueError, match="monotone=False: give both"):
        Abstainer.fit(u, correct, confidence=0.9, holdout=(other, right))


@pytest.mark.slow
def test_guarantee_holds_on_new_data() -> None:
    """The true risk exceeds the limit in at most delta of the calibration sets.

    With delta = 0.2 the failures of 200 sets are at most Binomial(200, 0.2), of mean 40: 65 or
    more happen once in 40 000 runs. Without confidence about half of the sets fail.
    """
    failures = dict.fromkeys(["none", "monotone", "any"], 0)
    for seed in range(200):
        u, correct = _calibration(seed, count=1000)
        options = {
            "none": {},
            "monotone": {"confidence": 0.8},
            "any": {"confidence": 0.8, "monotone": False, "seed": seed},
        }
        for name, option in options.items():
            with contextlib.suppress(ValueError):  # refused, and so nothing is broken
                failures[name] += min(Abstainer.fit(u, correct, max_risk=0.18, **option).threshold, 1) / 4 > 0.18
    assert failures["any"] < 65
    assert failures["monotone"] < 65
    assert failures["none"] > 70


def _union_threshold(u: Tensor, correct: Tensor, max_risk: float, confidence: float) -> float | None:
    """The largest of sqrt(n) thresholds that passes at the level of a union bound: what was sharpest before."""
    count, ranked = len(u), u.sort().values
    steps = math.isqrt(count - 1) + 1
    level = (1 - confidence) / (steps + 1)
    start = min(max(2 * math.ceil(math.log(level) / math.log1p(-max_risk)), count // 5), count)
    best = None
    for step in range(steps + 1):
        rank = start + (count - start) * step // steps
        threshold = ranked[rank].item() if rank < count else math.inf
        errors = int((~correct[u < threshold]).sum())
        best = threshold if binomial_cdf(errors, rank, max_risk) <= level else best
    return best


def test_without_the_assumption_more_is_kept_than_by_a_union_bound() -> None:
    """Errors at the uncertainties in the middle, 800 examples: the promise holds, and less is refused.

    The risk below t is 0 up to .25 and exceeds .05 from .3 on. Binomial(60, .1) is above 14 once in 1,000.
    """
    broken, refused, unions = 0, 0, 0
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        u, noise = torch.rand(2, 800, generator=generator, dtype=torch.float64)
        correct = noise > 0.3 * ((u >= 0.25) & (u < 0.5))
        unions += _union_threshold(u, correct, 0.05, 0.9) is None
        try:
            threshold = Abstainer.fit(u, correct, max_risk=0.05, confidence=0.9, monotone=False, seed=seed).threshold
        except ValueError:
            refused += 1
        else:
            broken += 0.3 * (min(threshold, 0.5) - 0.25) / min(threshold, 1) > 0.05
    assert broken <= 14
    assert refused < 20
    assert unions > 40


def test_a_misleading_uncertainty_stops_the_sequence_only() -> None:
    """Errors that come first stop the sequence; without the assumption the search begins elsewhere."""
    u = torch.arange(4000)
    correct = (u < 50) | (u >= 100)
    with pytest.raises(ValueError, match="closest has a bound"):
        Abstainer.fit(u, correct, max_risk=0.05, confidence=0.95)
    abstainer = Abstainer.fit(u, correct, max_risk=0.05, confidence=0.95, monotone=False)
    assert abstainer.coverage == 1.0
    assert abstainer.risk == pytest.approx(50 / 4000, abs=0.005)


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
