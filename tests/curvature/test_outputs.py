"""The curvature in the outputs, against differentiating ln p twice."""

import pytest
import torch
from torch.testing import assert_close

from bayesify import Bernoulli, Categorical, Custom, Gaussian
from bayesify.curvature import columns, output_hessian
from tests.curvature.naive import output_hessians
from tests.marks import slow_but

EXACT = {"rtol": 1e-10, "atol": 1e-12}


def _double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def _per_output():
    likelihood = Gaussian("per-output", num_outputs=3).double()
    with torch.no_grad():
        likelihood.log_noise.copy_(torch.tensor([0.3, -0.5, 1.0]))
    return likelihood


CASES = {
    "classes": (Categorical(), _double(5, 4), torch.arange(5) % 4),
    "two classes": (Categorical(), _double(5, 2), torch.arange(5) % 2),
    "tokens": (Categorical(), _double(3, 2, 4), torch.tensor([[0, 1], [2, 3], [1, -100]])),
    "pixels": (Categorical(), _double(2, 3, 2, 2), torch.tensor([[[0, 1], [2, -100]], [[1, 1], [0, 2]]])),
    "classes first": (Categorical(class_dim=1), _double(2, 3, 4), torch.arange(8).view(2, 4) % 3),
    "another ignored label": (Categorical(ignore_index=1), _double(4, 3), torch.tensor([0, 1, 2, 1])),
    "yes or no": (Bernoulli(), _double(4, 1), torch.tensor([0.0, 1.0, 0.0, 1.0])),
    "several answers": (Bernoulli(), _double(4, 3), torch.ones(4, 3)),
    "numbers": (Gaussian(1.0), _double(4, 1), _double(4)),
    "several numbers": (Gaussian(1.0), _double(4, 3), _double(4, 3)),
    "noise per output": (_per_output(), _double(4, 3), _double(4, 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_columns_add_up_to_the_hessian(name):
    likelihood, output, target = CASES[name]
    found = [column.reshape(len(output), -1) for column in columns(likelihood, output, target, curvature="ggn")]
    total = sum(column[:, :, None] * column[:, None, :] for column in found)
    assert_close(total, output_hessians(likelihood, output, target), **EXACT)


def test_c_classes_take_one_column_less():
    likelihood, output, target = CASES["classes"]
    assert len(list(columns(likelihood, output, target, curvature="ggn"))) == output.shape[1] - 1


def test_a_certain_class_has_no_curvature_and_no_nan():
    output = torch.tensor([[800.0, 0.0, 0.0], [0.0, 0.0, 800.0]], dtype=torch.float64)
    for column in columns(Categorical(), output, torch.tensor([0, 1]), curvature="ggn"):
        assert_close(column, torch.zeros_like(output))


@pytest.mark.parametrize("name", ["classes", "tokens", "several answers", "several numbers", "noise per output"])
def test_hessians_by_position(name):
    likelihood, output, target = CASES[name]
    found = output_hessian(likelihood, output, target)
    size = output.shape[-1]
    whole = output_hessians(likelihood, output, target)
    for position in range(found.shape[1]):
        own = slice(position * size, (position + 1) * size)
        assert_close(found[:, position], whole[:, own, own], **EXACT)


def test_unit_noise_is_divided_by_one_variance_later():
    output, target = _double(4, 2), _double(4, 2)
    likelihood = Gaussian(0.5)
    found = output_hessian(likelihood, output, target)[:, 0] / likelihood.single_variance()
    assert_close(found, output_hessians(likelihood, output, target), **EXACT)


def test_the_fisher_information_of_a_noise_head():
    # In the mean 1 / variance; in ln variance 1/2, the expectation of residual^2 / (2 variance).
    output, target = _double(3, 4), _double(3, 2)
    found = output_hessian(Gaussian("head"), output, target)[:, 0]
    means = (-output[:, 2:]).exp()
    assert_close(found, torch.cat([means, torch.full_like(means, 0.5)], 1).diag_embed(), **EXACT)


@pytest.mark.parametrize("name", ["classes", "tokens", "several answers", "several numbers", "noise per output"])
def test_the_fisher_column_is_the_gradient(name):
    likelihood, output, target = CASES[name]
    (found,) = columns(likelihood, output, target, curvature="fisher")
    leaf = output.clone().requires_grad_()
    (expected,) = torch.autograd.grad(likelihood.log_prob(leaf, target).sum(), leaf)
    assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("name", slow_but(["classes"], CASES))
def test_drawn_labels_estimate_the_hessian_without_bias(name):
    likelihood, output, target = CASES[name]
    number = 4000
    generator = torch.Generator().manual_seed(3)
    found = columns(likelihood, output, target, curvature="ggn", samples=number, generator=generator)
    flat = torch.stack([column.reshape(len(output), -1) for column in found]) * number**0.5
    products = flat[..., :, None] * flat[..., None, :]
    error = products.std(0) / number**0.5
    difference = (products.mean(0) - output_hessians(likelihood, output, target)).abs()
    assert bool((difference <= 5 * error + 1e-12).all())


def test_positions_that_do_not_count_have_no_curvature():
    likelihood, output, target = CASES["tokens"]
    for options in ({"curvature": "fisher"}, {"curvature": "ggn"}, {"curvature": "ggn", "samples": 2}):
        for column in columns(likelihood, output, target, **options):
            assert not column[2, 1].any()


def test_too_many_outputs_for_the_exact_ggn():
    with pytest.raises(ValueError, match=r"12,288 backward passes .* Laplace\(mc_labels=1\)"):
        next(columns(Categorical(), torch.zeros(1, 4, 64, 64), torch.zeros(1, 64, 64).long(), curvature="ggn"))


def test_an_unknown_likelihood_has_the_empirical_fisher_alone():
    custom = Custom(lambda output, target: -(target - output[:, 0]).abs())
    output, target = _double(3, 1), _double(3)
    with pytest.raises(ValueError, match="curvature='fisher'"):
        next(columns(custom, output, target, curvature="ggn"))
    (found,) = columns(custom, output, target, curvature="fisher")
    assert_close(found[:, 0], (target - output[:, 0]).sign())
