"""Intervals: their ends, how often they hold the truth, and where there is none."""

import json
import math
from dataclasses import replace

import pytest
import torch

from bayesify import Interval, convert
from bayesify.evaluation import resampling, weighted
from bayesify.evaluation.comparison import table
from bayesify.evaluation.evaluation import evaluate
from bayesify.evaluation.intervals import interval


def evaluated(examples=300, seed=0, sharpness=1.0):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(3, (examples,), generator=generator)
    logits = 2 * torch.nn.functional.one_hot(targets, 3) + torch.randn(examples, 3, generator=generator)
    far = torch.randn(100, 3, generator=generator)
    posterior = convert(torch.nn.Identity(), "map")
    return evaluate(posterior, [(sharpness * logits, targets)], ood={"far": sharpness * far})


def test_ends_are_the_quantiles_of_the_replicates():
    result = evaluated()
    values = result.replicates().values["nll"]
    for level in (0.5, 0.95):
        found = result.interval("nll", level)
        ends = torch.quantile(values, torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64))
        assert (found.low, found.high) == pytest.approx(tuple(ends.tolist()), abs=1e-12)
        assert found.value == result.metrics["nll"]
        assert found.level == level


def test_the_interval_of_a_mean_is_near_that_of_its_standard_error():
    result = evaluated(600)
    surprises = -result.prediction.log_prob(result.targets)
    error = surprises.std().item() / math.sqrt(600)
    found = result.interval("nll", num_replicates=2000)
    assert found.low == pytest.approx(found.value - 1.96 * error, abs=0.25 * error)  # of 2,000, one of 0.06
    assert found.high == pytest.approx(found.value + 1.96 * error, abs=0.25 * error)


def test_intervals_are_those_of_all_metrics_and_repeat():
    result = evaluated()
    assert set(result.intervals()) == set(result.metrics)
    assert evaluated().intervals() == result.intervals()
    assert evaluated().intervals(seed=1) != result.intervals()


def test_nothing_is_resampled_before_it_is_asked_for(monkeypatch):
    calls = []

    def counted(*args, **options):
        calls.append(set(options["names"]))
        return resampling.resample(*args, **options)

    monkeypatch.setattr("bayesify.evaluation.evaluation.resample", counted)
    result = evaluated()
    result.to_dict(), table([result]), repr(result)
    assert calls == []
    alone = result.interval("nll")
    result.interval("nll", 0.5)
    assert calls == [{"nll"}]
    assert result.intervals()["nll"] == alone
    result.interval("ece"), table([result], intervals=0.9), result.intervals(0.5)
    assert calls == [{"nll"}, set(result.metrics) - {"nll"}]
    other = replace(result, name="other")  # which may have another prediction too
    assert other.interval("aurc") == result.interval("aurc")
    assert calls[2:] == [{"aurc"}]


def hits(make, truth, repetitions=400, replicates=400):
    """Return in how many repetitions the 95 % interval holds the truth."""
    found = 0
    for seed in range(repetitions):
        generator = torch.Generator().manual_seed(seed)
        statistic, floor, sizes = make(generator)
        names = [str(index) for index in range(len(sizes))]
        (weights,) = resampling.draw_weights(dict(zip(names, sizes, strict=True)), replicates, seed, 1)
        drawn = [weights[name] for name in names]
        ones = [torch.ones(1, size).double() for size in sizes]
        floors = None if floor is None else floor(*drawn)
        found += truth in interval(statistic(*ones).item(), statistic(*drawn), 0.95, floors)
    return found


def normal(generator, size):
    return torch.randn(size, generator=generator, dtype=torch.float64)


def calibrated(gap):
    def make(generator):
        confidence = 0.5 + 0.5 * torch.rand(300, generator=generator, dtype=torch.float64)
        right = torch.rand(300, generator=generator, dtype=torch.float64) < confidence - gap
        given = confidence, right, torch.ones(300, dtype=torch.bool)
        return weighted.ece(*given), weighted.ece_floor(*given), (300,)

    return make


