"""Yes or no."""

import math

import pytest
import torch
from scipy import integrate, special, stats

from bayesify import Bernoulli, Categorical
from bayesify.likelihoods import as_likelihood

F64 = torch.float64
FIELDS = ("log_probs", "aleatoric", "epistemic", "variation_ratio", "model_variance", "logits_mean", "logits_variance")


@pytest.mark.parametrize("output_shape", [(6,), (6, 1), (6, 3), (2, 4, 5)])
def test_log_prob_is_that_of_torch(output_shape):
    logits = 3 * torch.randn(output_shape, dtype=F64)
    target_shape = output_shape[:-1] if output_shape[-1] == 1 else output_shape
    target = torch.randint(2, target_shape).to(F64)
    expected = torch.distributions.Bernoulli(logits=logits.reshape(target_shape)).log_prob(target)
    likelihood = Bernoulli()
    torch.testing.assert_close(likelihood.log_prob(logits, target), expected, rtol=1e-12, atol=1e-300)
    torch.testing.assert_close(likelihood.nll(logits, target.bool()), -expected.mean(), rtol=1e-12, atol=0)
    assert torch.equal(likelihood.labels(target), target.long())


def test_soft_targets_and_a_kept_dimension():
    logits, target = torch.randn(5, 1, dtype=F64), torch.rand(5, 1, dtype=F64)
    p = logits.sigmoid()
    expected = target * p.log() + (1 - target) * (1 - p).log()
    torch.testing.assert_close(Bernoulli().log_prob(logits, target), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("shape", [(4,), (4, 1), (1,), (1, 1), (4, 3), (2, 3, 5)])
def test_draws_are_those_of_two_classes(shape):
    logits = torch.randn(7, *shape, dtype=F64)
    flat = logits[..., 0] if shape[-1] == 1 and len(shape) > 1 else logits
    pairs = torch.stack([torch.zeros_like(flat), flat], dim=-1)
    likelihood = Bernoulli().double()
    likelihood.temperature.fill_(1.7)
    wanted = Categorical(class_dim=-1).from_samples(pairs / 1.7, keep_samples=True)
    stream = likelihood.stream(keep_samples=True)
    for part in logits.split([1, 4, 2]):
        stream.add(part)
    prediction = stream.result()
    for name in (*FIELDS, "samples"):
        torch.testing.assert_close(getattr(prediction, name), getattr(wanted, name), rtol=1e-11, atol=1e-13, msg=name)
    torch.testing.assert_close(prediction.probs[..., 1], (flat / 1.7).sigmoid().mean(0), rtol=1e-12, atol=0)


def test_two_certain_draws_that_disagree_are_ln_2_apart():
    prediction = Bernoulli().from_samples(torch.tensor([[1e4], [-1e4]]))
    assert prediction.epistemic.item() == pytest.approx(math.log(2), rel=1e-6)
    assert prediction.aleatoric.item() == 0
    assert bool(prediction.total.isfinite().all())


@pytest.mark.parametrize("shape", [(9,), (9, 1)])
def test_a_gaussian_logit_has_the_integral(shape):
    mean = torch.linspace(-4, 4, 9, dtype=F64)
    variance = torch.linspace(0.01, 16, 9, dtype=F64)
    prediction = Bernoulli().from_gaussian(mean.reshape(shape), variance.reshape(shape))
    for index in range(9):
        normal = stats.norm(mean[index].item(), math.sqrt(variance[index].item()))
        low, high = normal.ppf([1e-12, 1 - 1e-12])
        exact, _ = integrate.quad(lambda z: special.expit(z) * normal.pdf(z), low, high)  # noqa: B023
        assert abs(prediction.probs[index, 1].item() - exact) < 1e-8
    torch.testing.assert_close(prediction.total, prediction.aleatoric + prediction.epistemic, rtol=1e-12, atol=1e-14)


def test_the_variances_of_moments_are_those_of_draws():
    mean = torch.linspace(-2, 2, 5, dtype=F64)
    variance = torch.full((5,), 1e-3, dtype=F64)
    truth = Bernoulli().from_samples(mean + variance.sqrt() * torch.randn(100_000, 5, dtype=F64))
    prediction = Bernoulli().from_gaussian(mean, variance)
    torch.testing.assert_close(prediction.model_variance, truth.model_variance, rtol=0.02, atol=0)
    torch.testing.assert_close(prediction.logits_variance, truth.logits_variance, rtol=0.02, atol=0)
    torch.testing.assert_close(prediction.logits_mean, truth.logits_mean, rtol=0, atol=1e-3)
    huge = Bernoulli().from_gaussian(torch.zeros(1), torch.tensor([1e6]))
    assert huge.model_variance.item() == pytest.approx(0.5)


def test_the_temperature_of_moments_scales_the_logits():
    mean, variance = torch.randn(6, dtype=F64), torch.rand(6, dtype=F64)
    likelihood = Bernoulli().double()
    likelihood.temperature.fill_(2.0)
    scaled, plain = likelihood.from_gaussian(mean, variance), Bernoulli().from_gaussian(mean / 2, variance / 4)
    for name in FIELDS:
        torch.testing.assert_close(getattr(scaled, name), getattr(plain, name), rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_outputs_are_computed_on_in_float32(dtype):
    logits, target = torch.randn(4, 3).to(dtype), torch.tensor([0, 1, 1])
    assert torch.equal(Bernoulli().log_prob(logits[0], target), Bernoulli().log_prob(logits[0].float(), target))
    for found, wanted in [
        (Bernoulli().from_samples(logits), Bernoulli().from_samples(logits.float())),
        (Bernoulli().from_gaussian(logits[0], logits[1] ** 2), Bernoulli().from_gaussian(*moments(logits))),
    ]:
        for name in FIELDS:
            assert getattr(found, name).dtype == torch.float32, name
            torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=0, atol=0)


def moments(logits):
    return logits[0].float(), (logits[1] ** 2).float()


@pytest.mark.parametrize(
    ("output", "target", "sentence"),
    [
        (torch.zeros(3, 2), torch.zeros(3), r"\(3, 2\) do not fit targets of shape \(3,\).*one logit per target"),
        (torch.zeros(3, 1), torch.zeros(2), r"do not fit targets of shape \(2,\)"),
        (torch.zeros(2), torch.tensor([0, 2]), "must lie between 0 and 1"),
        (torch.zeros(2), torch.tensor([-1.0, 1.0]), "must lie between 0 and 1"),
        (torch.zeros(2), torch.tensor([torch.nan, 1.0]), "must lie between 0 and 1"),
    ],
)
def test_what_does_not_fit_gets_a_sentence(output, target, sentence):
    with pytest.raises(ValueError, match=sentence):
        Bernoulli().nll(output, target)


def test_several_labels_at_once_are_as_many_answers():
    """Multi-label: each label has its own probability, decomposition and integral, as if it were predicted alone."""
    labels = as_likelihood("multilabel").double()
    logits, target = 2 * torch.randn(9, 4, 3, dtype=F64), torch.randint(2, (4, 3)).to(F64)
    together, variance = labels.from_samples(logits), torch.rand(4, 3, dtype=F64)
    moments = labels.from_gaussian(logits[0], variance)
    for label in range(3):
        alone = labels.from_samples(logits[..., label])
        single = labels.from_gaussian(logits[0, :, label], variance[:, label])
        for name in FIELDS:
            own = (slice(None), label)
            torch.testing.assert_close(getattr(together, name)[own], getattr(alone, name), rtol=1e-12, atol=1e-15)
            torch.testing.assert_close(getattr(moments, name)[own], getattr(single, name), rtol=1e-12, atol=1e-15)
    p = logits.sigmoid().mean(0)
    torch.testing.assert_close(together.probs[..., 1], p, rtol=1e-12, atol=0)
    expected = torch.distributions.Bernoulli(p).log_prob(target)
    torch.testing.assert_close(together.log_prob(target), expected, rtol=1e-10, atol=0)
    assert torch.equal(together.correct(target), (p > 0.5) == target.bool())
    assert together.score().shape == target.shape
    loss = torch.nn.BCEWithLogitsLoss()(logits[0], target)
    torch.testing.assert_close(labels.nll(logits[0], target), loss, rtol=1e-12, atol=0)
    factor = labels.output_factor(logits[0]).flatten(1)
    torch.testing.assert_close(factor**2, logits[0].sigmoid() * (-logits[0]).sigmoid(), rtol=1e-12, atol=0)
