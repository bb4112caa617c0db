"""The monitor: equal to a naive gambler, false alarms for ever, and how soon a change is found."""

from __future__ import annotations

import json
import math

import pytest
import torch
from scipy import stats

from bayesify.decide import Detector, Monitor
from bayesify.decide.monitor import HOLD, RATIOS, TAILS


def _naive(values: list[float], known: int, rate: float, two_sided: bool) -> list[float]:
    """Return the capital after each input, one by one, with scipy's quantiles."""
    ranks = sorted({math.floor(tail * (known + 1)) - 1 for tail in TAILS} - {-1})
    sides = [False, True] if two_sided else [False]
    bets = []
    for high in sides:
        for rank in ranks:
            bound = stats.beta.ppf(1 - rate / 2 / (len(ranks) * len(sides)), rank + 1, known - rank)
            bets += [
                (high, rank, bound, min(0.9, ratio * bound)) for ratio in RATIOS if min(0.9, ratio * bound) > bound
            ]
    cash, arms, found = 1.0, [0.0] * len(bets), []
    for time, value in enumerate(values):
        above = round(value * (known + 1)) - 1
        stake = cash / (HOLD + time)
        cash -= stake
        for index, (high, rank, bound, odds) in enumerate(bets):
            happened = known - above <= rank if high else above <= rank
            arms[index] += stake / len(bets)
            arms[index] *= odds / bound if happened else (1 - odds) / (1 - bound)
        found.append(cash + sum(arms))
    return found


@pytest.mark.parametrize("two_sided", [False, True])
def test_capital_is_that_of_a_naive_gambler(two_sided):
    known = 300
    generator = torch.Generator().manual_seed(0)
    values = (torch.randint(known + 1, (400,), generator=generator) + 1).double() / (known + 1)
    values[250:] = values[250:].square().mul(known + 1).ceil() / (known + 1)
    wanted = _naive(values.tolist(), known, 0.05, two_sided)
    monitor = Monitor(known, 0.05, two_sided)
    state = None
    for start in range(0, 400, 50):
        monitor.update(values[start : start + 50])
        assert monitor.evidence == pytest.approx(math.log(wanted[start + 49]), rel=1e-9, abs=1e-9)
        if start == 150:
            state = json.loads(json.dumps(monitor.to_dict()))
    crossed = next((time + 1 for time, value in enumerate(wanted) if value >= 40), None)
    assert crossed is not None
    assert monitor.alarmed_at == crossed
    assert abs(monitor.changed_at - 250) < 60
    again = Monitor.from_dict(state)  # killed after 200 inputs
    again.update(values[200:])
    assert again.evidence == pytest.approx(monitor.evidence, rel=1e-12)
    assert (again.alarmed_at, again.changed_at, again.seen) == (monitor.alarmed_at, monitor.changed_at, 400)


def _streams(count: int, seed: int, number: int, shift: float, share: float, change: int, length: int):
    """Count alarms before the change, and give the delays after it; each stream has a calibration set of its own."""
    early, delays = 0, []
    for index in range(number):
        generator = torch.Generator().manual_seed(1000 * seed + index)
        detector = Detector.fit(torch.randn(count, generator=generator, dtype=torch.float64))
        scores = torch.randn(length, generator=generator, dtype=torch.float64)
        moved = torch.rand(length, generator=generator) < share
        moved[:change] = False
        monitor = Monitor(count, 0.1, two_sided=True)
        monitor.update(detector(scores + shift * moved).p_value)
        if monitor.alarmed_at is not None:
            early += monitor.alarmed_at <= change
            delays += [monitor.alarmed_at - change] if monitor.alarmed_at > change else []
    return early, delays


@pytest.mark.slow
def test_false_alarms_over_200_null_streams():
    """At a rate of .1, over streams of 3,000 and calibration sets of 200: Binomial(200, .1) is above 34 once in 1,000.

    A test by p-values as if they were uniform would raise an alarm in most, since the calibration sets are small.
    """
    early, _ = _streams(200, 0, 200, 0.0, 0.0, 3000, 3000)
    assert early <= 34


def test_changes_are_found():
    """All of 20 streams in which a tenth of the inputs moves by four deviations are found, most within 300 inputs."""
    early, delays = _streams(1000, 1, 20, 4.0, 0.1, 2000, 6000)
    assert early <= 4
    assert len(delays) + early == 20
    assert sorted(delays)[10] < 300
    easy, found = _streams(1000, 2, 10, -3.0, 0.5, 1000, 4000)  # inputs that look too familiar
    assert easy <= 3
    assert len(found) + easy == 10


def test_what_a_monitor_refuses():
    with pytest.raises(ValueError, match="too few to watch"):
        Monitor(3)
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        Monitor(100).update([0.0])
    with pytest.raises(ValueError, match="state is of 'Detector'"):
        Monitor.from_dict({"kind": "Detector"})
