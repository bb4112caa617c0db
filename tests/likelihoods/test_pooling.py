"""Pooling: the power mean of draws, its limits, its fit, and the uncertainties that it leaves alone."""

import copy
import math

import numpy as np
import pytest
import torch
from scipy import optimize, special

import bayesify
from bayesify import Bernoulli, Categorical, DeepEnsemble
from bayesify.likelihoods import pooling_fit
from bayesify.likelihoods.pooling import pool
from bayesify.likelihoods.pooling_fit import Pooled, fit_pooled, folds_of
from bayesify.likelihoods.prediction import Prediction

F64 = torch.float64


def power_mean(log_probs, a):
    """The definition, in numpy, of distributions (S, ..., C)."""
    powers = log_probs.mean(0) if a == 0 else special.logsumexp(a * log_probs, axis=0) / a
    return special.log_softmax(powers, axis=-1)


def draws(*shape, scale=3.0, seed=0):
    return scale * torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("a", [0.0, 1e-3, 0.3, 1.0])
def test_the_mean_of_groups_is_that_of_the_definition(a):
    logits = draws(5, 7, 4)
    likelihood = Categorical(exponent=a).double()
    likelihood.temperature.fill_(1.7)
    stream = likelihood.stream()
    for some in logits.split([1, 3, 1]):
        stream.add(some)
    found = stream.result()
    tempered = special.log_softmax(logits.numpy() / 1.7, axis=-1)
    np.testing.assert_allclose(found.log_probs, power_mean(tempered, a), rtol=0, atol=1e-10)
    np.testing.assert_allclose(pool(torch.from_numpy(tempered), a), power_mean(tempered, a), rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.log_probs.exp().sum(-1), 1, rtol=1e-12)
    # Uncertainties are those of the average of the same probabilities, whatever the pooling.
    average = np.exp(tempered).mean(0)
    np.testing.assert_allclose(found.total, special.entr(average).sum(-1), rtol=1e-10)
    np.testing.assert_allclose(found.aleatoric, special.entr(np.exp(tempered)).sum(-1).mean(0), rtol=1e-10)
    assert torch.allclose(found.total, found.aleatoric + found.epistemic, rtol=1e-10)


def test_label_and_confidence_follow_the_pooling():
    # Two draws are mildly for class 0; one is nearly sure that it is class 1, and rules class 0 out.
    probs = torch.tensor([[[0.55, 0.45]], [[0.55, 0.45]], [[0.001, 0.999]]], dtype=F64)
    for a in (1.0, 0.0):
        found = Categorical(exponent=a).double().from_samples(probs.log())
        expected = np.exp(power_mean(probs.log().numpy(), a))
        np.testing.assert_allclose(found.probs, expected, rtol=1e-12)
        assert found.label.item() == expected.argmax()
        assert found.confidence.item() == pytest.approx(expected.max(), rel=1e-12)
        assert found.msp.item() == pytest.approx(expected.min(), rel=1e-9)


