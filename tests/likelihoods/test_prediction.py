"""The result of a prediction: joining, indexing, scores, intervals."""

import copy
import dataclasses
import math
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from scipy import stats

from bayesify import (
    Bernoulli,
    Categorical,
    ClassificationPrediction,
    FeaturePrediction,
    Gaussian,
    Prediction,
    RegressionPrediction,
    measure,
)
from bayesify.likelihoods.categorical_stream import FEW

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
        assert (a is None) or (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b), field.name


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
        if not isinstance(tensor, torch.Tensor):
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
    torch.testing.assert_close(prediction.msp, 1 - probs.amax(-1), rtol=1e-12, atol=0)
    expected = torch.distributions.Categorical(probs).entropy()
    torch.testing.assert_close(prediction.total, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_confident_predictions_keep_their_order(dtype):
    gaps = torch.tensor([20.0, 30.0, 40.0], dtype=dtype)
    prediction = Categorical().from_samples(torch.stack([gaps, torch.zeros_like(gaps)], -1)[None])
    torch.testing.assert_close(prediction.msp, (-gaps).sigmoid(), rtol=1e-6, atol=0)
    certain = ClassificationPrediction(torch.zeros(2, 1), *torch.zeros(4, 2))  # one class
    assert torch.equal(certain.msp, torch.zeros(2))


@pytest.mark.parametrize("make", [classified, regressed])
def test_scores_are_higher_when_more_suspicious(make):
    prediction = make()
    for name in prediction.scores:
        assert torch.equal(prediction.score(name), getattr(prediction, name))
        assert prediction.score(name).shape == (5,)
    assert torch.equal(prediction.score(), prediction.total)
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


# -- against targets --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [(), (4,)])
def test_the_log_probability_of_labels(extra):
    prediction = classified(extra=extra)
    labels = torch.randint(3, (5, *extra))
    expected = torch.distributions.Categorical(prediction.probs).log_prob(labels)
    torch.testing.assert_close(prediction.log_prob(labels), expected, rtol=1e-12, atol=0)
    assert torch.equal(prediction.log_prob(labels[..., None].to(torch.uint8)), prediction.log_prob(labels))
    assert torch.equal(prediction.correct(labels), prediction.probs.argmax(-1) == labels)
    assert -prediction.log_prob(labels).mean().item() == pytest.approx(measure.nll(prediction.probs, labels), rel=1e-12)


def test_positions_that_do_not_count():
    prediction = classified(extra=(2,))
    labels = prediction.label.clone()
    labels[1, 0] = labels[4] = -100
    counted = prediction.counted(labels)
    assert torch.equal(counted, labels != -100)
    assert torch.equal(prediction.log_prob(labels) == 0, ~counted)
    assert torch.equal(prediction.correct(labels), counted)


def test_soft_labels_are_expectations():
    prediction = classified()
    shares = torch.rand(5, 3, dtype=F64).softmax(-1)
    expected = (shares * prediction.log_probs).sum(-1)
    torch.testing.assert_close(prediction.log_prob(shares), expected, rtol=1e-12, atol=0)
    assert torch.equal(prediction.correct(shares), prediction.label == shares.argmax(-1))
    assert prediction.counted(shares).all()
    sure = Categorical().from_samples(torch.tensor([[[1e5, 0.0, 0.0]]]))
    assert sure.log_prob(torch.tensor([[1.0, 0.0, 0.0]])).item() == 0  # 0 ln 0 = 0


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 2)])
def test_soft_answers_of_yes_or_no(shape):
    prediction = Bernoulli().from_samples(torch.randn(4, *shape, dtype=F64))
    target = torch.rand(shape, dtype=F64)
    p = prediction.probs[..., 1].reshape(shape)
    expected = (target * p.log() + (1 - target) * (1 - p).log()).reshape(prediction.total.shape)
    torch.testing.assert_close(prediction.log_prob(target), expected, rtol=1e-12, atol=0)
    right = ((p > 0.5) == (target > 0.5)).reshape(prediction.total.shape)
    assert torch.equal(prediction.correct(target), right)
    hard = target > 0.5
    assert torch.equal(prediction.log_prob(hard), prediction.log_prob(hard.double()))


