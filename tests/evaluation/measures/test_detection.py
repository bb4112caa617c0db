"""Detection scores against scikit-learn, with ties."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics

from bayesify import measure

# Few distinct values, so that most examples have ties within and across the sets.
SCORES = st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 1.0]), min_size=1, max_size=25)


@settings(max_examples=60, deadline=None)
@given(inside=SCORES, outside=SCORES)
@pytest.mark.slow
def test_against_sklearn(inside: list[float], outside: list[float]) -> None:
    """All areas equal scikit-learn's, for either positive side."""
    scores = np.array(inside + outside)
    is_ood = np.array([0] * len(inside) + [1] * len(outside))
    assert measure.auroc(inside, outside) == pytest.approx(metrics.roc_auc_score(is_ood, scores), abs=1e-13)
    for side, target, value in (("ood", is_ood, scores), ("id", 1 - is_ood, -scores)):
        precision, recall, _ = metrics.precision_recall_curve(target, value)
        assert measure.aupr(inside, outside, positive=side) == pytest.approx(  # type: ignore[arg-type]
            metrics.auc(recall, precision), abs=1e-13
        )
        assert measure.average_precision(inside, outside, positive=side) == pytest.approx(  # type: ignore[arg-type]
            metrics.average_precision_score(target, value), abs=1e-13
        )
        fpr, tpr, _ = metrics.roc_curve(target, value, drop_intermediate=False)
        for level in (0.5, 0.95, 1.0):
            assert measure.fpr_at_tpr(inside, outside, tpr=level, positive=side) == pytest.approx(  # type: ignore[arg-type]
                fpr[tpr >= level].min(), abs=1e-13
            )


def test_worst_average_precision_tends_to_one_minus_ln_two() -> None:
    """The worst ranking of balanced sets has (1/n) sum k / (n + k), tending to 1 - ln 2."""
    count = 20_000
    worst = measure.average_precision(torch.arange(count) + count, torch.arange(count))
    k = torch.arange(1, count + 1, dtype=torch.float64)
    assert worst == pytest.approx((k / (count + k)).mean().item(), rel=1e-13)
    assert worst == pytest.approx(1 - math.log(2), abs=2e-5)


def test_perfect_constant_and_reversed() -> None:
    """Known values at both ends, and for a score without information."""
    low, high = [0.0, 1.0, 2.0], [3.0, math.inf]
    assert measure.auroc(low, high) == measure.aupr(low, high) == 1
    assert measure.average_precision(low, high, positive="id") == 1
    assert measure.fpr_at_tpr(low, high) == 0
    assert measure.auroc(high, low) == 0
    assert measure.fpr_at_tpr(high, low) == 1
    flat = measure.auroc([1.0] * 3, [1.0] * 5), measure.fpr_at_tpr([1.0] * 3, [1.0] * 5)
    assert flat == (0.5, 1.0)
    assert measure.average_precision([1.0] * 3, [1.0] * 5) == pytest.approx(5 / 8)


def test_fpr_direction() -> None:
    """The positive side is the OOD side: 19 of 20 OOD scores must be found."""
    outside = [0.05] + [0.5 + i / 100 for i in range(19)]
    inside = [0.1, 0.2, 0.5, 0.9]
    assert measure.fpr_at_tpr(inside, outside, tpr=0.95) == 0.5
    assert measure.fpr_at_tpr(inside, outside, tpr=0.96) == 1.0
    assert measure.fpr_at_tpr(inside, outside, tpr=0.75, positive="id") == pytest.approx(2 / 20)


def test_share_is_exact_in_decimal() -> None:
    """0.55 of 100 is 55 although 0.55 * 100 > 55 in floating point."""
    outside = np.arange(100)
    assert measure.fpr_at_tpr([44.5], outside, tpr=0.55) == 0
    assert measure.fpr_at_tpr([44.5], outside, tpr=0.56) == 1


@pytest.mark.parametrize("name", ["auroc", "aupr", "average_precision", "fpr_at_tpr"])
def test_bad_scores(name: str) -> None:
    """One-class input and NaN get a sentence that names the array."""
    function = getattr(measure, name)
    with pytest.raises(ValueError, match="id_scores is empty; pass"):
        function([], [1.0])
    with pytest.raises(ValueError, match="ood_scores is empty; pass"):
        function([1.0], torch.zeros(0))
    with pytest.raises(ValueError, match="ood_scores contains NaN"):
        function([1.0], [math.nan, 1.0])


def test_bad_options() -> None:
    """An unknown side and an impossible rate are refused."""
    with pytest.raises(ValueError, match='"ood" or "id"'):
        measure.aupr([1.0], [2.0], positive="in")  # type: ignore[arg-type]
    for tpr in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match="tpr is"):
            measure.fpr_at_tpr([1.0], [2.0], tpr=tpr)
