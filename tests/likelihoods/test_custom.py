"""Any log-probability a user writes, and what all likelihoods share."""

import json
import math

import numpy as np
import pytest
import torch

from bayesify import MAP, Bernoulli, Categorical, Custom, Gaussian, Likelihood, convert
from bayesify.likelihoods import as_likelihood, likelihood_from_dict
from bayesify.likelihoods.prediction import RegressionPrediction

F64 = torch.float64


def laplace(output, target):
    return -(target - output[..., 0]).abs() - math.log(2)


def test_log_prob_is_the_users():
    output, target = torch.randn(5, 1, dtype=F64), torch.randn(5, dtype=F64)
    expected = torch.distributions.Laplace(output[:, 0], 1.0).log_prob(target)
    torch.testing.assert_close(Custom(laplace).log_prob(output, target), expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(Custom(laplace).nll(output, target), -expected.mean(), rtol=1e-13, atol=0)


@pytest.mark.parametrize("shape", [(4, 1), (4, 3), (1, 1), (4,)])
def test_predictions_are_the_moments_of_the_outputs_without_noise(shape):
    outputs = torch.randn(6, *shape, dtype=F64)
    flat = outputs[..., 0] if shape[-1] == 1 and len(shape) > 1 else outputs
    found = Custom(laplace).from_samples(outputs, keep_samples=True)
    torch.testing.assert_close(found.mean, flat.mean(0), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.epistemic, flat.var(0, correction=0), rtol=1e-12, atol=1e-14)
    assert torch.equal(found.aleatoric, torch.zeros_like(found.mean))
    assert torch.equal(found.samples, flat)
    moments = Custom(laplace).from_gaussian(outputs[0], outputs[1] ** 2)
    assert torch.equal(moments.mean, flat[0])
    assert torch.equal(moments.variance, flat[1] ** 2)


def test_a_predictive_of_ones_own_sees_all_draws():
    def median(outputs):
        middle = outputs.median(0).values
        return RegressionPrediction(middle, torch.zeros_like(middle), outputs.var(0))

    outputs = torch.randn(7, 4, dtype=F64)
    stream = Custom(laplace, predictive=median).stream()
    for part in outputs.split(3):
        stream.add(part)
    assert torch.equal(stream.result().mean, outputs.median(0).values)


def test_a_function_is_neither_saved_nor_calibrated():
    with pytest.raises(ValueError, match=r"a function and cannot be saved.*set_likelihood"):
        Custom(laplace).to_dict()
    with pytest.raises(ValueError, match="Custom has nothing to calibrate"):
        Custom(laplace).calibrate([])


# -- all likelihoods --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "likelihood",
    [
        Categorical(class_dim=1, ignore_index=255),
        Bernoulli(),
        Gaussian(),
        Gaussian(0.1),
        Gaussian("head"),
        Gaussian("per-output", num_outputs=3),
    ],
    ids=repr,
)
def test_configurations_come_back_through_json(likelihood):
    again = likelihood_from_dict(json.loads(json.dumps(likelihood.to_dict())))
    assert type(again) is type(likelihood)
    assert again.to_dict() == likelihood.to_dict()
    assert {k: v.shape for k, v in again.state_dict().items()} == {
        k: v.shape for k, v in likelihood.state_dict().items()
    }


def test_names_of_likelihoods():
    assert isinstance(as_likelihood("classification"), Categorical)
    assert isinstance(as_likelihood("binary"), Bernoulli)
    assert isinstance(as_likelihood("regression"), Gaussian)
    assert isinstance(as_likelihood("multilabel"), Bernoulli)
    assert as_likelihood("heteroscedastic").noise_std == "head"
    mine = Gaussian(0.1)
    assert as_likelihood(mine) is mine
    for name in ("cauchy", "custom"):
        with pytest.raises(ValueError, match=f"no likelihood '{name}'. Give one of .'binary', 'classification'"):
            as_likelihood(name)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"kind": "cauchy"}, "names a likelihood 'cauchy', which is unknown here"),
        ({}, "names a likelihood None"),
        ({"kind": "gaussian", "colour": 3}, "'gaussian' has settings that do not fit.*colour"),
        ({"kind": "custom"}, "'custom' has settings that do not fit"),
    ],
)
def test_wrong_configurations_get_a_sentence(values, sentence):
    with pytest.raises(ValueError, match=sentence):
        likelihood_from_dict(values)