def test_the_log_density_of_numbers():
    prediction = regressed()
    target = torch.randn(5, dtype=F64)
    expected = stats.norm(prediction.mean.numpy(), prediction.std.numpy()).logpdf(target.numpy())
    np.testing.assert_allclose(prediction.log_prob(target), expected, rtol=1e-12)
    assert torch.equal(prediction.log_prob(target[:, None]), prediction.log_prob(target))
    assert prediction.correct(target) is None
    assert prediction.counted(target).all()
    measured = measure.gaussian_nll(prediction.mean, prediction.variance, target)
    assert -prediction.log_prob(target).mean().item() == pytest.approx(measured, rel=1e-12)
    narrow = RegressionPrediction(*(torch.full((1,), value) for value in (1e3, 1e-6, 0.0)))
    assert narrow.log_prob(torch.tensor([1e3])).item() == pytest.approx(stats.norm(0, 1e-3).logpdf(0), rel=1e-6)


def test_targets_that_do_not_fit():
    with pytest.raises(ValueError, match=r"shape \(4,\) do not fit predictions of 3 classes of shape \(5,\)"):
        classified().log_prob(torch.zeros(4).long())
    with pytest.raises(ValueError, match=r"float32 of shape \(5,\) do not fit .* a share of every class"):
        classified().log_prob(torch.zeros(5))
    with pytest.raises(ValueError, match=r"shape \(5, 5\) do not fit predictions of shape \(5,\)"):
        regressed().log_prob(torch.zeros(5, 5))
    with pytest.raises(ValueError, match="no likelihood of a FeaturePrediction"):
        FeaturePrediction(torch.zeros(2, 3), torch.ones(2, 3)).log_prob(torch.zeros(2))


def test_a_mixture_is_that_of_all_draws():
    draws = torch.randn(12, 5, 3, dtype=F64)
    categorical = Categorical()
    parts = [categorical.from_samples(draws[:3]), categorical.from_samples(draws[3:])]
    found, expected = Prediction.mixture(parts, [0.25, 0.75]), categorical.from_samples(draws)
    for name in ("log_probs", "aleatoric", "epistemic", "model_variance", "logits_mean", "logits_variance"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-10, atol=1e-12, msg=name)
    parts = [Gaussian(0.5).from_samples(part) for part in (draws[:3, :, 0], draws[3:, :, 0])]
    found, expected = Prediction.mixture(parts, [0.25, 0.75]), Gaussian(0.5).from_samples(draws[:, :, 0])
    for name in ("mean", "aleatoric", "epistemic"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-10, atol=1e-12, msg=name)
    assert Prediction.mixture(parts[:1], [1.0]) is parts[0]
    with pytest.raises(TypeError, match=r"no mixture of .'RegressionPrediction', 'ClassificationPrediction'"):
        Prediction.mixture([parts[0], classified()], [0.5, 0.5])


def test_divergences_are_those_of_torch():
    one, two = classified(), classified()
    expected = torch.distributions.kl_divergence(*(torch.distributions.Categorical(p.probs) for p in (one, two)))
    torch.testing.assert_close(one.divergence(two), expected, rtol=1e-10, atol=1e-14)
    one, two = regressed(), regressed()
    expected = torch.distributions.kl_divergence(*(torch.distributions.Normal(p.mean, p.std) for p in (one, two)))
    torch.testing.assert_close(one.divergence(two), expected, rtol=1e-10, atol=1e-14)
    with pytest.raises(ValueError, match="no divergence of a FeaturePrediction"):
        FeaturePrediction(torch.zeros(2, 3), torch.ones(2, 3)).divergence(one)