@pytest.mark.parametrize("a", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.slow
def test_gaussian_outputs_are_pooled_as_their_draws_are(a, classes):
    torch.manual_seed(0)
    mean, variance = draws(6, classes, scale=1.5), draws(6, classes).square() / 4
    likelihood = Categorical(exponent=a).double()
    exact = likelihood.from_gaussian(mean, variance)
    drawn = likelihood.from_gaussian(mean, variance, num_draws=400_000)
    torch.testing.assert_close(exact.log_probs, drawn.log_probs, rtol=0, atol=0.03)
    torch.testing.assert_close(exact.epistemic, drawn.epistemic, rtol=0.05, atol=2e-3)
    if a == 0:  # E ln softmax(l)_c = E l_c - const
        torch.testing.assert_close(exact.log_probs, mean.log_softmax(-1), rtol=0, atol=2e-3)


@pytest.mark.parametrize("a", [0.0, 0.4, 1.0])
def test_a_mixture_of_predictions_is_pooled_as_all_draws_are(a):
    logits = draws(6, 5, 4)
    likelihood = Categorical(exponent=a).double()
    parts = [likelihood.from_samples(logits[:2]), likelihood.from_samples(logits[2:])]
    mixed, whole = Prediction.mixture(parts, [2 / 6, 4 / 6]), likelihood.from_samples(logits)
    for name in ("log_probs", "total", "aleatoric", "epistemic", "model_variance", "logits_mean", "logits_variance"):
        torch.testing.assert_close(getattr(mixed, name), getattr(whole, name), rtol=1e-9, atol=1e-12)
    again = Prediction.mixture([mixed, likelihood.from_samples(logits)], [0.5, 0.5])
    torch.testing.assert_close(again.log_probs, whole.log_probs, rtol=1e-9, atol=1e-12)


def test_differently_pooled_predictions_do_not_mix():
    logits = draws(2, 3, 4)
    for exponents in ((0.0, 0.5), (1.0, 0.0), (0.0, 1.0)):
        parts = [Categorical(exponent=a).from_samples(logits) for a in exponents]
        with pytest.raises(ValueError, match="pooled differently"):
            Prediction.mixture(parts, [0.5, 0.5])
        with pytest.raises(ValueError, match="pooled differently"):
            Prediction.join(parts)


def test_classes_that_are_ruled_out_have_no_say_in_temperatures_and_exponent():
    logits, labels = draws(4, 60, 3), torch.arange(60) % 3
    more = torch.cat([logits, torch.full((4, 60, 1), -torch.inf, dtype=logits.dtype)], -1)
    options = {"parts": [0, 0, 1, 1], "pooling": "power", "temperatures": "each"}
    plain, masked = Categorical().double(), Categorical().double()
    plain.calibrate([(logits, labels)], **options)
    masked.calibrate([(more, labels)], **options)
    torch.testing.assert_close(masked.temperature, plain.temperature, rtol=1e-4, atol=0)
    assert masked.exponent == pytest.approx(plain.exponent, rel=1e-4)


def test_temperatures_of_each_part_need_draws_of_each():
    network, x = torch.nn.Linear(2, 2), torch.randn(30, 2)
    posterior = bayesify.convert(network, bayesify.IBNN(components=3))
    seed = next(seed for seed in range(20) if [key.path[0] for key in posterior.keys(2, seed)] == [0, 1])
    with pytest.raises(ValueError, match="num_draws=3 or more"):
        bayesify.calibrate(posterior, [(x, x.argmax(1))], num_draws=2, seed=seed, temperatures="each")
    bayesify.calibrate(posterior, [(x, x.argmax(1))], num_draws=2, seed=seed)
    assert posterior.likelihood.temperature.ndim == 0


def test_inference_mode_around_it_changes_nothing():
    x = torch.randn(30, 2)
    posteriors = [bayesify.convert(torch.nn.Linear(2, 2), bayesify.IBNN(components=2)) for _ in range(2)]
    posteriors[1].load_state_dict(posteriors[0].state_dict())
    options = {"pooling": "power", "temperatures": "each"}
    bayesify.calibrate(posteriors[0], [(x, x.argmax(1))], **options)
    with torch.inference_mode():
        bayesify.calibrate(posteriors[1], [(x.clone(), x.argmax(1))], **options)
    assert torch.equal(posteriors[0].likelihood.temperature, posteriors[1].likelihood.temperature)
    assert not posteriors[1].likelihood.temperature.is_inference()


def test_each_part_has_its_temperature():
    logits = draws(3, 5, 4)
    likelihood = Categorical().double()
    likelihood.temperature = torch.tensor([0.5, 2.0], dtype=F64)
    stream = likelihood.stream()
    for draw, part in zip(logits, [1, 0, 1], strict=True):
        stream.add(draw[None], part=part)
    by_hand = special.softmax(logits.numpy() / np.array([2.0, 0.5, 2.0])[:, None, None], axis=-1).mean(0)
    np.testing.assert_allclose(stream.result().probs, by_hand, rtol=1e-12)
    found = likelihood.from_gaussian(logits[0], torch.zeros_like(logits[0]), part=1)
    np.testing.assert_allclose(found.probs, special.softmax(logits[0].numpy() / 2.0, axis=-1), rtol=1e-9)


def objective(logits, labels, parts):
    def nll(values):
        *logs, a = values
        logs = np.array(logs)[np.array(parts) if len(logs) > 1 else np.zeros(len(parts), int)]
        tempered = special.log_softmax(logits.numpy() / np.exp(logs)[:, None, None], axis=-1)
        return -power_mean(tempered, a)[range(len(labels)), labels].mean()

    return nll


def sharp_and_vague(number=600, seed=0):
    """Members of different sharpness, and labels of their normalised product."""
    generator = torch.Generator().manual_seed(seed)
    truth = 1.5 * torch.randn(number, 3, dtype=F64, generator=generator)
    noise = 0.7 * torch.randn(2, number, 3, dtype=F64, generator=generator)
    logits = (truth + noise) * torch.tensor([4.0, 0.6], dtype=F64)[:, None, None]
    labels = torch.multinomial(truth.softmax(-1), 1, generator=generator)[:, 0]
    return logits, labels


@pytest.mark.parametrize(("pooling", "temperatures"), [("power", "each"), ("log-probs", "each"), ("power", "one")])
def test_temperatures_and_exponent_are_those_of_a_brute_force_search(pooling, temperatures):
    logits, labels = sharp_and_vague()
    found, before, after = fit_pooled(
        logits, labels, start=Pooled(torch.ones(()), 1.0), parts=[0, 1], pooling=pooling, temperatures=temperatures
    )
    nll = objective(logits, labels, [0, 1])
    count = 2 if temperatures == "each" else 1
    bounds = [(-4, 4)] * count + [(0, 0) if pooling == "log-probs" else (1e-3, 1)]
    starts = [[0.0] * count + [a] for a in ((0.0,) if pooling == "log-probs" else (0.1, 0.9))]
    best = min((optimize.minimize(nll, x, bounds=bounds) for x in starts), key=lambda one: one.fun)
    mine = [*found.temperature.reshape(-1).log().tolist(), found.exponent]
    assert before == pytest.approx(nll([0.0] * count + [1.0]), rel=1e-9)
    assert after == pytest.approx(nll(mine), rel=1e-9)
    assert after <= best.fun + 1e-5
    if count == 2:
        assert found.temperature[0] > 3 * found.temperature[1]  # what made them, 4 and .6


def alike_with_wrong_labels(number=1000, seed=0):
    """Two members that are nearly the same, and labels of which a tenth is random: a floor under p would help."""
    generator = torch.Generator().manual_seed(seed)
    truth = 6 * torch.randn(number, 4, dtype=F64, generator=generator)
    logits = truth + 0.3 * torch.randn(2, number, 4, dtype=F64, generator=generator)
    labels = torch.multinomial(truth.softmax(-1), 1, generator=generator)[:, 0]
    wrong = torch.rand(number, generator=generator) < 0.1
    return logits, labels.where(~wrong, torch.randint(4, (number,), generator=generator))


def test_no_part_is_switched_off_by_its_temperature(monkeypatch):
    logits, labels = alike_with_wrong_labels()
    start = Pooled(torch.ones(()), 1.0)

    def fitted(*, parts, draws=logits, temperatures="each"):
        return fit_pooled(draws, labels, start=start, parts=parts, pooling="probs", temperatures=temperatures)

    alone = torch.stack([fitted(parts=[0], draws=one[None], temperatures="one")[0].temperature for one in logits])
    found, _, nll = fitted(parts=[0, 1])
    apart = (found.temperature / alone).log()
    assert float(apart.max() - apart.min()) <= 2 * math.log(2) + 0.01
    assert nll < fitted(parts=[0, 1], temperatures="one")[2]
    monkeypatch.setattr(pooling_fit, "SPREAD", 50.0)  # what would be without the limit
    free, _, less = fitted(parts=[0, 1])
    apart = (free.temperature / alone).log()
    assert float(apart.max() - apart.min()) > 1.3 * 2 * math.log(2)
    assert less < nll


def vague(right, wrong):
    """Logits of a network that is too unsure, with so many right and wrong answers, and the labels."""
    labels = torch.arange(right + wrong) % 3
    answers = torch.where(torch.arange(right + wrong) < right, labels, (labels + 1) % 3)
    return 0.5 * torch.eye(3, dtype=F64)[answers][None], labels


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli(), bayesify.Ordinal(thresholds=[-1.0, 1.0])])
@pytest.mark.parametrize("wrong", [0, 4, 5])
def test_few_errors_do_not_lower_a_temperature(likelihood, wrong):
    logits, labels = vague(100, wrong)
    if isinstance(likelihood, Bernoulli):
        logits, labels = 0.4 - 0.8 * (logits.argmax(-1) != 0).double(), (labels == 0).double()
        logits[0, 100:] = 0.4 - 0.8 * labels[100:]  # wrong of this question too
    elif isinstance(likelihood, bayesify.Ordinal):
        logits = 1.5 * (logits.argmax(-1) - 1.0)
    likelihood = copy.deepcopy(likelihood).double()
    errors = int((~likelihood.from_samples(logits).correct(labels.long())).sum())
    assert errors == wrong
    before, after = likelihood.calibrate([(logits, labels)])
    temperature = likelihood.temperature.item()
    if wrong < 5:
        assert (temperature, after) == (1.0, before)
    else:
        assert temperature < 0.9
        assert after < before


