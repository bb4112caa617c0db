"""Weighted measures are the plain measures on data that are really resampled."""

import pytest
import torch

from bayesify import Bernoulli, Categorical, Custom, Gaussian, convert, measure
from bayesify.evaluation import resampling, weighted
from bayesify.evaluation.evaluation import evaluate

NAMES = ["classes", "tied", "dense", "binary", "numbers", "several numbers", "no noise", "infinite"]


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def data(name):
    """Return a likelihood, outputs, targets and OOD outputs."""
    logits, labels = 2 * randn(40, 4, seed=0), torch.randint(4, (40,), generator=torch.Generator().manual_seed(1))
    far = randn(25, 4, seed=2)
    if name == "classes":
        return "classification", logits, labels, far
    if name == "tied":
        return "classification", logits.round(), labels, far.round()
    if name == "infinite":
        logits[3, labels[3]] = -torch.inf
        return "classification", logits, labels, far
    if name == "dense":
        labels = labels.reshape(8, 5).clone()
        labels[:5, 3:] = 9
        labels[6] = 9  # an example without a position that counts
        return Categorical(ignore_index=9), logits.reshape(8, 5, 4).round(decimals=1), labels, far.reshape(5, 5, 4)
    if name == "binary":
        return Bernoulli(), logits[:, :1], (labels[:, None] > 1).double(), far[:, :1]
    if name == "numbers":
        return Gaussian("head"), logits[:, :2], logits[:, 2:3], far[:, :2]
    if name == "several numbers":
        return Gaussian(0.8), logits[:, :2], logits[:, 2:], far[:, :2]
    return Custom(lambda output, target: -(output[:, 0] - target).abs()), logits[:, :1], logits[:, 1], far[:, :1]


def evaluated(likelihood, outputs, targets, far):
    return evaluate(convert(torch.nn.Identity(), "map", likelihood=likelihood), [(outputs, targets)], ood={"far": far})


@pytest.mark.parametrize("name", NAMES)
def test_replicates_are_the_metrics_of_resampled_data(name):
    likelihood, outputs, targets, far = data(name)
    found = evaluated(likelihood, outputs, targets, far).replicates(8, seed=3)
    sizes = {"test": len(outputs), "ood/far": len(far)}
    (weights,) = resampling.draw_weights(sizes, 8, seed=3, positions=1)
    for row in range(8):
        inside, outside = (
            torch.arange(sizes[key]).repeat_interleave(weights[key][row].long()) for key in ("test", "ood/far")
        )
        assert len(inside) == len(outputs)
        again = evaluated(likelihood, outputs[inside], targets[inside], far[outside]).metrics
        assert set(found.values) == set(again)
        assert {key: values[row].item() for key, values in found.values.items()} == pytest.approx(again, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_with_weights_of_one_they_are_the_metrics(name):
    result = evaluated(*data(name))
    tests, floors = resampling._of_test(result.prediction, result.targets)
    statistics = tests | resampling._of_ood(result.prediction, result.ood, result.score)
    ones = {
        "test": torch.ones(1, len(result.prediction)).double(),
        "ood/far": torch.ones(1, len(result.ood["far"])).double(),
    }
    assert {key: found(ones).item() for key, found in statistics.items()} == pytest.approx(result.metrics, abs=1e-12)
    assert {key: found(ones).item() for key, found in floors.items()} == pytest.approx(
        {key: result.metrics[key] for key in floors}, abs=1e-12
    )


def test_risk_is_compared_where_it_is_reached_exactly():
    """One error in a hundred is a risk of 1 %, whichever weights make the hundred."""
    doubts, right = torch.arange(5).double(), torch.tensor([True, True, True, False, True])
    found = weighted.coverage_at_risk(doubts, right, torch.ones(5, dtype=torch.bool), max_risk=0.01)
    weights = torch.tensor([[33, 33, 33, 1, 1], [33, 33, 32, 1, 0], [0, 0, 0, 2, 300]]).double()
    for row, value in zip(weights.long(), found(weights).tolist(), strict=True):
        assert value == measure.coverage_at_risk(
            doubts.repeat_interleave(row), right.repeat_interleave(row), max_risk=0.01
        )
    assert found(weights).tolist() == pytest.approx([1.0, 98 / 99, 1.0])


def test_the_floor_of_the_calibration_error_is_a_sum_over_bins():
    confidence = torch.tensor([0.95, 0.93, 0.55, 0.5]).double()
    right = torch.tensor([True, False, True, False])
    found = weighted.ece_floor(confidence, right, torch.ones(4, dtype=torch.bool), num_bins=2)
    # Bins (0, 0.5] and (0.5, 1], with gaps (0.5, 0.95 + 0.93 + 0.55 - 2) / 4 and (2 * 0.5, 0.95 + 0.55 - 2) / 4.
    own, other = (0.125, 0.1075), (0.25, -0.125)
    expected = sum(own) - sum(abs(a - b) for a, b in zip(own, other, strict=True))
    assert found(torch.tensor([[1, 0, 1, 2]]).double()).item() == pytest.approx(expected, abs=1e-12)


def test_weights_depend_on_seed_set_and_size_alone():
    sizes = {"test": 30, "ood/far": 20}
    whole = next(iter(resampling.draw_weights(sizes, 50, seed=1, positions=30)))
    parts = list(resampling.draw_weights({"test": 30}, 50, seed=1, positions=resampling.NUMBERS // 7))
    assert [len(part["test"]) for part in parts] == [7] * 7 + [1]
    assert torch.equal(whole["test"], torch.cat([part["test"] for part in parts]))
    assert (whole["test"].sum(1) == 30).all()
    other = next(iter(resampling.draw_weights(sizes, 50, seed=2, positions=30)))
    assert not torch.equal(whole["test"], other["test"])


def test_weights_are_multinomial():
    """The counts of an example have mean 1 and variance 1 - 1/n, and two have a covariance of -1/n."""
    (part,) = resampling.draw_weights({"test": 5}, 40_000, seed=0, positions=1)
    covariance = torch.cov(part["test"].T)
    expected = torch.eye(5).double() - 0.2
    assert part["test"].mean(0).sub(1).abs().max() < 0.9 / 200 * 4  # four standard errors
    assert (covariance - expected).abs().max() < 4 * 1.3 / 200


def test_a_set_of_one_example_has_no_interval():
    likelihood, outputs, targets, far = data("classes")
    with pytest.raises(ValueError, match="'test' has 1 example; an interval needs at least two"):
        evaluated(likelihood, outputs[:1], targets[:1], far).intervals()
    with pytest.raises(ValueError, match="'ood/far' has 1 example"):
        evaluated(likelihood, outputs, targets, far[:1]).intervals()
