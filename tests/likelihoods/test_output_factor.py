"""The square root of the Hessian in the outputs: by differentiating twice, and by each likelihood's own formula."""

import pytest
import torch
from torch.testing import assert_close

from bayesify import Bernoulli, Categorical, Custom, Gaussian, Likelihood, Poisson
from bayesify.curvature import columns, output_hessian
from tests.curvature.naive import output_hessians

EXACT = {"rtol": 1e-10, "atol": 1e-12}


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def per_output():
    likelihood = Gaussian("per-output", num_outputs=3).double()
    with torch.no_grad():
        likelihood.log_noise.copy_(torch.tensor([0.3, -0.5, 1.0]))
    return likelihood


CASES = {
    "classes": (Categorical(), randn(5, 4), torch.arange(5) % 4),
    "tokens": (Categorical(), randn(3, 2, 4), torch.tensor([[0, 1], [2, 3], [1, -100]])),
    "pixels": (Categorical(), randn(2, 3, 2, 2), torch.tensor([[[0, 1], [2, -100]], [[1, 1], [0, 2]]])),
    "another ignored label": (Categorical(ignore_index=1), randn(4, 3), torch.tensor([0, 1, 2, 1])),
    "yes or no": (Bernoulli(), randn(4, 1), torch.tensor([0.0, 1.0, 0.0, 1.0])),
    "soft answers": (Bernoulli(), randn(4, 3), torch.rand(4, 3, dtype=torch.float64)),
    "one number": (Gaussian(0.5), randn(4), randn(4)),
    "numbers": (Gaussian(0.5), randn(4, 3), randn(4, 3)),
    "learned noise": (Gaussian().double(), randn(4, 2, 3), randn(4, 2, 3)),
    "counts": (Poisson(), randn(4, 3), torch.arange(12.0).view(4, 3)),
    "noise per output": (per_output(), randn(4, 3), randn(4, 3)),
}


def whole(likelihood, output, target):
    """Put the groups of a likelihood's own factor together, (B, N, N), in the outputs' order."""
    factor = likelihood.output_factor(output, target)
    groups, size = factor.shape[1:3]
    found = torch.zeros(len(output), groups, size, groups, size, dtype=torch.float64)
    for group in range(groups):
        found[:, group, :, group] = factor[:, group] @ factor[:, group].mT
    order = torch.arange(output[0].numel()).view(output.shape[1:])
    dim = likelihood.softmax_dim(output.ndim)
    order = order.flatten() if dim is None else order.movedim(dim if dim < 0 else dim - 1, -1).flatten()
    back = order.argsort()
    return found.reshape(len(output), len(order), len(order))[:, back][:, :, back]


@pytest.mark.parametrize("name", CASES)
def test_the_default_is_each_likelihoods_own(name):
    likelihood, output, target = CASES[name]
    factor = Likelihood.output_factor(likelihood, output, target)
    expected = output_hessians(likelihood, output, target)
    assert_close((factor @ factor.mT)[:, 0], expected, **EXACT)
    assert_close(whole(likelihood, output, target), expected, **EXACT)


def test_without_targets_every_position_counts():
    output = randn(3, 2, 4)
    none = Categorical().output_factor(output)
    assert torch.equal(none, Categorical().output_factor(output, torch.zeros(3, 2).long()))
    with pytest.raises(ValueError, match="Custom likelihood depends on the targets: give them"):
        Custom(lambda output, target: -((output[:, 0] - target) ** 2)).output_factor(output)


def test_negative_curvature_is_none():
    """A Gaussian of which the output is mean and log variance: the Hessian at a far target is indefinite."""

    def log_prob(output, target):
        mean, log_variance = output.unbind(-1)
        return -0.5 * (log_variance + (target - mean) ** 2 * (-log_variance).exp())

    output, target = randn(6, 2), 4 * randn(6)
    hessians = output_hessians(Custom(log_prob), output, target)
    values, vectors = torch.linalg.eigh(hessians)
    assert bool((values < -1e-3).any())
    expected = vectors @ values.clamp_min(0).diag_embed() @ vectors.mT
    factor = Custom(log_prob).output_factor(output, target)
    assert_close((factor @ factor.mT)[:, 0], expected, **EXACT)


def cosh(output, target):
    """Couples the outputs of a position, and no others."""
    return -((output * torch.arange(1.0, 4.0, dtype=output.dtype)).sum(-1) - target).cosh()


def test_random_columns_are_right_on_average():
    output, target, number = randn(4, 3), randn(4), 4000
    generator = torch.Generator().manual_seed(3)
    factor = Custom(cosh).output_factor(output, target, num_draws=number, generator=generator)[:, 0]
    products = factor[:, :, None] * factor[:, None] * number
    difference = (products.mean(-1) - output_hessians(Custom(cosh), output, target)).abs()
    assert bool((difference <= 5 * products.std(-1) / number**0.5 + 1e-12).all())


def test_positions_of_a_custom_likelihood():
    output, target = randn(4, 2, 3), randn(4, 2)
    found = output_hessian(Custom(cosh), output, target)
    expected = output_hessians(Custom(cosh), output, target)
    for position in range(2):
        own = slice(3 * position, 3 * position + 3)
        assert_close(found[:, position], expected[:, own, own], **EXACT)
    total = sum(
        column.flatten(1)[:, :, None] * column.flatten(1)[:, None]
        for column in columns(Custom(cosh), output, target, curvature="ggn")
    )
    assert_close(total, expected, **EXACT)
    tied = Custom(lambda output, target: -(output.sum((1, 2)) - target).square())
    with pytest.raises(ValueError, match="ties positions together"):
        output_hessian(tied, output, target[:, 0])


def test_what_has_no_curvature_says_so():
    output, target = randn(3, 1), randn(3)
    for linear in (lambda o, t: -(o[:, 0] - t).abs(), lambda o, t: o[:, 0] * t):
        with pytest.raises(ValueError, match=r"no second derivative .* Laplace\(curvature='fisher'\)"):
            Custom(linear).output_factor(output, target)
    with pytest.raises(ValueError, match="not finite, so there is no curvature"):
        Custom(lambda o, t: -((o[:, 0] - t) ** 4)).output_factor(output * torch.nan, target)
    with pytest.raises(ValueError, match="512 outputs of an example at most, and here are 1,000"):
        Custom(lambda o, t: -((o - t) ** 2)).output_factor(randn(2, 10, 100), randn(2, 10, 100))
    huber = Custom(lambda o, t: -torch.nn.functional.huber_loss(o[:, 0], t, reduction="none"))
    far = huber.output_factor(torch.zeros(2, 1, dtype=torch.float64), torch.tensor([9.0, -9.0], dtype=torch.float64))
    assert not far.any()  # all examples of a small batch may be where it is linear


def test_half_precision_is_differentiated_in_float32():
    poisson = Custom(lambda output, target: (target * output - output.exp())[:, 0])
    factor = poisson.output_factor(torch.ones(2, 1, dtype=torch.bfloat16), torch.ones(2, 1))
    assert_close(factor.square().flatten(), torch.ones(2).exp())