def test_one_sure_error_raises_a_temperature():
    logits, labels = vague(30, 1)
    likelihood = Categorical().double()
    likelihood.calibrate([(20 * logits, labels)])
    assert likelihood.temperature.item() > 1.5


def test_what_is_chosen_is_what_made_the_labels():
    logits, labels = sharp_and_vague(2000)
    likelihood = Categorical().double()
    likelihood.calibrate([(logits, labels)], parts=[0, 1], pooling="auto", temperatures="auto")
    assert likelihood.temperature.shape == (2,)
    # One function of which nothing but the temperature can be known.
    plain = Categorical().double()
    plain.calibrate([(logits[:1], labels)], pooling="auto", temperatures="auto")
    assert plain.temperature.ndim == 0
    assert plain.exponent == 1


def test_the_simplest_stays_where_nothing_is_gained():
    """Equal draws are pooled alike by every exponent, and by equal temperatures."""
    logits = draws(1, 300, 3).expand(4, -1, -1)
    labels = torch.multinomial(logits[0].softmax(-1), 1, generator=torch.Generator().manual_seed(1))[:, 0]
    likelihood = Categorical().double()
    likelihood.calibrate([(logits, labels)], parts=[0, 0, 1, 1], pooling="auto", temperatures="auto")
    assert likelihood.temperature.ndim == 0
    assert likelihood.exponent == 1


