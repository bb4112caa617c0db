"""Paired differences: the same resampled examples for both, and what cannot be paired."""

import json
from dataclasses import replace

import pytest
import torch

import bayesify
from bayesify import Gaussian, Poisson, StudentT, compare, convert, evaluate
from bayesify.evaluation import resampling
from bayesify.evaluation.comparison import table

TARGETS = torch.randint(3, (200,), generator=torch.Generator().manual_seed(0))
LOGITS = 2 * torch.nn.functional.one_hot(TARGETS, 3) + torch.randn(200, 3, generator=torch.Generator().manual_seed(1))
NOISE = 0.3 * torch.randn(200, 3, generator=torch.Generator().manual_seed(2))
ENDS = torch.tensor([0.05, 0.95], dtype=torch.float64)
FAR = torch.randn(80, 3, generator=torch.Generator().manual_seed(3))


def evaluated(logits, name, targets=TARGETS, far=FAR):
    return evaluate(convert(torch.nn.Identity(), "map"), [(logits, targets)], ood={"far": far}, name=name)


def both():
    return [evaluated(LOGITS, "plain"), evaluated(1.3 * (LOGITS + NOISE), "other", far=1.3 * FAR)]


def test_differences_are_those_of_really_resampled_data():
    first, second = both()
    found = compare([first, second], level=0.9, num_replicates=20, seed=4)
    (weights,) = resampling.draw_weights({"test": 200, "ood/far": 80}, 20, seed=4, positions=1)
    kept = {name: [] for name in first.metrics}
    for inside, outside in zip(weights["test"].long(), weights["ood/far"].long(), strict=True):
        rows, others = torch.arange(200).repeat_interleave(inside), torch.arange(80).repeat_interleave(outside)
        a = evaluated(LOGITS[rows], "a", TARGETS[rows], FAR[others])
        b = evaluated((1.3 * (LOGITS + NOISE))[rows], "b", TARGETS[rows], (1.3 * FAR)[others])
        for name, values in kept.items():
            values.append(b.metrics[name] - a.metrics[name])
    for name, values in kept.items():
        difference = found["other"][name]
        value = second.metrics[name] - first.metrics[name]
        low, high = torch.quantile(torch.tensor(values, dtype=torch.float64), ENDS).tolist()
        assert difference.value == value
        assert (difference.low, difference.high) == pytest.approx((min(low, value), max(high, value)), abs=1e-12)


def test_pairs_are_narrower_than_what_they_are_made_of():
    first, second = both()
    difference = compare([first, second])["other"]["nll"]
    widths = [found.high - found.low for found in (first.interval("nll"), second.interval("nll"))]
    assert difference.high - difference.low < 0.5 * max(widths)


def test_an_evaluation_does_not_differ_from_itself():
    first = both()[0]
    found = compare([first, replace(first, name="again")])
    assert {(one.value, one.low, one.high) for one in found["again"].values()} == {(0.0, 0.0, 0.0)}
    assert "*" not in str(found).splitlines()[2]


def test_the_table_marks_what_excludes_zero():
    worse = evaluated(0.1 * LOGITS, "flat", far=0.1 * FAR)
    found = compare([*both(), worse], baseline="other")
    assert list(found.differences) == ["plain", "flat"]
    lines = str(found).splitlines()
    assert lines[0].split()[:4] == ["accuracy", "NLL", "Brier", "ECE"]
    assert lines[1].startswith("other")
    flat = next(index for index, line in enumerate(lines) if line.startswith("flat"))
    difference = found["flat"]["nll"]
    assert 0 not in difference
    assert f"{difference.value:+.4f}*" in lines[flat]
    assert f"[{difference.low:+.4f}, {difference.high:+.4f}]" in lines[flat + 1]
    for name, one in found["plain"].items():
        if name == "nll":
            assert (f"{one.value:+.4f}*" in lines[2]) == (0 not in one)
    assert "Differences to other, with paired 95% bootstrap intervals. * the interval excludes zero." in lines
    assert repr(found) == str(found)


def test_the_dictionary_is_json():
    found = compare(both())
    values = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    one = found["other"]["nll"]
    assert values["baseline"] == "plain"
    assert values["differences"]["other"]["nll"] == {
        "value": one.value, "low": one.low, "high": one.high, "level": 0.95, "excludes_zero": 0 not in one,
    }  # fmt: skip


def test_regression_and_measures_that_one_of_them_lacks():
    posterior = convert(torch.nn.Identity(), "map", likelihood=Gaussian(0.5))
    data = [(LOGITS[:, :1], LOGITS[:, 1])]
    first = evaluate(posterior, data, name="a")
    second = evaluate(posterior, [(LOGITS[:, :1] + 1, LOGITS[:, 1])], name="b", ood={"far": FAR[:, :1]})
    found = compare([first, second])
    assert set(found["b"]) == {"rmse", "nll", "crps", "coverage", "width"}
    assert found["b"]["width"].value == pytest.approx(0, abs=1e-6)
    assert "RMSE" in str(found)


def test_what_cannot_be_paired_is_said():
    first, second = both()
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    shuffled = evaluated(LOGITS[order], "shuffled", TARGETS[order])
    with pytest.raises(ValueError, match=r"'plain' and 'shuffled' have different targets.*does not shuffle"):
        compare([first, shuffled])
    with pytest.raises(ValueError, match="different targets"):
        compare([first, evaluated(LOGITS[:50], "fewer", TARGETS[:50])])
    with pytest.raises(ValueError, match="OOD set 'far' has 80 examples in 'plain' and 60 in 'other'"):
        compare([first, evaluated(LOGITS, "other", far=FAR[:60])])
    with pytest.raises(ValueError, match=r"no evaluation 'swag' to compare with; there are .'plain', 'other'."):
        compare([first, second], baseline="swag")
    with pytest.raises(ValueError, match="Several evaluations are called"):
        compare([first, first])
    with pytest.raises(ValueError, match="nothing to compare"):
        compare([])
    with pytest.raises(KeyError, match="no evaluation 'plain' beside 'plain'"):
        compare([first, second])["plain"]
    assert compare([first]).differences == {}


def test_a_shuffled_loader_is_noticed():
    data = torch.utils.data.TensorDataset(LOGITS, TARGETS)
    loader = torch.utils.data.DataLoader(data, batch_size=20, shuffle=True)
    posterior = convert(torch.nn.Identity(), "map")
    with pytest.raises(ValueError, match="different targets"):
        bayesify.compare([evaluate(posterior, loader, name=name) for name in "ab"])


def test_numbers_with_other_noise_can_be_compared_and_counts_with_counts_only():
    counts = torch.arange(40.0) % 5
    given = [(counts[:, None] + 0.3, counts)]

    def measured(likelihood, name):
        return evaluate(convert(torch.nn.Identity(), "map", likelihood=likelihood), given, name=name)

    plain, heavy = measured(Gaussian(1.0), "gaussian"), measured(StudentT(4.0, scale=1.0), "student")
    found = compare([plain, heavy])
    assert found["student"]["nll"].value == heavy.metrics["nll"] - plain.metrics["nll"]
    assert "crps" not in found["student"]
    assert "student" in str(found)
    assert "student" in table([plain, heavy])
    with pytest.raises(ValueError, match="Counts have probabilities and other numbers have densities"):
        compare([plain, measured(Poisson(), "poisson")])
