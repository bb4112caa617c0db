"""The mutual information of Gaussian logits, against quadrature and many points in float64, confident or not."""

import math

import pytest
import torch
from scipy.integrate import quad

from bayesify import Bernoulli, Categorical
from bayesify._core.maths import entropy, exact_top

F64 = torch.float64


def exact_entropy(logits):
    """Return the entropy of softmax in float64, without a difference of large numbers."""
    logits = logits - logits.amax(-1, keepdim=True)
    top = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).bool()
    each = logits.exp()
    others = each.masked_fill(top, 0).sum(-1)
    return torch.log1p(others) - (each * logits).sum(-1) / (1 + others)


def drawn_information(mean, root, number):
    """Return the mutual information over pairs of opposite draws, naively, (N,)."""
    generator = torch.Generator().manual_seed(0)
    probs, entropies = torch.zeros_like(mean), torch.zeros_like(mean[:, 0])
    some = max(1, 2**19 // mean.numel())
    steps = math.ceil(number / (2 * some))
    for _ in range(steps):
        z = torch.randn(some, *mean.shape, generator=generator, dtype=F64)
        moved = root * z if root.ndim == 2 else torch.einsum("ncd,snd->snc", root, z)
        for sign in (1, -1):
            logits = mean + sign * moved
            probs += logits.softmax(-1).mean(0) / (2 * steps)
            entropies += exact_entropy(logits).mean(0) / (2 * steps)
    return exact_entropy(exact_top(probs.log())) - entropies


def gaussians(classes, gap, std, rows=6):
    """Return means whose top class is `gap` above all others together (None: unsure), and variances."""
    generator = torch.Generator().manual_seed(classes)
    mean = torch.randn(rows, classes, generator=generator, dtype=F64)
    if gap is not None:
        mean[:, 0] = gap + mean[:, 1:].logsumexp(-1)
    return mean, std**2 * (0.5 + torch.rand(rows, classes, generator=generator, dtype=F64))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("gap", [0.0, 3.0, 10.0, 18.0])
@pytest.mark.parametrize("std", [0.01, 0.2, 0.3, 1.0, 2.0])
def test_two_classes_and_yes_or_no_are_exact(std, gap, dtype):
    """An integral over one number; below 1e-7 nats it was rounding error in float32, from 0 to 1 times the truth."""

    def averaged(function):
        density = 1 / math.sqrt(2 * math.pi)
        return quad(lambda z: density * math.exp(-z * z / 2) * function(gap + std * z), -9, 9, epsabs=0, limit=200)[0]

    def yes_entropy(logit):
        return exact_entropy(torch.tensor([0.0, logit], dtype=F64)).item()

    no = averaged(lambda logit: 1 / (1 + math.exp(logit)))
    truth = -no * math.log(no) - (1 - no) * math.log1p(-no) - averaged(yes_entropy)
    logit, variance = (torch.tensor([[x]], dtype=dtype) for x in (gap, std**2))
    found = [Bernoulli().to(dtype).from_gaussian(logit, variance).epistemic.item()]
    pair, both = torch.tensor([[0.0, gap]], dtype=dtype), torch.full((1, 2), std**2 / 2, dtype=dtype)
    found.append(Categorical().to(dtype).from_gaussian(pair, both).epistemic.item())
    covariance = std**2 * torch.tensor([[[2.0, 1.0], [1.0, 1.0]]], dtype=dtype)
    found.append(Categorical().to(dtype).from_gaussian(pair, covariance=covariance).epistemic.item())
    assert found == pytest.approx([truth] * 3, rel=0.04, abs=0)  # first order below a variance of .05


@pytest.mark.slow
@pytest.mark.parametrize("gap", [None, 2.0, 8.0, 16.0])
@pytest.mark.parametrize("std", [0.05, 0.3, 1.0])
@pytest.mark.parametrize(("classes", "number"), [(10, 40_000), (1000, 3_000)])
def test_ten_and_a_thousand_classes(classes, number, std, gap):
    mean, variance = gaussians(classes, gap, std)
    truth = drawn_information(mean, variance.sqrt(), number)
    for dtype in (torch.float32, F64):
        ratio = Categorical().to(dtype).from_gaussian(mean.to(dtype), variance.to(dtype)).epistemic / truth
        assert 0.92 < ratio.median() < 1.08
        assert ratio.min() > 0.8
        assert ratio.max() < 1.25


@pytest.mark.slow
@pytest.mark.parametrize("gap", [None, 8.0, 16.0])
@pytest.mark.parametrize("std", [0.05, 1.0])
def test_covariances(std, gap):
    mean, variance = gaussians(10, gap, std)
    root = torch.randn(6, 10, 4, generator=torch.Generator().manual_seed(1), dtype=F64) * std / 2
    covariance = root @ root.mT + torch.diag_embed(variance / 10)
    truth = drawn_information(mean, torch.linalg.cholesky(covariance), 40_000)
    for dtype in (torch.float32, F64):
        found = Categorical().to(dtype).from_gaussian(mean.to(dtype), covariance=covariance.to(dtype)).epistemic
        ratio = found / truth
        assert 0.92 < ratio.median() < 1.08
        assert ratio.min() > 0.8
        assert ratio.max() < 1.25


def test_first_order_is_half_the_trace_with_the_fisher_information():
    mean = torch.tensor([[0.0, 1.0, 25.0], [0.0, 1.0, 2.0], [3.0, 3.0, 3.0]], dtype=F64)
    root = 1e-4 * torch.randn(3, 3, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    covariance = root @ root.mT
    probs = mean.softmax(-1)
    fisher = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None]
    expected = (fisher * covariance).sum((1, 2)) / 2
    found = Categorical().from_gaussian(mean.float(), covariance=covariance.float()).epistemic
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=0)


def test_draws_in_float32_keep_what_confident_ones_disagree_about():
    generator = torch.Generator().manual_seed(0)
    outputs = torch.tensor([19.0, 0.0, 1.0]) + torch.randn(64, 5, 3, generator=generator)
    found = Categorical().from_samples(outputs)
    log_probs = outputs.double().log_softmax(-1)
    mixed = exact_top(log_probs.exp().mean(0).log())
    truth = exact_entropy(mixed) - exact_entropy(outputs.double()).mean(0)
    assert truth.max() < 1e-6
    torch.testing.assert_close(found.epistemic.double(), truth, rtol=1e-3, atol=0)
    halves = [Categorical().from_samples(part) for part in outputs.split(32)]
    both = Categorical().mixture(halves, [0.5, 0.5])
    torch.testing.assert_close(both.epistemic.double(), truth, rtol=1e-3, atol=0)


def test_the_largest_is_what_the_others_leave():
    logits = torch.randn(50, 7, generator=torch.Generator().manual_seed(0), dtype=F64)
    torch.testing.assert_close(exact_top(logits.log_softmax(-1)), logits.log_softmax(-1), rtol=1e-12, atol=0)
    sure = torch.tensor([[30.0, 0.0]], dtype=F64)
    torch.testing.assert_close(
        entropy(exact_top(sure.float().log_softmax(-1))).double(), exact_entropy(sure), rtol=1e-6, atol=0
    )