# 95 % of 400 is 380, with a standard deviation of 4.4; a bootstrap of a finite set is a little below its level.
AUROC = 0.5 + 0.5 * math.erf(1.5 / 2)  # Phi(1.5 / sqrt 2)


@pytest.mark.slow
def test_95_percent_intervals_of_a_mean_hold_it_in_95_percent():
    found = hits(lambda g: (weighted.mean(normal(g, 300) + 2), None, (300,)), 2.0)
    assert 380 - 3 * 4.4 <= found <= 380 + 3 * 4.4


@pytest.mark.slow
def test_95_percent_intervals_of_an_auroc_hold_it_in_95_percent():
    found = hits(lambda g: (weighted.auroc(normal(g, 150), normal(g, 100) + 1.5), None, (150, 100)), AUROC)
    assert 380 - 3 * 4.4 <= found <= 380 + 3 * 4.4


@pytest.mark.slow
@pytest.mark.parametrize("gap", [0.0, 0.1])
def test_intervals_of_the_calibration_error_hold_it_even_where_it_is_zero(gap):
    """Those of the replicates alone never hold a zero; with a floor they are cautious."""
    assert hits(calibrated(gap), gap, repetitions=200) >= 190 - 2 * 3.1


def test_a_measure_that_is_infinite_has_an_infinite_end():
    result = evaluated(50)
    prediction = result.prediction
    logs = prediction.log_probs.clone()
    logs[0, result.targets[0]] = -torch.inf
    logs[0] = logs[0].log_softmax(-1)
    result = replace(result, prediction=replace(prediction, log_probs=logs), metrics={"nll": math.inf})
    found = result.interval("nll")
    assert found.high == math.inf
    assert 0 < found.low < math.inf  # a third of the resampled sets do not have the example
    assert found.to_dict() == {"value": None, "low": found.low, "high": None, "level": 0.95}


def test_an_end_beside_minus_infinity_is_minus_infinity():
    """As differences to a baseline whose NLL is infinite have."""
    values = torch.tensor([-torch.inf, -torch.inf, *range(48)])
    assert interval(3.0, values, 0.95) == Interval(3.0, -math.inf, pytest.approx(45.775), 0.95)


def test_replicates_that_are_not_a_number_are_left_out_and_the_value_is_inside():
    values = torch.tensor([1.0, torch.nan, 2.0, 3.0] * 30)
    assert interval(2.0, values, 0.9) == Interval(2.0, 1.0, 3.0, 0.9)
    assert interval(0.5, values, 0.9).low == 0.5
    assert interval(4.0, values, 0.9).high == 4.0


def test_what_has_no_interval_is_said():
    result = evaluated(20)
    with pytest.raises(ValueError, match=r"no interval of 'speed'; the metrics are .'accuracy'"):
        result.interval("speed")
    with pytest.raises(ValueError, match=r"level is 95.0; give a share in .0, 1., 0.95 for 95 %"):
        result.interval("nll", 95)
    with pytest.raises(ValueError, match=r"30 replicates are too few for the ends of intervals of level 0.95; take 40"):
        result.interval("nll", num_replicates=30)
    with pytest.raises(ValueError, match="num_replicates is 0"):
        result.replicates(0)
    with pytest.raises(ValueError, match="no interval of 'extra'"):
        replace(result, metrics={"extra": 1.0}).interval("extra")


def test_dictionaries_and_tables_have_intervals_on_request():
    result = evaluated()
    assert "intervals" not in result.to_dict()
    values = json.loads(json.dumps(result.to_dict(intervals=0.9)))
    found = result.interval("auroc/far", 0.9)
    assert values["intervals"]["auroc/far"] == {
        "value": found.value,
        "low": found.low,
        "high": found.high,
        "level": 0.9,
    }
    lines = table([result], intervals=0.9).splitlines()
    own = result.interval("nll", 0.9)
    assert f"[{own.low:.3f}, {own.high:.3f}]" in lines[2]
    assert lines[-1] == "[low, high]: 90% bootstrap intervals over 300 examples."
    assert [*lines[0].split(), *lines[1].split()] == table([result]).split()[: len(lines[0].split() + lines[1].split())]