def test_few_examples_are_not_overfitted(monkeypatch):
    """Of ten members and forty examples, free temperatures of each are worse on new data; limited ones are not."""
    torch.manual_seed(0)
    truth = torch.randn(4040, 3, dtype=F64)
    logits = truth + 0.5 * torch.randn(10, 4040, 3, dtype=F64)
    labels = (truth - torch.rand_like(truth).log().neg().log()).argmax(-1)  # Gumbel's trick, alike in every torch
    parts = list(range(10))

    def calibrated(temperatures):
        likelihood = Categorical().double()
        likelihood.calibrate([(logits[:, :40], labels[:40])], parts=parts, temperatures=temperatures)
        way = Pooled(likelihood.temperature, likelihood.exponent)
        return way, -way.log_prob(logits[:, 40:], labels[40:], torch.tensor(parts)).mean().item()

    chosen, auto = calibrated("auto")
    assert chosen.temperature.ndim == 0
    limited = calibrated("each")[1]
    monkeypatch.setattr(pooling_fit, "SPREAD", 50.0)
    free = calibrated("each")[1]
    assert auto < free
    assert limited < free


def test_of_very_many_positions_some_are_fitted_to_and_all_are_judged(monkeypatch):
    logits = draws(3, 6000, 4)
    labels = (logits / 2).softmax(-1).mean(0).multinomial(1, generator=torch.Generator().manual_seed(1))[:, 0]
    start = Pooled(torch.tensor(1.0, dtype=F64), 1.0)
    monkeypatch.setattr(pooling_fit, "POSITIONS", 2000)
    monkeypatch.setattr(pooling_fit, "FITTED", 3 * 4 * 2000)
    found, before, after = fit_pooled(logits, labels, start=start, parts=[0] * 3)
    some = torch.randperm(6000, generator=torch.Generator().manual_seed(0))[:2000]
    alone = fit_pooled(logits[:, some], labels[some], start=start, parts=[0] * 3)[0]
    assert found == alone
    assert float(found.temperature) == pytest.approx(2.0, rel=0.1)

    def nll(temperature):
        probs = (logits / temperature).softmax(-1).mean(0)
        return -float(probs[torch.arange(6000), labels].log().mean())

    assert (before, after) == pytest.approx((nll(1.0), nll(found.temperature)), rel=1e-12)


