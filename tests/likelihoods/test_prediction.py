"""The result of a prediction: joining, indexing, scores, intervals."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import stats

from bayesify import Categorical, ClassificationPrediction, Gaussian, Prediction, RegressionPrediction

F64 = torch.float64


def classified(rows=5, *, keep_samples=True, extra=()):
    logits = torch.randn(4, rows, *extra, 3, dtype=F64)
    return Categorical(class_dim=-1).from_samples(logits, keep_samples=keep_samples)


def regressed(rows=5):
    return Gaussian(0.5).from_samples(torch.randn(4, rows, dtype=F64), keep_samples=True)


def same(left, right):
    assert type(left) is type(right)
    for field in dataclasses.fields(left):
        a, b = getattr(left, field.name), getattr(right, field.name)
        assert (a is None) == (b is None), field.name
        assert a is None or torch.equal(a, b), field.name


@pytest.mark.parametrize("make", [classified, regressed, lambda: classified(extra=(2, 2))])
def test_parts_join_to_the_whole(make):
    whole = make()
    parts = [whole[:2], whole[2:3], whole[3:]]
    assert [len(part) for part in parts] == [2, 1, 2]
    same(Prediction.join(parts), whole)
    same(type(whole).join([whole]), whole)


def test_fields_that_are_missing_stay_missing():
    whole = classified(keep_samples=False)
    assert Prediction.join([whole[:1], whole[1:]]).samples is None


def test_nothing_cannot_be_joined():
    with pytest.raises(ValueError, match="no prediction to join"):
        Prediction.join([])


@pytest.mark.parametrize(
    ("rows", "kept"),
    [
        (0, [0]),
        (-1, [4]),
        (-2, [3]),
        (slice(1, None, 2), [1, 3]),
        (torch.tensor([True, False, False, True, False]), [0, 3]),
        (np.array([True, False, False, True, False]), [0, 3]),
        (torch.tensor([4, 0]), [4, 0]),
        ([4, 0], [4, 0]),
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [classified, regressed])
def test_examples_are_taken_from_every_field(make, rows, kept):
    whole = dataclasses.replace(make(), predictor="moments")
    found = whole[rows]
    assert len(found) == len(kept)
    for field in dataclasses.fields(whole):
        tensor, taken = getattr(whole, field.name), getattr(found, field.name)
        if field.name == "predictor":
            assert taken == tensor
            continue
        assert torch.equal(taken, tensor[:, kept] if field.name == "samples" else tensor[kept])


def test_a_loop_over_examples_ends():
    whole = regressed()
    assert torch.equal(torch.cat([one.mean for one in whole]), whole.mean)
    for row in (5, -6):
        with pytest.raises(IndexError, match=f"There is no example {row}: there are 5"):
            whole[row]


def test_cpu_moves_every_field():
    whole = classified()
    moved = whole._map(lambda _, t: t.to("meta"))
    assert moved.epistemic.device.type == "meta"
    same(whole.cpu(), whole)


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        classified().epistemic = torch.zeros(5)


def test_properties_of_classification():
    prediction = classified(extra=(2,))
    probs = prediction.samples.mean(0)
    torch.testing.assert_close(prediction.probs, probs, rtol=1e-12, atol=0)
    assert torch.equal(prediction.label, probs.argmax(-1))
    torch.testing.assert_close(prediction.confidence, probs.amax(-1), rtol=1e-12, atol=0)
    torch.testing.assert_close(prediction.max_probability, 1 - probs.amax(-1), rtol=1e-12, atol=0)
    expected = torch.distributions.Categorical(probs).entropy()
    torch.testing.assert_close(prediction.total, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_confident_predictions_keep_their_order(dtype):
    gaps = torch.tensor([20.0, 30.0, 40.0], dtype=dtype)
    prediction = Categorical().from_samples(torch.stack([gaps, torch.zeros_like(gaps)], -1)[None])
    torch.testing.assert_close(prediction.max_probability, (-gaps).sigmoid(), rtol=1e-6, atol=0)
    certain = ClassificationPrediction(torch.zeros(2, 1), *torch.zeros(4, 2))  # one class
    assert torch.equal(certain.max_probability, torch.zeros(2))


@pytest.mark.parametrize("make", [classified, regressed])
def test_scores_are_higher_when_more_suspicious(make):
    prediction = make()
    for name in prediction.scores:
        assert torch.equal(prediction.score(name), getattr(prediction, name))
        assert prediction.score(name).shape == (5,)
    assert torch.equal(prediction.score(), prediction.epistemic)
    with pytest.raises(ValueError, match=r"no score 'surprise' here; there are \['total', 'aleatoric', 'epistemic'"):
        prediction.score("surprise")


@pytest.mark.parametrize("level", [0.01, 0.5, 0.683, 0.95, 0.999999])
def test_intervals_are_those_of_scipy(level):
    prediction = regressed()
    low, high = prediction.interval(level)
    std = np.sqrt(prediction.variance.numpy())
    expected = stats.norm(prediction.mean.numpy(), std).interval(level)
    np.testing.assert_allclose(low, expected[0], rtol=1e-9)
    np.testing.assert_allclose(high, expected[1], rtol=1e-9)
    np.testing.assert_allclose(prediction.std, std, rtol=1e-14)


@pytest.mark.parametrize("level", [0, 1, 95, -0.1, math.nan])
def test_a_level_is_a_probability(level):
    with pytest.raises(ValueError, match="level is a probability between 0 and 1"):
        regressed().interval(level)


def test_a_regression_without_samples():
    one = torch.ones(2)
    assert len(RegressionPrediction(one, one, one)) == 2
