"""Selective prediction against loops, and against the mean over all orders of ties."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bayesify import measure

PAIRS = st.lists(st.tuples(st.sampled_from([0.1, 0.2, 0.3, 0.7]), st.booleans()), min_size=1, max_size=20)


@settings(max_examples=50, deadline=None)
@given(pairs=PAIRS)
def test_risk_coverage_equals_loop(pairs: list[tuple[float, bool]]) -> None:
    """Every point of the curve is what its threshold keeps."""
    curve = measure.risk_coverage([u for u, _ in pairs], [c for _, c in pairs])
    assert curve.threshold.tolist() == sorted({u for u, _ in pairs})
    for coverage, risk, threshold in zip(
        curve.coverage.tolist(), curve.risk.tolist(), curve.threshold.tolist(), strict=True
    ):
        kept = [c for u, c in pairs if u <= threshold]
        assert coverage == len(kept) / len(pairs)
        assert risk == kept.count(False) / len(kept)


@settings(max_examples=50, deadline=None)
@given(pairs=PAIRS, max_risk=st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9]))
def test_coverage_at_risk_equals_loop(pairs: list[tuple[float, bool]], max_risk: float) -> None:
    """The best threshold of all is found, or 0."""
    best = 0.0
    for threshold in {u for u, _ in pairs}:
        kept = [c for u, c in pairs if u <= threshold]
        if kept.count(False) / len(kept) <= max_risk:
            best = max(best, len(kept) / len(pairs))
    result = measure.coverage_at_risk([u for u, _ in pairs], [c for _, c in pairs], max_risk=max_risk)
    assert result == best


def _risks(correct: tuple[bool, ...]) -> list[float]:
    return [correct[:k].count(False) / k for k in range(1, len(correct) + 1)]


@settings(max_examples=25, deadline=None)
@given(pairs=st.lists(st.tuples(st.sampled_from([0.1, 0.2, 0.3]), st.booleans()), min_size=1, max_size=6))
def test_ties_are_averaged_over_all_orders(pairs: list[tuple[float, bool]]) -> None:
    """Area and accuracies are exact means over every order of equal uncertainties."""
    orders = [p for p in itertools.permutations(pairs) if [u for u, _ in p] == sorted(u for u, _ in p)]
    risks = np.mean([_risks(tuple(c for _, c in order)) for order in orders], axis=0)
    uncertainty, correct = [u for u, _ in pairs], [c for _, c in pairs]
    assert measure.aurc(uncertainty, correct) == pytest.approx(risks.mean(), abs=1e-13)
    fractions = [k / len(pairs) for k in range(len(pairs))]
    result = measure.accuracy_after_rejection(uncertainty, correct, fractions=fractions)
    assert result.tolist() == pytest.approx((1 - risks[::-1]).tolist(), abs=1e-13)


def test_aurc_of_perfect_and_worst_order() -> None:
    """Closed forms: one error at the end gives 1 / N^2, at the start H_N / N."""
    u = torch.arange(10)
    assert measure.aurc(u, u < 9) == pytest.approx(1 / 100, rel=1e-14)
    harmonic = sum(1 / k for k in range(1, 11))
    assert measure.aurc(u, u > 0) == pytest.approx(harmonic / 10, rel=1e-14)


def test_rejected_share_is_rounded_down_exactly() -> None:
    """29 of 100 are rejected at 0.29, in float64 and float32, and 28 just below it."""
    u = torch.arange(100)
    correct = u < 71
    for dtype in (torch.float64, torch.float32):
        fractions = torch.tensor([0.0, 0.28, 0.29, 0.999], dtype=dtype)
        result = measure.accuracy_after_rejection(u, correct, fractions=fractions)
        assert result.tolist() == pytest.approx([0.71, 71 / 72, 1.0, 1.0], rel=1e-14)


def test_accuracy_by_bucket_equals_split() -> None:
    """Without ties the buckets are consecutive parts; the shape of the input is irrelevant."""
    generator = torch.Generator().manual_seed(0)
    u = torch.rand(6, 10, generator=generator)
    correct = torch.rand(6, 10, generator=generator) > u
    order = u.flatten().argsort()
    expected = [part.double().mean().item() for part in correct.flatten()[order].reshape(5, 12)]
    result = measure.accuracy_by_bucket(u, correct, num_buckets=5)
    assert result.tolist() == pytest.approx(expected, abs=1e-14)


def test_ties_share_a_bucket() -> None:
    """Half of the inputs with no uncertainty at all fill the first of four buckets."""
    result = measure.accuracy_by_bucket([0, 0, 0, 0, 1, 2, 3, 4], [1, 0, 1, 0, 1, 1, 0, 0], num_buckets=4)
    assert result[[0, 2, 3]].tolist() == [0.5, 1.0, 0.0]
    assert math.isnan(result[1])


def test_bad_input() -> None:
    """Each mistake is named together with its remedy."""
    with pytest.raises(ValueError, match="uncertainty \\(2,\\), correct \\(1,\\)"):
        measure.aurc([0.1, 0.2], [True])
    with pytest.raises(ValueError, match="predicted == labels"):
        measure.risk_coverage([0.1, 0.2], [0, 7])
    with pytest.raises(ValueError, match="uncertainty contains NaN"):
        measure.aurc([math.nan], [True])
    with pytest.raises(ValueError, match="max_risk is 1"):
        measure.coverage_at_risk([0.1], [True], max_risk=1.0)
    with pytest.raises(ValueError, match="fractions leave"):
        measure.accuracy_after_rejection([0.1], [True], fractions=[1.0])
    with pytest.raises(ValueError, match="fewer buckets"):
        measure.accuracy_by_bucket([0.1], [True], num_buckets=2)
