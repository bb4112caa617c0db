"""Numbers with Gaussian noise."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.distributions import Normal

from bayesify import Gaussian

F64 = torch.float64


def learned(values, **settings):
    likelihood = Gaussian(**settings).double()
    with torch.no_grad():
        likelihood.log_noise.copy_(torch.tensor(values, dtype=F64).log())
    return likelihood


# -- log-probability --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5,), (5, 1), (1,), (1, 1), (5, 3), (2, 4, 3)])
def test_log_prob_with_one_noise(shape):
    mean, target = torch.randn(shape, dtype=F64), torch.randn(shape, dtype=F64)
    expected = Normal(mean, 0.3).log_prob(target)
    if shape[-1] == 1 and len(shape) > 1:
        expected = expected[..., 0]
    for likelihood in (Gaussian(0.3), learned(0.3)):
        torch.testing.assert_close(likelihood.log_prob(mean, target), expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(likelihood.nll(mean, target), -expected.mean(), rtol=1e-12, atol=0)


def test_one_output_fits_a_vector_of_targets_and_does_not_broadcast():
    mean, target = torch.randn(4, 1, dtype=F64), torch.randn(4, dtype=F64)
    found = Gaussian(2.0).log_prob(mean, target)
    torch.testing.assert_close(found, Normal(mean[:, 0], 2.0).log_prob(target), rtol=1e-12, atol=0)


def test_log_prob_with_a_noise_for_each_output():
    mean, target = torch.randn(5, 3, dtype=F64), torch.randn(5, 3, dtype=F64)
    stds = [0.1, 1.0, 5.0]
    likelihood = learned(stds, noise_std="per-output", num_outputs=3)
    expected = Normal(mean, torch.tensor(stds, dtype=F64)).log_prob(target)
    torch.testing.assert_close(likelihood.log_prob(mean, target), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("structure", ["tensor", "tuple", "list"])
def test_log_prob_with_a_head(outputs, structure):
    mean, log_variance = torch.randn(5, outputs, dtype=F64), torch.randn(5, outputs, dtype=F64)
    target = torch.randn(5, outputs, dtype=F64)
    given_output = {
        "tensor": torch.cat([mean, log_variance], -1),
        "tuple": (mean, log_variance),
        "list": [mean, log_variance],
    }[structure]
    likelihood = Gaussian("head")
    expected = Normal(mean, (log_variance / 2).exp()).log_prob(target)
    expected = expected[:, 0] if outputs == 1 else expected
    found = likelihood.log_prob(likelihood.read(given_output, None), target)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_two_heads_without_an_output_dimension():
    mean, log_variance, target = torch.randn(3, 4, dtype=F64)
    likelihood = Gaussian("head")
    found = likelihood.log_prob(likelihood.read((mean, log_variance), None), target)
    torch.testing.assert_close(found, Normal(mean, (log_variance / 2).exp()).log_prob(target), rtol=1e-12, atol=0)


@pytest.mark.parametrize("log_variance", [-150.0, -100.0, 100.0, 300.0])
def test_extreme_heads_stay_finite_in_float32(log_variance):
    output = torch.tensor([[1.0, log_variance]], requires_grad=True)
    found = Gaussian("head").log_prob(output, torch.tensor([1.0]))
    found.sum().backward()
    assert found.item() == pytest.approx(-0.5 * (log_variance + math.log(2 * math.pi)), rel=1e-6)
    assert bool(output.grad.isfinite().all())


def test_the_noise_is_learned_to_the_closed_form():
    mean, target = torch.randn(200, 2, dtype=F64), torch.randn(200, 2, dtype=F64)
    expected = ((target - mean) ** 2).mean(0).sqrt()
    for likelihood, wanted in [
        (Gaussian().double(), (expected**2).mean().sqrt()),
        (Gaussian("per-output", num_outputs=2).double(), expected),
    ]:
        optimizer = torch.optim.LBFGS(likelihood.parameters(), tolerance_grad=1e-12, line_search_fn="strong_wolfe")
        optimizer.step(lambda: closure(optimizer, likelihood, mean, target))  # noqa: B023
        torch.testing.assert_close(likelihood.log_noise.exp(), wanted, rtol=1e-5, atol=0)


def closure(optimizer, likelihood, mean, target):
    optimizer.zero_grad()
    loss = likelihood.nll(mean, target)
    loss.backward()
    return loss


# -- predictions ------------------------------------------------------------------------------------------------


@given(
    groups=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    shape=st.sampled_from([(1,), (1, 1), (3,), (3, 1), (3, 2), (1, 2), (2, 1, 2), (2, 4, 1)]),
    head=st.booleans(),
    offset=st.sampled_from([0.0, 1e6]),
    seed=st.integers(0, 1000),
)
def test_draws_in_any_groups_are_what_all_of_them_are_together(groups, shape, head, offset, seed):
    generator = torch.Generator().manual_seed(seed)
    means = offset + torch.randn(sum(groups), *shape, dtype=F64, generator=generator)
    logs = torch.randn(sum(groups), *shape, dtype=F64, generator=generator)
    if head and len(shape) == 1:
        shape, means, logs = (*shape, 1), means[..., None], logs[..., None]
    likelihood = Gaussian("head") if head else Gaussian(0.7)
    outputs = torch.cat([means, logs], -1) if head else means
    stream = likelihood.stream(keep_samples=True)
    for part in outputs.split(groups):
        stream.add(part)
    prediction = stream.result()
    if shape[-1] == 1 and len(shape) > 1:
        means, logs = means[..., 0], logs[..., 0]
    noise = logs.exp() if head else torch.full_like(means, 0.49)
    assert torch.equal(prediction.samples, means)
    torch.testing.assert_close(prediction.mean, means.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(prediction.epistemic, means.var(0, correction=0), rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(prediction.aleatoric, noise.mean(0), rtol=1e-12, atol=0)
    assert torch.equal(prediction.variance, prediction.aleatoric + prediction.epistemic)
    assert torch.equal(prediction.total, prediction.variance)


@pytest.mark.parametrize("shape", [(4,), (4, 1), (1, 1), (4, 3), (2, 1, 3)])
def test_moments_are_exact_for_plain_noise(shape):
    mean, variance = torch.randn(shape, dtype=F64), torch.rand(shape, dtype=F64)
    prediction = Gaussian(0.5).from_gaussian(mean, variance)
    if shape[-1] == 1 and len(shape) > 1:
        mean, variance = mean[..., 0], variance[..., 0]
    torch.testing.assert_close(prediction.mean, mean, rtol=0, atol=0)
    torch.testing.assert_close(prediction.epistemic, variance, rtol=0, atol=0)
    torch.testing.assert_close(prediction.variance, variance + 0.25, rtol=1e-14, atol=0)


@pytest.mark.parametrize("shape", [(3, 2), (3, 1), (3, 1, 1), (1, 1)])
def test_moments_of_a_head_are_those_of_many_draws(shape):
    mean, variance = (
        torch.randn(*shape[:-1], 2 * shape[-1], dtype=F64),
        torch.rand(*shape[:-1], 2 * shape[-1], dtype=F64),
    )
    prediction = Gaussian("head").from_gaussian(mean, variance)
    draws = mean + variance.sqrt() * torch.randn(100_000, *mean.shape, dtype=F64)
    truth = Gaussian("head").from_samples(draws)
    assert prediction.mean.shape == truth.mean.shape
    # Relative standard errors: .5 % for a variance, at most .4 % for the mean of a log-normal with variance 1.
    torch.testing.assert_close(prediction.mean, truth.mean, rtol=0, atol=0.02)
    torch.testing.assert_close(prediction.epistemic, truth.epistemic, rtol=0.025, atol=0)
    torch.testing.assert_close(prediction.aleatoric, truth.aleatoric, rtol=0.02, atol=0)


def test_the_scale_multiplies_both_variances_of_predictions_and_not_the_loss():
    likelihood = Gaussian(0.5).double()
    outputs, target = torch.randn(6, 4, dtype=F64), torch.randn(4, dtype=F64)
    plain, loss = likelihood.from_samples(outputs), likelihood.nll(outputs[0], target)
    moments = likelihood.from_gaussian(outputs[0], outputs[1] ** 2)
    likelihood.variance_scale.fill_(3.0)
    for scaled, before in [
        (likelihood.from_samples(outputs), plain),
        (likelihood.from_gaussian(outputs[0], outputs[1] ** 2), moments),
    ]:
        assert torch.equal(scaled.mean, before.mean)
        torch.testing.assert_close(scaled.aleatoric, 3 * before.aleatoric, rtol=1e-14, atol=0)
        torch.testing.assert_close(scaled.epistemic, 3 * before.epistemic, rtol=1e-14, atol=0)
    assert torch.equal(likelihood.nll(outputs[0], target), loss)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_outputs_are_computed_on_in_float32(dtype):
    outputs, target = torch.randn(4, 3).to(dtype), torch.randn(3)
    likelihood = Gaussian(0.5)
    assert torch.equal(likelihood.log_prob(outputs[0], target), likelihood.log_prob(outputs[0].float(), target))
    for found, wanted in [
        (likelihood.from_samples(outputs), likelihood.from_samples(outputs.float())),
        (
            likelihood.from_gaussian(outputs[0], outputs[1] ** 2),
            likelihood.from_gaussian(outputs[0].float(), (outputs[1] ** 2).float()),
        ),
    ]:
        for name in ("mean", "aleatoric", "epistemic"):
            assert getattr(found, name).dtype == torch.float32
            assert torch.equal(getattr(found, name), getattr(wanted, name))


def test_a_half_precision_likelihood_keeps_small_noise():
    likelihood = learned(1e-4).half()  # its variance, 1e-8, is zero in half precision
    found = likelihood.log_prob(torch.zeros(1).half(), torch.zeros(1))
    assert found.item() == pytest.approx(-math.log(1e-4) - 0.5 * math.log(2 * math.pi), rel=1e-3)


def test_all_fields_have_the_type_of_the_outputs():
    for likelihood in (Gaussian(), Gaussian(0.5), Gaussian("per-output", num_outputs=2)):  # held in float32
        prediction = likelihood.from_samples(torch.randn(3, 4, 2, dtype=F64))
        assert {prediction.mean.dtype, prediction.aleatoric.dtype, prediction.epistemic.dtype} == {F64}


# -- checks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0, -1.0, math.nan, math.inf, "perhaps"])
def test_impossible_noise_gets_a_sentence(noise):
    with pytest.raises(ValueError, match="noise_std must be None, a positive number"):
        Gaussian(noise)


def test_per_output_needs_a_number():
    with pytest.raises(ValueError, match="needs the number of outputs"):
        Gaussian("per-output")


@pytest.mark.parametrize(
    ("likelihood", "output", "target", "sentence"),
    [
        (
            Gaussian(),
            (3, 2),
            (3,),
            r"\(3, 2\) .means \(3, 2\).* do not fit targets of shape \(3,\).*one mean per target",
        ),
        (Gaussian("head"), (3, 2), (3, 2), r"\(3, 2\) .means \(3,\)"),
        (Gaussian("head"), (3, 3), (3,), "its size 3 is odd"),
        (
            Gaussian("per-output", num_outputs=4),
            (3, 2),
            (3, 2),
            r"noise for 4 outputs, but the network has 2: .*num_outputs=2",
        ),
    ],
)
def test_what_does_not_fit_gets_a_sentence(likelihood, output, target, sentence):
    with pytest.raises(ValueError, match=sentence):
        likelihood.nll(torch.zeros(output), torch.zeros(target))


def test_heads_of_two_shapes_get_a_sentence():
    with pytest.raises(ValueError, match=r"one shape, but they have \(3, 2\) and \(3, 1\)"):
        Gaussian("head").read((torch.zeros(3, 2), torch.zeros(3, 1)), None)


def test_a_named_output_is_read_by_name():
    x = torch.zeros(3, 2)
    assert Gaussian("head").read({"both": x, "other": None}, "both") is x