def test_an_unfinished_likelihood_is_refused():
    class Half(Likelihood):
        def log_prob(self, output, target):
            return output

    with pytest.raises(TypeError, match="abstract"):
        Half()


# -- scores -----------------------------------------------------------------------------------------------------


def test_the_density_of_draws_is_the_average_of_theirs():
    outputs, target = torch.randn(6, 4, 1, dtype=F64), torch.randn(4, dtype=F64)
    densities = torch.distributions.Normal(outputs[..., 0], 0.5).log_prob(target).exp()
    found = Gaussian(0.5).mixture_log_prob(outputs, target)
    torch.testing.assert_close(found, densities.mean(0).log(), rtol=1e-12, atol=0)
    assert torch.equal(Gaussian(0.5).mixture_log_prob(list(outputs), target), found)


def test_sums_leave_out_what_does_not_count():
    likelihood = Categorical(ignore_index=255)
    target = torch.tensor([[0, 255], [2, 1]], dtype=torch.uint8)
    assert likelihood.marked(target).tolist() == [[0, -100], [2, 1]]
    assert Categorical().marked(torch.tensor([156], dtype=torch.uint8)).tolist() == [156]  # -100 in bytes
    output = torch.randn(2, 2, 3, dtype=F64)
    nll, count = likelihood.total_nll(likelihood.log_prob(output, target), target)
    assert count.item() == 3
    torch.testing.assert_close(nll / count, likelihood.nll(output, target), rtol=1e-12, atol=0)
    prediction = likelihood.from_samples(output[None])
    again, _ = likelihood.total_nll(prediction.log_prob(likelihood.marked(target)), target)
    torch.testing.assert_close(again, nll, rtol=1e-12, atol=0)
    nll, count = Gaussian(1.0).total_nll(torch.tensor([-1.0, -2.0]), torch.zeros(2))
    assert (nll.item(), count.item()) == (3.0, 2.0)


def test_gaussian_outputs_of_a_custom_likelihood_have_its_own_density():
    def poisson(output, target):
        return (target * output - output.exp() - torch.lgamma(target + 1))[:, 0]

    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    mean, variance = torch.tensor([[0.0], [1.0]], dtype=F64), torch.tensor([[0.09], [0.25]], dtype=F64)
    target = torch.tensor([[1.0], [4.0]], dtype=F64)
    outputs = mean + variance.sqrt() * torch.from_numpy(nodes)
    densities = torch.distributions.Poisson(outputs.exp()).log_prob(target).exp()
    density = densities @ torch.from_numpy(weights / weights.sum())
    found = Custom(poisson).gaussian_log_prob(target, mean, variance)
    spread = ((densities**2) @ torch.from_numpy(weights / weights.sum()) - density**2).sqrt()
    assert bool(((found.exp() - density).abs() < 3 * spread / 128**0.5).all())  # of 128 draws
    covariance = Custom(poisson).gaussian_log_prob(target, mean, covariance=variance[..., None])
    torch.testing.assert_close(covariance, found, rtol=1e-9, atol=0)
    normal = Gaussian(0.5).gaussian_log_prob(target, mean, variance)
    expected = torch.distributions.Normal(mean[:, 0], (variance[:, 0] + 0.25).sqrt()).log_prob(target[:, 0])
    torch.testing.assert_close(normal, expected, rtol=1e-12, atol=0)


def test_a_predictive_of_ones_own_sees_draws_of_gaussian_outputs():
    mine = Custom(laplace, predictive=lambda outputs: Categorical().from_samples(outputs))
    found = mine.from_gaussian(torch.zeros(1, 3, dtype=F64), torch.ones(1, 3, dtype=F64))
    exact = Categorical().from_gaussian(torch.zeros(1, 3, dtype=F64), torch.ones(1, 3, dtype=F64))
    torch.testing.assert_close(found.probs, exact.probs, rtol=0, atol=0.05)
    assert found.epistemic.item() == pytest.approx(exact.epistemic.item(), abs=0.05)


def test_a_name_keeps_a_likelihood_that_it_means():
    posterior = convert(torch.nn.Linear(3, 2), MAP(), likelihood="regression")
    learned = posterior.likelihood
    posterior.set_likelihood("regression")
    assert posterior.likelihood is learned
    posterior.set_likelihood("heteroscedastic")
    assert posterior.likelihood.noise_std == "head"
    head = posterior.likelihood
    posterior.set_likelihood("heteroscedastic")
    assert posterior.likelihood is head
