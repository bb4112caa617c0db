"""Classes in an order, from one score."""

import json
import math

import numpy as np
import pytest
import torch
from scipy import special, stats

from bayesify import Laplace, Ordinal, Posterior, Prediction, convert, fit, load, save
from bayesify._core.files import digest
from bayesify.likelihoods import as_likelihood, likelihood_from_dict
from bayesify.methods import MAP

F64 = torch.float64
FIELDS = ("log_probs", "aleatoric", "epistemic", "variation_ratio", "model_variance", "logits_mean", "logits_variance")
THRESHOLDS = (-1.5, -0.2, 0.9, 3.0)


def ordinal(thresholds=THRESHOLDS, temperature=1.0):
    likelihood = Ordinal(thresholds=thresholds).double()
    with torch.no_grad():  # the constructor's are single
        likelihood.first.fill_(thresholds[0])
        likelihood.log_gaps.copy_(torch.tensor(np.diff(thresholds)).log())
        likelihood.temperature.fill_(temperature)
    return likelihood


def naive(scores, temperature=1.0):
    """Return p, (..., K), by scipy: differences of cumulated probabilities."""
    edges = np.array([-np.inf, *THRESHOLDS, np.inf])
    return np.diff(stats.logistic.cdf((edges - scores.numpy()[..., None]) / temperature), axis=-1)


def test_probabilities_are_differences_of_cumulated_ones():
    scores = torch.linspace(-3, 3, 7, dtype=F64)
    for label in range(5):
        found = ordinal().log_prob(scores[:, None], torch.full((7, 1), label))
        np.testing.assert_allclose(found.detach(), np.log(naive(scores)[:, label]), rtol=1e-10)
    torch.testing.assert_close(ordinal().thresholds, torch.tensor(THRESHOLDS, dtype=F64), rtol=1e-12, atol=0)
    draws = scores[None].expand(2, -1)
    np.testing.assert_allclose(ordinal().log_probs(draws)[1].exp().detach(), naive(scores), rtol=1e-10)


def test_far_scores_keep_their_digits():
    scores = torch.tensor([-300.0, 300.0], dtype=F64)
    found = ordinal().log_prob(scores, torch.tensor([4, 0]))
    torch.testing.assert_close(found.detach(), torch.tensor([-303.0, -301.5], dtype=F64), rtol=1e-12, atol=0)
    single = Ordinal(5).log_prob(torch.tensor([-80.0]), torch.tensor([2]))
    assert single.item() == pytest.approx(-81.5 + math.log(1 - math.exp(-1)), rel=1e-6)


def test_the_loss_is_the_mean_over_positions_that_count():
    scores, target = torch.randn(4, 3, dtype=F64), torch.tensor([[0, 1, -100], [2, 3, 4], [-100, 0, 0], [1, 1, 1]])
    each = np.take_along_axis(naive(scores), np.maximum(target.numpy(), 0)[..., None], -1)[..., 0]
    expected = -np.log(each)[target.numpy() >= 0].mean()
    assert ordinal().nll(scores, target).item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("temperature", [1.0, 0.4])
