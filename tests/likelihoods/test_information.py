"""What Gaussian outputs mean, against 100,000 draws of the same Gaussian."""

import pytest
import torch

from bayesify import Bernoulli, Categorical, Gaussian
from bayesify.likelihoods.softmax_integrals import average_softmax, covariance_root, number_of_points

F64 = torch.float64
DRAWS = 100_000
STDS = (0.1, 0.5, 1.0, 2.0, 5.0)
ROWS = 8  # of each kind of mean and size of the deviations


def gaussians(classes, kind):
    """Return means, unsure and confident, and variances or covariances of all sizes."""
    generator = torch.Generator().manual_seed(classes)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    means, spreads = [], []
    for std in STDS:
        unsure, mixed, confident = torch.zeros(ROWS, classes), 2 * randn(ROWS, classes), torch.zeros(ROWS, classes)
        unsure[:, 0] = torch.linspace(0, 0.9, ROWS)
        confident[:, 0] = torch.linspace(1, 12, ROWS)
        mean = torch.cat([unsure, mixed, confident])
        means.append(mean)
        if kind == "independent":
            spreads.append(std**2 * (0.5 + torch.rand(len(mean), classes, generator=generator)))
            continue
        root = randn(len(mean), classes, max(2, classes // 2))
        spread = root @ root.mT / root.shape[-1] + 0.01 * torch.eye(classes)
        # What all logits have in common is of no consequence, however large it is.
        spreads.append(std**2 * (spread if kind == "covariance" else spread / 2 + 10))
    return torch.cat(means), torch.cat(spreads)


def drawn(likelihood, mean, root):
    """Return the prediction of plain draws."""
    generator = torch.Generator().manual_seed(0)
    stream = likelihood.stream()
    some = max(1, 2**21 // mean.numel())
    for start in range(0, DRAWS, some):
        z = torch.randn(min(some, DRAWS - start), *mean.shape, generator=generator)
        stream.add(mean + (root * z if root.ndim == 2 else torch.einsum("bcd,sbd->sbc", root, z)))
    return stream.result()


def ranks(x):
    return x.argsort().argsort().float()


def agree(found, truth):
    """Assert the promised agreement."""
    seen = truth.epistemic > 0.01
    assert seen.sum() > len(seen) / 3
    ratio = (found.epistemic / truth.epistemic)[seen]
    assert ratio.min() > 0.8
    assert ratio.max() < 1.25
    torch.testing.assert_close(found.total[seen], truth.total[seen], rtol=0.15, atol=0)
    for name in ("epistemic", "total", "aleatoric", "variation_ratio"):
        one, other = getattr(found, name), getattr(truth, name)
        assert torch.corrcoef(torch.stack([ranks(one[seen]), ranks(other[seen])]))[0, 1] > 0.95, name
    torch.testing.assert_close(found.variation_ratio, truth.variation_ratio, rtol=0, atol=0.06)
    torch.testing.assert_close(found.model_variance, truth.model_variance, rtol=0.3, atol=0.02)
    torch.testing.assert_close(found.total, found.aleatoric + found.epistemic)
    assert bool((found.epistemic >= 0).all() and (found.aleatoric >= 0).all())


@pytest.mark.parametrize("kind", ["independent", "covariance", "common"])
@pytest.mark.parametrize("classes", [2, 3, 10, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_classes_are_as_uncertain_as_draws_say(classes, kind):
    """The epistemic part of equal means was 0, and that of a confident one too large; the variation ratio was 0."""
    mean, spread = gaussians(classes, kind)
    few = {10: 2, 100: 5}.get(classes, 1)
    mean, spread = mean[::few], spread[::few]
    if kind == "independent":
        found, root = Categorical().from_gaussian(mean, spread), spread.sqrt()
    else:
        found, root = Categorical().from_gaussian(mean, covariance=spread), torch.linalg.cholesky(spread)
    agree(found, drawn(Categorical(), mean, root))


@pytest.mark.slow
def test_yes_or_no_is_as_uncertain_as_draws_say():
    mean = torch.linspace(-8, 7, 25).repeat(5)[:, None]
    variance = torch.tensor(STDS).repeat_interleave(25)[:, None] ** 2
    truth = drawn(Bernoulli(), mean, variance.sqrt())
    agree(Bernoulli().from_gaussian(mean, variance), truth)
    agree(Bernoulli().from_gaussian(mean, covariance=variance[..., None]), truth)


@pytest.mark.parametrize("likelihood", [Gaussian(0.5), Gaussian(), Gaussian("per-output", num_outputs=3)], ids=str)
def test_numbers_have_the_sum_of_both_variances(likelihood):
    with torch.no_grad():
        for parameter in likelihood.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    mean, covariance = torch.randn(4, 3, dtype=F64), torch.randn(4, 3, 3, dtype=F64)
    covariance = covariance @ covariance.mT
    found = likelihood.double().from_gaussian(mean, covariance=covariance)
    noise = {None: 1.0, 0.5: 0.25}.get(likelihood.noise_std, torch.tensor([-2.0, 0.0, 2.0], dtype=F64).exp())
    noise = torch.exp(torch.tensor(-2.0, dtype=F64)) if likelihood.noise_std is None else noise
    variance = covariance.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(found.mean, mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.epistemic, variance, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.variance, variance + noise, rtol=1e-12, atol=0)
    assert torch.equal(likelihood.from_gaussian(mean, variance).variance, found.variance)


def test_little_variance_is_not_lost_to_rounding():
    """In float32 the difference of two entropies is no better than 1e-7; first order is."""
    mean = torch.tensor([[0.0, 1.0, 12.0], [0.0, 1.0, 2.0]])
    found = Categorical().from_gaussian(mean, torch.full((2, 3), 1e-6))
    p = mean.double().softmax(-1)
    expected = (p * (1 - p)).sum(-1) * 1e-6 / 2
    torch.testing.assert_close(found.epistemic.double(), expected, rtol=1e-3, atol=0)


def test_one_of_variance_and_covariance():
    mean = torch.zeros(1, 3)
    for wrong in ({}, {"variance": mean, "covariance": torch.eye(3)[None]}):
        with pytest.raises(ValueError, match="variance or their covariance"):
            Categorical().from_gaussian(mean, **wrong)


def test_the_average_does_not_depend_on_the_batch_nor_on_a_seed():
    mean, std = torch.randn(300, 10), torch.rand(300, 10)
    whole = average_softmax(mean, std)
    torch.manual_seed(5)
    some = average_softmax(mean[17:19], std[17:19])
    torch.testing.assert_close(whole.log_probs[17:19], some.log_probs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(whole.entropy[17:19], some.entropy, rtol=1e-5, atol=1e-6)


def test_dense_outputs_take_fewer_points_and_little_memory():
    assert number_of_points(21, positions=64 * 64) == 16
    mean = torch.randn(2, 21, 64, 64)
    found = Categorical().from_gaussian(mean, torch.ones_like(mean))
    truth = Categorical().from_gaussian(mean[:, :, :2, :2], torch.ones(2, 21, 2, 2))
    assert found.probs.shape == (2, 64, 64, 21)
    assert abs(found.epistemic[:, :2, :2].mean() / truth.epistemic.mean() - 1) < 0.2


def test_logits_beyond_float32_keep_their_order():
    mean = torch.tensor([[0.0, 150.0, -200.0, -300.0]])
    found = Categorical().from_gaussian(mean, torch.full_like(mean, 0.1))
    assert found.log_probs.isfinite().all()
    assert found.log_probs[0].argsort().tolist() == [3, 2, 0, 1]
    huge = Categorical().from_gaussian(mean, torch.full_like(mean, 1e8))
    assert huge.log_probs.isfinite().all()
    assert huge.epistemic.item() > 1


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_the_root_of_a_covariance_that_may_be_singular(rank):
    half = torch.randn(5, 6, rank, dtype=F64)
    covariance = half @ half.mT
    root = covariance_root(covariance)
    torch.testing.assert_close(root @ root.mT, covariance, rtol=1e-9, atol=1e-9)
    if rank == 6:
        torch.testing.assert_close(root, torch.linalg.cholesky(covariance), rtol=1e-6, atol=1e-8)