def test_energy_is_of_the_outputs_as_they_are():
    """-ln sum exp of raw logits, averaged over draws, whatever the temperature; a shift of all logits moves it."""
    logits = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    likelihood = Categorical().double()
    likelihood.temperature.fill_(2.0)
    prediction = likelihood.from_samples(logits)
    for row in range(5):
        each = [-math.log(sum(math.exp(value) for value in draw[row].tolist())) for draw in logits]
        assert float(prediction.score("energy")[row]) == pytest.approx(sum(each) / 3, rel=1e-12)
    assert torch.allclose(likelihood.from_samples(logits + 3).energy, prediction.energy - 3)
    mixed = type(prediction).mixture(
        [likelihood.from_samples(logits[:1]), likelihood.from_samples(logits[1:])], [1 / 3, 2 / 3]
    )
    assert torch.allclose(mixed.energy, prediction.energy)
    assert "energy" not in likelihood.from_gaussian(logits[0], logits[0].square()).scores


def naive_details(logits):
    """The formulas of the fields that wait, draw by draw."""
    probs, votes = logits.softmax(-1), torch.zeros(logits.shape[1:], dtype=F64)
    for one in logits:
        votes[torch.arange(len(one)), one.argmax(-1)] += 1 / len(logits)
    centred = logits - logits.mean(-1, keepdim=True)
    return {
        "variation_ratio": 1 - votes.amax(-1),
        "model_variance": probs.square().sum(-1).mean(0) - probs.mean(0).square().sum(-1),
        "logits_mean": centred.mean(0),
        "logits_variance": centred.var(0, correction=0),
        "energy": -logits.logsumexp(-1).mean(0),
    }


@pytest.mark.parametrize("groups", [1, 3])
def test_details_are_made_when_one_of_them_is_asked_for(groups):
    torch.manual_seed(0)
    logits = 3 * torch.randn(6, 5, 4, dtype=F64)
    stream = Categorical().stream()
    for some in logits.chunk(groups):
        stream.add(some)
    made = stream.result()
    assert set(ClassificationPrediction.details).isdisjoint(vars(made)) == (groups == 1)
    assert not hasattr(made, "nonsense")
    assert set(ClassificationPrediction.details).isdisjoint(vars(made)) == (groups == 1)
    for name, expected in naive_details(logits).items():
        torch.testing.assert_close(getattr(made, name), expected, rtol=1e-12, atol=1e-12, msg=name)
    assert {field.name for field in dataclasses.fields(made)} >= vars(made).keys()  # nothing of the draws is left


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda p: pickle.loads(pickle.dumps(p)), lambda p: p[:]])
def test_copies_have_the_details(copied):
    torch.manual_seed(0)
    logits = torch.randn(6, 5, 4, dtype=F64)
    same(copied(Categorical().from_samples(logits)), Categorical().from_samples(logits).complete())


def test_details_wait_only_where_they_are_few_and_nobody_differentiates_them():
    few = Categorical().from_samples(torch.randn(2, 3, 4))
    many = Categorical().from_samples(torch.randn(2, FEW // 8 + 1, 4))
    learned = Categorical().from_samples(torch.randn(2, 3, 4, requires_grad=True))
    assert [("energy" in vars(made)) for made in (few, many, learned)] == [False, True, True]
    assert learned.energy.requires_grad


def test_votes_of_outputs_that_are_nan_do_not_look_unanimous_later():
    logits = torch.randn(4, 3, 5)
    logits[:, 1] = torch.nan
    assert Categorical().from_samples(logits).variation_ratio.isnan().tolist() == [False, True, False]


def test_threads_that_ask_at_once_get_the_same_details():
    torch.manual_seed(0)
    logits = torch.randn(20, 8, 10, dtype=F64)
    expected = naive_details(logits)
    for _ in range(20):
        made, start = Categorical().from_samples(logits), threading.Barrier(4)

        def ask(name, made=made, start=start):
            start.wait()
            return getattr(made, name)

        with ThreadPoolExecutor(4) as pool:
            names = ["energy", "variation_ratio", "logits_mean", "energy"]
            for name, found in zip(names, pool.map(ask, names), strict=True):
                torch.testing.assert_close(found, expected[name], rtol=1e-12, atol=1e-12)