@pytest.mark.parametrize("shape", [(3,), (3, 1), (1, 1), (3, 2)])
def test_draws_in_groups_are_their_average(shape, temperature):
    scores = 2 * torch.randn(8, *shape, dtype=F64)
    likelihood = ordinal(temperature=temperature)
    stream = likelihood.stream(keep_samples=True)
    for some in scores.split([1, 5, 2]):
        stream.add(some, part=1, view=2)
    found = stream.result()
    flat = scores[..., 0] if shape[-1] == 1 and len(shape) > 1 else scores
    each = naive(flat, temperature)
    np.testing.assert_allclose(found.samples.detach(), each, rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(found.probs.detach(), each.mean(0), rtol=1e-10)
    aleatoric = special.entr(each).sum(-1).mean(0)
    np.testing.assert_allclose(found.aleatoric.detach(), aleatoric, rtol=1e-9)
    np.testing.assert_allclose(found.epistemic.detach(), special.entr(each.mean(0)).sum(-1) - aleatoric, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_gaussian_score_has_the_integral(temperature):
    mean = torch.linspace(-3, 3, 5, dtype=F64)
    variance = torch.tensor([0.3, 1.0, 4.0, 0.25, 9.0], dtype=F64)
    found = ordinal(temperature=temperature).from_gaussian(mean[:, None], variance[:, None])
    z = np.linspace(-9, 9, 4001)
    weights = stats.norm.pdf(z) / stats.norm.pdf(z).sum()  # equal steps: exact to rounding
    for index in range(5):
        each = naive(mean[index] + variance[index].sqrt() * torch.from_numpy(z), temperature)
        np.testing.assert_allclose(found.probs[index].detach(), weights @ each, atol=1e-8)
        assert found.aleatoric[index].item() == pytest.approx(weights @ special.entr(each).sum(-1), abs=1e-7)
        squares = weights @ (each**2).sum(-1) - ((weights @ each) ** 2).sum()
        assert found.model_variance[index].item() == pytest.approx(squares, abs=1e-7)
    torch.testing.assert_close(found.total, found.aleatoric + found.epistemic, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("variance", [0.04, 0.06, 2.0])
def test_moments_are_those_of_many_draws(variance):
    mean = torch.linspace(-3, 3, 7, dtype=F64)
    z = torch.special.ndtri((torch.arange(20_000, dtype=F64) + 0.5) / 20_000)  # draws without chance
    truth = ordinal().from_samples(mean + math.sqrt(variance) * z[:, None])
    found = ordinal().from_gaussian(mean, torch.full_like(mean, variance))
    for name in FIELDS:
        rough = name in ("epistemic", "model_variance") and variance < 0.05  # of first order
        limits = {"rtol": 0.05 if rough else 1e-3, "atol": 1e-6}
        if name == "variation_ratio":  # a draw votes for one class, and half a step of the integral holds .02
            limits = {"rtol": 0, "atol": 0.021}
        torch.testing.assert_close(getattr(found, name), getattr(truth, name), msg=name, **limits)


def test_small_variances_do_not_drown_in_rounding():
    mean = torch.linspace(-3, 3, 7)
    single = Ordinal(thresholds=THRESHOLDS).from_gaussian(mean, torch.full_like(mean, 1e-6))
    exact = ordinal().from_gaussian(mean.double(), torch.full_like(mean, 1e-6).double())
    torch.testing.assert_close(single.epistemic.double(), exact.epistemic, rtol=1e-4, atol=0)
    bits = stats.norm.ppf((np.arange(4000) + 0.5) / 4000)
    each = naive(mean.double() + 1e-3 * torch.from_numpy(bits)[:, None])
    expected = special.entr(each.mean(0)).sum(-1) - special.entr(each).sum(-1).mean(0)
    np.testing.assert_allclose(exact.epistemic.detach(), expected, rtol=1e-2)


def test_many_rows_are_some_rows_at_a_time():
    mean, variance = torch.randn(900, dtype=F64), torch.rand(900, dtype=F64)
    whole = ordinal().from_gaussian(mean, variance)
    parts = [ordinal().from_gaussian(m, v) for m, v in zip(mean.split(100), variance.split(100), strict=True)]
    joined = Prediction.join(parts)
    for name in FIELDS:
        torch.testing.assert_close(getattr(whole, name), getattr(joined, name), rtol=1e-12, atol=1e-15)


def test_the_curvature_is_the_expected_hessian():
    scores = torch.randn(6, 2, dtype=F64)
    likelihood = ordinal()
    expected = torch.zeros(6, 2, dtype=F64)
    for label in range(5):
        leaf = scores.clone().requires_grad_()
        log_prob = likelihood.log_prob(leaf, torch.full((6, 2), label))
        (slope,) = torch.autograd.grad(log_prob.sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad(slope.sum(), leaf)
        expected -= log_prob.exp().detach() * second
    found = likelihood.output_factor(scores)
    assert found.shape == (6, 2, 1, 1)
    torch.testing.assert_close(found.square().flatten(1), expected, rtol=1e-10, atol=0)
    target = torch.zeros(6, 2).long()
    target[0] = -100
    assert not likelihood.output_factor(scores, target)[0].any()


def test_random_columns_are_right_on_average():
    scores = torch.randn(3, 2, dtype=F64)
    exact = ordinal().output_factor(scores).flatten(1).square().diag_embed()
    generator = torch.Generator().manual_seed(0)
    factor = ordinal().output_factor(scores, num_draws=2000, generator=generator)[:, :, 0]
    torch.testing.assert_close(factor @ factor.mT, exact, rtol=0, atol=0.06 * exact.max().item())


def test_thresholds_are_learned_to_the_closed_form():
    """With one score for all, the thresholds are the logits of the cumulated shares of labels."""
    counts = torch.tensor([5, 20, 10, 40, 25])
    target = torch.repeat_interleave(torch.arange(5), counts)
    likelihood = Ordinal(5).double()
    nll = likelihood.learn(torch.full((100, 1), 0.3, dtype=F64), target)
    expected = torch.special.logit(counts.double().cumsum(0)[:-1] / 100) + 0.3
    torch.testing.assert_close(likelihood.thresholds, expected, rtol=1e-3, atol=1e-3)
    assert nll == pytest.approx(stats.entropy(counts / 100), abs=1e-6)
    assert not likelihood.at_start()
    assert Ordinal(5).at_start()
    assert all(parameter.grad is None for parameter in likelihood.parameters())


def test_calibration_finds_the_temperature():
    generator = torch.Generator().manual_seed(0)
    scores = 3 * torch.randn(1, 4000, 1, dtype=F64, generator=generator)
    probs = torch.from_numpy(naive(scores[0, :, 0], temperature=2.5))
    labels = torch.multinomial(probs, 1, generator=generator)[:, 0]
    labels[:7] = -100
    likelihood = ordinal()
    before, after = likelihood.calibrate([(scores[:, :1000], labels[:1000]), (scores[:, 1000:], labels[1000:])])
    assert likelihood.temperature.item() == pytest.approx(2.5, rel=0.1)
    kept = labels >= 0
    found = -likelihood.from_samples(scores).log_prob(labels)[kept].mean().item()
    assert after == pytest.approx(found, rel=1e-10)
    assert after < before
    with pytest.raises(ValueError, match="no label to calibrate on"):
        likelihood.calibrate([(scores[:, :1], torch.tensor([-100]))])


@pytest.mark.parametrize(
    ("output", "target", "sentence"),
    [
        (
            torch.zeros(3, 2),
            torch.zeros(3).long(),
            r"\(3, 2\) do not fit targets of shape \(3,\).*one score per target",
        ),
        (torch.zeros(2), torch.tensor([0, 5]), "from 0 to 5, but there are 5 classes in order"),
        (torch.zeros(2), torch.tensor([-1, 4]), "from -1 to 4"),
        (torch.zeros(2), torch.zeros(2), "float32; an ordinal likelihood needs integer labels, 0 to 4"),
    ],
)
def test_what_does_not_fit_gets_a_sentence(output, target, sentence):
    with pytest.raises(ValueError, match=sentence):
        Ordinal(5).nll(output, target)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, r"needs the number of classes, likelihood=Ordinal\(num_classes=5\)"),
        ({"num_classes": 1}, "num_classes must be from 2"),
        ({"num_classes": 10**9}, "num_classes must be from 2 to 10,000"),
        ({"thresholds": [1.0, 1.0]}, "numbers that increase"),
        ({"thresholds": [0.0, math.inf]}, "numbers that increase"),
        ({"num_classes": 4, "thresholds": [0.0, 1.0]}, "4 classes have 3 thresholds between them, not 2"),
    ],
)
def test_settings_that_cannot_be(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        Ordinal(**settings)


def test_its_name_alone_does_not_say_how_many_classes():
    with pytest.raises(ValueError, match=r"Ordinal\(num_classes=5\)"):
        as_likelihood("ordinal")
    assert likelihood_from_dict(Ordinal(4).to_dict()).to_dict() == {"kind": "ordinal", "num_classes": 4}
    assert repr(Ordinal(4)) == "Ordinal(num_classes=4)"


def test_thresholds_and_temperature_are_saved(tmp_path):
    network = torch.nn.Linear(3, 1)
    posterior: Posterior = convert(network, MAP(), likelihood=ordinal(temperature=1.7).float())
    save(posterior, tmp_path / "posterior")
    loaded = load(tmp_path / "posterior", network)
    assert torch.equal(loaded.likelihood.thresholds, posterior.likelihood.thresholds)
    assert loaded.likelihood.temperature.item() == pytest.approx(1.7)


def test_a_file_with_another_number_of_classes_is_refused(tmp_path):
    network = torch.nn.Linear(3, 1)
    save(convert(network, MAP(), likelihood=Ordinal(5)), tmp_path / "posterior")
    path = tmp_path / "posterior" / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if key != "digest"}
    config["likelihood"]["num_classes"] = 7
    path.write_text(json.dumps({**config, "digest": digest(config)}))
    with pytest.raises(ValueError, match=r"asks for 7 classes in order, and thresholds are \(3,\)"):
        load(tmp_path / "posterior", network)


def test_laplace_says_that_thresholds_were_not_learned():
    x, y = torch.randn(20, 3), torch.randint(3, (20,))
    network = torch.nn.Linear(3, 1)
    posterior = convert(network, Laplace(), likelihood=Ordinal(3))
    with pytest.warns(UserWarning, match=r"Ordinal\(num_classes=3\) has parameters that Laplace does not learn.*learn"):
        fit(posterior, [(x, y)], num_data=20, progress=False)
    likelihood = Ordinal(3)
    likelihood.learn(network(x), y)
    fit(
        convert(network, Laplace(), likelihood=likelihood), [(x, y)], num_data=20, progress=False
    )  # a warning would be an error
