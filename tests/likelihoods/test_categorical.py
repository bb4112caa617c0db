"""Classes: log-probabilities, predictions from draws and from moments, checks."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.nn import functional

from bayesify import Categorical

F64 = torch.float64
FIELDS = ("log_probs", "aleatoric", "epistemic", "variation_ratio", "model_variance", "logits_mean", "logits_variance")


def naive(logits):
    """Every field, from all draws (S, ..., C) at once, as its definition says."""
    probs = logits.softmax(-1)
    mean = probs.mean(0)
    total = torch.distributions.Categorical(mean).entropy()
    aleatoric = torch.distributions.Categorical(logits=logits).entropy().mean(0)
    draws, flat = len(logits), logits.argmax(-1).flatten(1)
    most = [max(flat[:, i].tolist().count(c) for c in flat[:, i].tolist()) for i in range(flat.shape[1])]
    centred = logits - logits.mean(-1, keepdim=True)
    return {
        "log_probs": mean.log(),
        "aleatoric": aleatoric,
        "epistemic": total - aleatoric,
        "variation_ratio": 1 - torch.tensor(most, dtype=F64).reshape(total.shape) / draws,
        "model_variance": probs.var(0, correction=0).sum(-1),
        "logits_mean": centred.mean(0),
        "logits_variance": centred.var(0, correction=0),
    }


def close(prediction, expected, tolerance=1e-12):
    for name in FIELDS:
        torch.testing.assert_close(getattr(prediction, name), expected[name], rtol=tolerance, atol=tolerance, msg=name)


# -- log-probability --------------------------------------------------------------------------------------------


def test_log_prob_is_that_of_torch():
    logits, target = torch.randn(6, 4, dtype=F64), torch.tensor([0, 3, 2, 1, 1, 0])
    expected = torch.distributions.Categorical(logits=logits).log_prob(target)
    torch.testing.assert_close(Categorical().log_prob(logits, target), expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("shape", ["vector", "image", "tokens", "volume", "moved"])
def test_dense_outputs_and_ignored_labels_are_those_of_cross_entropy(shape):
    sizes = {"vector": (), "image": (3, 2), "tokens": (5,), "volume": (2, 3, 2), "moved": (5,)}[shape]
    logits = torch.randn(4, 7, *sizes, dtype=F64)  # torch's order
    target = torch.randint(7, (4, *sizes))
    target.view(-1)[1::3] = -100
    ours = logits.movedim(1, -1) if shape == "tokens" else logits
    likelihood = Categorical(class_dim=1) if shape == "moved" else Categorical()
    per_position = -functional.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(likelihood.log_prob(ours, target), per_position, rtol=1e-13, atol=0)
    mean = functional.cross_entropy(logits, target)
    torch.testing.assert_close(likelihood.nll(ours, target), mean, rtol=1e-13, atol=0)
    weight = likelihood.weight(target)
    torch.testing.assert_close(weight, (target != -100).float())
    probs = likelihood.from_samples(ours[None]).probs
    torch.testing.assert_close(probs, logits.softmax(1).movedim(1, -1), rtol=1e-12, atol=0)
    assert torch.equal(likelihood.labels(target), target)


def test_another_ignored_label_in_bytes():
    logits, target = torch.randn(3, 5, dtype=F64), torch.tensor([1, 255, 4], dtype=torch.uint8)
    expected = functional.cross_entropy(logits, target.long(), ignore_index=255)
    torch.testing.assert_close(Categorical(ignore_index=255).nll(logits, target), expected, rtol=1e-13, atol=0)


def test_byte_labels_do_not_wrap_into_the_ignored_one():
    logits, target = torch.randn(2, 200, dtype=F64), torch.tensor([156, 3], dtype=torch.uint8)  # 156 = -100 mod 256
    expected = functional.cross_entropy(logits, target.long())
    torch.testing.assert_close(Categorical().nll(logits, target), expected, rtol=1e-13, atol=0)


def test_nothing_but_ignored_labels_is_a_loss_of_zero_with_gradients():
    logits = torch.randn(2, 3, requires_grad=True)
    with pytest.warns(UserWarning, match="All 2 targets of a batch are ignore_index"):
        loss = Categorical().nll(logits, torch.tensor([-100, -100]))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logits.grad, torch.zeros(2, 3))


# -- predictions from draws -------------------------------------------------------------------------------------


@given(
    groups=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    rows=st.integers(1, 3),
    classes=st.integers(2, 4),
    scale=st.sampled_from([0.01, 1.0, 30.0]),
    seed=st.integers(0, 1000),
)
@pytest.mark.slow
def test_draws_in_any_groups_are_what_all_of_them_are_together(groups, rows, classes, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(sum(groups), rows, classes, dtype=F64, generator=generator)
    stream = Categorical().stream(keep_samples=True)
    for part in logits.split(groups):
        stream.add(part)
    prediction = stream.result()
    close(prediction, naive(logits), 1e-10)
    torch.testing.assert_close(prediction.samples, logits.softmax(-1), rtol=1e-12, atol=1e-300)
    torch.testing.assert_close(prediction.total, prediction.aleatoric + prediction.epistemic, rtol=1e-10, atol=1e-12)


def test_dense_draws():
    logits = torch.randn(6, 2, 5, 3, 4, dtype=F64)  # (S, B, C, H, W)
    close(Categorical().from_samples(logits), naive(logits.movedim(2, -1)))
    tokens = torch.randn(6, 2, 4, 5, dtype=F64)  # (S, B, T, C)
    close(Categorical().from_samples(tokens), naive(tokens))


def test_the_temperature_divides_the_logits_of_predictions_and_not_of_the_loss():
    logits, target = torch.randn(5, 3, 4, dtype=F64), torch.tensor([0, 1, 2])
    likelihood = Categorical().double()
    before = likelihood.nll(logits[0], target)
    likelihood.temperature.fill_(2.5)
    close(likelihood.from_samples(logits), naive(logits / 2.5))
    assert torch.equal(likelihood.nll(logits[0], target), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_two_certain_draws_that_disagree_are_ln_2_apart(dtype):
    logits = torch.tensor([[[1e4, -1e4, -1e4]], [[-1e4, 1e4, -1e4]]], dtype=dtype)
    prediction = Categorical().from_samples(logits)
    for name in (*FIELDS, "total", "confidence", "msp"):
        assert bool(getattr(prediction, name).isfinite().all()), name
    assert prediction.epistemic.item() == pytest.approx(math.log(2), rel=1e-6)
    assert prediction.total.item() == pytest.approx(math.log(2), rel=1e-6)
    assert prediction.aleatoric.item() == 0
    assert prediction.variation_ratio.item() == 0.5
    assert prediction.model_variance.item() == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_identical_draws_have_no_epistemic_uncertainty(dtype):
    logits = (torch.randn(1, 50, 10, dtype=dtype) * 4).expand(20, -1, -1)
    prediction = Categorical().from_samples(logits)
    few_roundings = 30 * torch.finfo(dtype).eps
    assert prediction.epistemic.max() < few_roundings
    assert prediction.model_variance.max() < few_roundings
    assert prediction.logits_variance.max() < few_roundings
    assert torch.equal(prediction.variation_ratio, torch.zeros(50, dtype=dtype))
    once = Categorical().from_samples(logits[:1])
    assert torch.equal(once.epistemic, torch.zeros(50, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_outputs_are_computed_on_in_float32(dtype):
    logits, target = torch.randn(6, 3, 5).to(dtype), torch.tensor([0, 4, 2])
    log_prob = Categorical().log_prob(logits[0], target)
    assert log_prob.dtype == torch.float32
    assert torch.equal(log_prob, Categorical().log_prob(logits[0].float(), target))
    prediction, wanted = Categorical().from_samples(logits), Categorical().from_samples(logits.float())
    for name in FIELDS:
        assert torch.equal(getattr(prediction, name), getattr(wanted, name)), name


def test_under_autocast_nothing_is_lost_after_the_network():
    network = nn.Linear(4, 3)
    x, target = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    with torch.autocast("cpu", torch.bfloat16):
        logits = network(x)
        loss = Categorical().nll(logits, target)
        prediction = Categorical().from_samples(logits[None])
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    assert torch.equal(loss, Categorical().nll(logits.float(), target))
    assert torch.equal(prediction.log_probs, Categorical().from_samples(logits.float()[None]).log_probs)
    torch.testing.assert_close(prediction.log_probs, logits.float().log_softmax(-1), rtol=1e-6, atol=0)


# -- predictions from moments -----------------------------------------------------------------------------------


def moments(classes, spread):
    generator = torch.Generator().manual_seed(classes)
    mean = 2 * torch.randn(8, classes, dtype=F64, generator=generator)
    return mean, 2 * spread * torch.rand(8, classes, dtype=F64, generator=generator), generator


def monte_carlo(mean, variance, generator, draws=100_000):
    stream = Categorical().stream()
    for _ in range(10):
        noise = torch.randn(draws // 10, *mean.shape, dtype=F64, generator=generator)
        stream.add(mean + variance.sqrt() * noise)
    return stream.result()


@pytest.mark.parametrize(("classes", "spread"), [(2, 1.0), (3, 1.0), (5, 0.3)])
@pytest.mark.slow
def test_gaussian_logits_have_the_probabilities_of_draws(classes, spread):
    mean, variance, generator = moments(classes, spread)
    truth = monte_carlo(mean, variance, generator)
    prediction = Categorical().from_gaussian(mean, variance)
    # A probability of 1e5 draws has a standard error below .0016; the points' own error is below .003 here.
    torch.testing.assert_close(prediction.probs, truth.probs, rtol=0, atol=0.008)
    torch.testing.assert_close(prediction.variation_ratio, truth.variation_ratio, rtol=0, atol=0.02)
    torch.testing.assert_close(prediction.logits_mean, truth.logits_mean, rtol=0, atol=0.02)
    torch.testing.assert_close(prediction.logits_variance, truth.logits_variance, rtol=0.03, atol=0)
    torch.testing.assert_close(prediction.total, prediction.aleatoric + prediction.epistemic, rtol=1e-12, atol=0)
    assert prediction.epistemic.min() >= 0


def test_the_model_variance_of_moments_is_that_of_the_jacobian():
    mean, variance, generator = moments(4, 0.001)
    prediction = Categorical().from_gaussian(mean, variance)
    p = prediction.probs
    jacobian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    covariance = jacobian @ torch.diag_embed(variance) @ jacobian.mT
    trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
    torch.testing.assert_close(prediction.model_variance, trace, rtol=1e-12, atol=0)
    # Small variances: first order is right. The error of a variance from 1e5 draws is 0.45 %.
    truth = monte_carlo(mean, variance, generator)
    torch.testing.assert_close(prediction.model_variance, truth.model_variance, rtol=0.02, atol=0)


def test_the_model_variance_of_huge_variances_stays_possible():
    prediction = Categorical().from_gaussian(torch.zeros(1, 3, dtype=F64), torch.full((1, 3), 1e6, dtype=F64))
    assert prediction.model_variance.item() == pytest.approx(2 / 3, rel=1e-3)  # every draw is certain of some class


def test_without_variance_the_moments_are_the_network():
    logits = torch.randn(3, 5, 4, 4, dtype=F64)  # (B, C, H, W)
    prediction = Categorical().from_gaussian(logits, torch.zeros_like(logits))
    close(prediction, naive(logits.movedim(1, -1)[None]), 1e-10)


def test_the_temperature_of_moments_scales_the_logits():
    mean, variance, _ = moments(3, 1.0)
    likelihood = Categorical().double()
    likelihood.temperature.fill_(2.0)
    plain = Categorical().from_gaussian(mean / 2, variance / 4)
    close(likelihood.from_gaussian(mean, variance), {name: getattr(plain, name) for name in FIELDS})


def test_moments_can_be_sampled():
    mean, variance, _ = moments(3, 1.0)
    likelihood = Categorical().double()
    likelihood.temperature.fill_(2.0)
    half = torch.randn(25, 1, 3, dtype=F64, generator=torch.Generator().manual_seed(7))
    draws = torch.cat([mean + variance.sqrt() * half, mean - variance.sqrt() * half])
    close(likelihood.from_gaussian(mean, variance, num_draws=50, seed=7), naive(draws / 2))
    with pytest.raises(ValueError, match="num_draws must be at least 1"):
        likelihood.from_gaussian(mean, variance, num_draws=0)


# -- checks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "target", "sentence"),
    [
        (torch.zeros(3), torch.zeros(3).long(), r"shape \(3,\); classification needs logits \(B, C\).*'binary'"),
        (torch.zeros(3, 2), torch.zeros(3), "targets are torch.float32.*integer labels.*'regression'"),
        (torch.zeros(3, 2), torch.zeros(4).long(), r"do not fit targets of shape \(4,\): targets must be \(3,\)"),
        (torch.zeros(3, 2, 4, 4), torch.zeros(3, 4).long(), r"targets must be \(3, 4, 4\)"),
        (torch.zeros(3, 2), torch.tensor([0, 1, 2]), "Labels run from 0 to 2, but the network has 2 outputs"),
        (torch.zeros(3, 2), torch.tensor([0, 1, -1]), "Labels run from -1 to 1.*0 to 1 .or ignore_index = -100"),
        (torch.zeros(2, 1), torch.tensor([0, 1]), "with one class.*one logit use likelihood='binary'"),
    ],
)
def test_what_does_not_fit_gets_a_sentence(output, target, sentence):
    with pytest.raises(ValueError, match=sentence):
        Categorical().check(output, target)
    with pytest.raises(ValueError, match=sentence):
        Categorical().nll(output, target)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_every_type_of_label_is_taken(dtype):
    logits, target = torch.randn(2, 3, dtype=F64), torch.tensor([0, 1])
    assert torch.equal(Categorical().nll(logits, target.to(dtype)), Categorical().nll(logits, target))


def test_the_configuration_comes_back():
    assert Categorical(class_dim=1, ignore_index=255).config() == {"class_dim": 1, "ignore_index": 255}


@pytest.mark.parametrize("ignored", [-100, 1, 9])
@pytest.mark.parametrize("shape", [(5, 4), (5, 7, 4)])
def test_the_loss_is_the_mean_over_labels_that_count(ignored, shape):
    torch.manual_seed(0)
    logits, labels = torch.randn(shape, dtype=torch.float64), torch.arange(math.prod(shape[:-1])).view(shape[:-1]) % 4
    expected = [
        -row.log_softmax(-1)[y] for row, y in zip(logits.view(-1, 4), labels.flatten(), strict=True) if y != ignored
    ]
    found = Categorical(ignore_index=ignored).nll(logits, labels)
    torch.testing.assert_close(found, torch.stack(expected).mean(), rtol=1e-12, atol=0)