def test_examples_of_dense_outputs_stay_together():
    """Folds are over images: with one label for all pixels of an image, pixels do not count as independent."""
    examples = torch.arange(20).repeat_interleave(50)
    folds, number = folds_of(examples)
    assert number == 5
    for image in range(20):
        assert len(folds[examples == image].unique()) == 1
    assert sorted(folds.unique().tolist()) == [0, 1, 2, 3, 4]
    some, _ = folds_of(examples, most=500)
    assert 0 < (some >= 0).sum() <= 500


def test_yes_or_no_is_pooled_as_two_classes():
    logits = draws(4, 50)
    y = (draws(50, seed=2) > 0).double()
    binary, classes = Bernoulli().double(), Categorical(class_dim=-1).double()
    pairs = torch.stack([torch.zeros_like(logits), logits], -1)
    binary.calibrate([(logits, y)], pooling="log-probs")
    classes.calibrate([(pairs, y.long())], pooling="log-probs")
    assert binary.exponent == 0
    assert binary.temperature.item() == pytest.approx(classes.temperature.item(), rel=1e-12)
    torch.testing.assert_close(binary.from_samples(logits).probs, classes.from_samples(pairs).probs)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"pooling": "median"}, "pooling must be one of"),
        ({"pooling": 1.5}, "must be an exponent from 0"),
        ({"temperatures": "many"}, "temperatures must be one of"),
    ],
)
def test_what_there_is_not_is_refused(wrong, words):
    posterior = bayesify.convert(torch.nn.Linear(2, 3), "map")
    with pytest.raises(ValueError, match=words):
        bayesify.calibrate(posterior, [(torch.randn(4, 2), torch.zeros(4).long())], **wrong)


def test_numbers_are_not_pooled():
    posterior = bayesify.convert(torch.nn.Linear(2, 1), "map", likelihood="regression")
    with pytest.raises(ValueError, match="are for classes"):
        bayesify.calibrate(posterior, [(torch.randn(4, 2), torch.zeros(4))], pooling="log-probs")


def test_an_exponent_that_cannot_be():
    with pytest.raises(ValueError, match="exponent must be from 0"):
        Categorical(exponent=-1.0)


def test_members_keep_their_temperatures_in_a_folder(tmp_path):
    torch.manual_seed(0)
    network = torch.nn.Linear(3, 3).double()
    posterior = bayesify.convert(network, DeepEnsemble(members=2, start="perturbed", perturb_std=1.0))
    x = torch.randn(200, 3, dtype=F64)
    logits = posterior.evaluate(x, posterior.keys(1, 0)[:1])[0]
    y = torch.multinomial(logits.detach().softmax(-1), 1)[:, 0]
    bayesify.calibrate(posterior, [(x, y)], pooling="log-probs", temperatures="each")
    assert posterior.likelihood.temperature.shape == (2,)
    expected = bayesify.predict(posterior, x)
    bayesify.save(posterior, tmp_path / "kept")
    loaded = bayesify.load(tmp_path / "kept", network)
    assert loaded.likelihood.exponent == 0
    assert torch.equal(loaded.likelihood.temperature, posterior.likelihood.temperature)
    assert torch.equal(bayesify.predict(loaded, x).log_probs, expected.log_probs)
    # Without draws members have the same temperatures, and the same pooling.
    streamlined = bayesify.predict(posterior, x, how="streamlined")
    torch.testing.assert_close(streamlined.log_probs, expected.log_probs, rtol=1e-6, atol=1e-8)


def test_regression_scales_all_of_a_mixtures_variance():
    torch.manual_seed(0)
    network = torch.nn.Linear(3, 1).double()
    method = DeepEnsemble(members=3, start="perturbed", perturb_std=1.0)
    posterior = bayesify.convert(network, method, likelihood=bayesify.Gaussian(0.3))
    posterior.likelihood.variance_scale.fill_(2.5)
    x = torch.randn(9, 3, dtype=F64)
    drawn, carried = bayesify.predict(posterior, x), bayesify.predict(posterior, x, how="streamlined")
    torch.testing.assert_close(carried.epistemic, drawn.epistemic, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(carried.aleatoric, drawn.aleatoric, rtol=1e-9, atol=1e-12)
