"""Abstention by class and by cost: against naive loops, and promises of a known truth."""

from __future__ import annotations

import json
import math

import pytest
import torch
from scipy import stats

from bayesify.decide import Abstainer, ClassAbstainer, CostAbstainer, mean_upper_bound


def _data(seed: int, count: int, slope: float = 0.5):
    generator = torch.Generator().manual_seed(seed)
    u, noise = torch.rand(2, count, generator=generator, dtype=torch.float64)
    return u, noise > slope * u


def test_classes_have_abstainers_of_their_own():
    u, correct = _data(0, 3000, 0.3)
    label = torch.arange(3000) % 3
    correct = correct & (label != 2)  # nothing that says 2 is right
    made = ClassAbstainer.fit(u, correct, label, max_risk={0: 0.15, 1: 0.2, 2: 0.1}, confidence=0.9, num_classes=5)
    for index, risk in ((0, 0.15), (1, 0.2)):
        own = label == index
        alone = Abstainer.fit(u[own], correct[own], max_risk=risk, confidence=1 - (1 - 0.9) / 3, monotone=False)
        assert made.abstainers[index] == alone
    assert made.refused == (2, 3, 4)
    new, classes = torch.rand(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64), torch.arange(50) % 6
    limits = [made.abstainers[0].threshold, made.abstainers[1].threshold, -1.0, -1.0, -1.0, -1.0]
    wanted = [value < limits[one] for value, one in zip(new.tolist(), classes.tolist(), strict=True)]
    assert made(new, classes).keep.tolist() == wanted
    assert made == ClassAbstainer.from_dict(json.loads(json.dumps(made.to_dict())))
    with pytest.raises(ValueError, match="No class reaches its risk"):
        ClassAbstainer.fit(u, correct & False, label)


def test_promises_of_all_classes_hold_together():
    """P(wrong | u < t) = t / 4 in each of two classes: broken in at most .2 of 40 sets; 17 or more once in 1,000."""
    broken = kept = 0
    for seed in range(40):
        u, correct = _data(seed, 2400)
        try:
            made = ClassAbstainer.fit(u, correct, torch.arange(2400) % 2, max_risk=0.1, confidence=0.8, seed=seed)
        except ValueError:  # refused, and so nothing is broken
            continue
        limits = made.thresholds.clamp(0, 1)
        broken += bool((limits / 4 > 0.1).any())
        kept += float(limits.mean())
    assert broken < 17
    assert kept / 40 > 0.1


def test_threshold_of_least_cost():
    u, correct = _data(0, 400)
    u = (u * 20).round() / 20  # equal ones
    order = torch.randperm(400, generator=torch.Generator().manual_seed(5))
    first, second = order[:200], order[200:]
    made = CostAbstainer.fit(u, correct, error_cost=5.0, question_cost=1.0, seed=5)
    costs = {}
    for threshold in [-math.inf, *u.unique().tolist(), math.inf]:
        kept = u[first] < threshold
        costs[threshold] = 5.0 * int((kept & ~correct[first]).sum()) + int((~kept).sum())
    assert costs[made.threshold] == min(costs.values())
    kept = u[second] < made.threshold
    assert made.cost == pytest.approx((5.0 * int((kept & ~correct[second]).sum()) + int((~kept).sum())) / 200)
    assert made.cost < made.cost_bound < 5
    assert made(u[second]).coverage == made.coverage
    assert made == CostAbstainer.from_dict(json.loads(json.dumps(made.to_dict())))
    all_asked = CostAbstainer.fit(u, correct & False, error_cost=5.0, question_cost=1.0)
    assert (all_asked.threshold, all_asked.cost) == (-math.inf, 1.0)
    assert all_asked == CostAbstainer.from_dict(json.loads(json.dumps(all_asked.to_dict())))
    assert CostAbstainer.fit(u, correct | True, error_cost=1.0, question_cost=1.0).threshold == math.inf
    with pytest.raises(ValueError, match="error_cost must be above 0"):
        CostAbstainer.fit(u, correct, error_cost=0.0, question_cost=1.0)


def test_bound_of_a_mean_against_scipy_and_its_promise():
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(80, generator=generator, dtype=torch.float64) ** 3
    bound, average = mean_upper_bound(values, 0.9), float(values.mean())
    kl = average * math.log(average / bound) + (1 - average) * math.log((1 - average) / (1 - bound))
    tail = min(math.exp(-80 * kl), math.e * stats.binom.cdf(math.ceil(80 * average), 80, bound))
    assert tail == pytest.approx(0.1, rel=1e-6)
    draws = torch.rand(60, 50, generator=generator, dtype=torch.float64) ** 3  # of mean 1/4
    missed = sum(mean_upper_bound(row, 0.9) < 0.25 for row in draws)
    assert missed <= 14  # Binomial(60, .1): more once in 1,000
    coins = (torch.rand(60, 50, generator=generator) < 0.1).double()
    assert sum(mean_upper_bound(row, 0.9) < 0.1 for row in coins) <= 14
    with pytest.raises(ValueError, match="from 0 to 1"):
        mean_upper_bound([2.0], 0.9)
