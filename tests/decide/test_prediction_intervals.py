"""Prediction intervals: equal to a naive loop, and they hold what they promise."""

from __future__ import annotations

import json
import math

import pytest
import torch

from bayesify import RegressionPrediction
from bayesify.decide import PredictionIntervals, PredictionSets


def _problem(seed: int, count: int, outputs: int | None = None):
    """Numbers whose noise grows, and a prediction that knows so, but is too sure of itself."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count,) if outputs is None else (count, outputs)
    mean, size = torch.randn(shape, generator=generator).double(), torch.rand(shape, generator=generator).double() + 0.1
    target = mean + size * torch.randn(shape, generator=generator).double()
    return RegressionPrediction(mean, (0.5 * size) ** 2, 0 * size), target


def _naive(kind, coverage, mean, std, target):
    z = math.sqrt(2) * torch.erfinv(torch.tensor(coverage, dtype=torch.float64)).item()
    if kind == "normalised":
        return abs(target - mean) / std
    if kind == "absolute":
        return abs(target - mean)
    return max(mean - z * std - target, target - mean - z * std)


@pytest.mark.parametrize("kind", ["normalised", "absolute", "quantile"])
@pytest.mark.parametrize("grouped", [False, True])
def test_intervals_are_those_of_a_naive_loop(kind, grouped):
    prediction, target = _problem(0, 120)
    new, _ = _problem(1, 30)
    groups = (prediction.std > 0.3).long()
    new_groups = torch.arange(30) % 3
    intervals = PredictionIntervals.fit(prediction, target, coverage=0.8, kind=kind, groups=groups if grouped else None)
    low, high = intervals(new, groups=new_groups if grouped else None)
    rows = zip(prediction.mean.tolist(), prediction.std.tolist(), target.tolist(), strict=True)
    scores = [_naive(kind, 0.8, *row) for row in rows]
    z = math.sqrt(2) * torch.erfinv(torch.tensor(0.8, dtype=torch.float64)).item()
    for row in range(30):
        which = int(new_groups[row])
        rest = sorted(s for s, g in zip(scores, groups.tolist(), strict=True) if not grouped or g == which)
        rank = math.ceil(round((len(rest) + 1) * 0.8, 9))
        q = rest[rank - 1] if rank <= len(rest) else math.inf
        mean, std = float(new.mean[row]), float(new.std[row])
        half = q * std if kind == "normalised" else q if kind == "absolute" else z * std + q
        assert float(low[row]) == pytest.approx(mean - half, rel=1e-12)
        assert float(high[row]) == pytest.approx(mean + half, rel=1e-12)
    again = PredictionIntervals.from_dict(json.loads(json.dumps(intervals.to_dict())))
    assert torch.equal(again(new, groups=new_groups if grouped else None)[1], high)


@pytest.mark.parametrize("outputs", [None, 3])
def test_coverage_holds(outputs):
    """Over 100 draws of 60 calibration examples and 50 new ones the mean lies in [.8, .8 + 1/61], to four errors."""
    for kind in ("normalised", "absolute", "quantile"):
        hits = []
        for seed in range(100):
            prediction, target = _problem(seed, 110, outputs)
            intervals = PredictionIntervals.fit(prediction[:60], target[:60], coverage=0.8, kind=kind)
            low, high = intervals(prediction[60:])
            held = ((low <= target[60:]) & (target[60:] <= high)).reshape(50, -1).all(1)
            hits.append(float(held.double().mean()))
        mean = torch.tensor(hits, dtype=torch.float64)
        error = float(mean.std()) / 10
        assert 0.8 - 4 * error < float(mean.mean()) < 0.8 + 1 / 61 + 4 * error, kind


def test_quantiles_of_any_model():
    prediction, target = _problem(0, 200)
    ends = prediction.interval(0.8)
    own = PredictionIntervals.fit(prediction, target, coverage=0.8, kind="quantile")(prediction)
    given = PredictionIntervals.fit(ends, target, coverage=0.8, kind="quantile")(ends)
    assert torch.allclose(own[0], given[0])
    assert torch.allclose(own[1], given[1])
    with pytest.raises(TypeError, match="kind='quantile'"):
        PredictionIntervals.fit(ends, target, coverage=0.8)
    with pytest.raises(TypeError, match="has no classes"):
        PredictionSets.fit(prediction, target.long())
    with pytest.raises(ValueError, match="do not fit predictions"):
        PredictionIntervals.fit(prediction, target[:100])
