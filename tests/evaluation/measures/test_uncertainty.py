"""Uncertainties against closed forms and naive loops."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from bayesify import measure


def _draws(seed: int, *shape: int, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(*shape, generator=generator, dtype=torch.float64)
    return logits.softmax(-1)


def test_entropy_equals_scipy() -> None:
    """The entropy of each row is scipy's."""
    probs = _draws(0, 50, 7)
    expected = torch.from_numpy(stats.entropy(probs.numpy(), axis=-1))
    torch.testing.assert_close(measure.entropy(probs), expected, rtol=1e-13, atol=1e-14)


def test_entropy_of_one_hot_and_uniform() -> None:
    """One-hot gives exactly 0 and uniform exactly ln C."""
    probs = torch.stack([torch.eye(5)[2], torch.full((5,), 0.2)])
    assert measure.entropy(probs).tolist() == pytest.approx([0.0, math.log(5)], abs=1e-15)
    assert measure.entropy(probs)[0] == 0


def test_known_values_of_two_draws() -> None:
    """Identical draws have no mutual information, opposite one-hot draws have ln 2."""
    same = _draws(1, 1, 1000, 3).expand(3, 1000, 3)
    assert measure.mutual_information(same).min() == 0
    assert measure.mutual_information(same).max() < 1e-15
    assert measure.model_variance(same).max() < 1e-30
    opposite = torch.tensor([[[1.0, 0.0, 0.0]], [[0.0, 1.0, 0.0]]])
    assert measure.mutual_information(opposite).item() == pytest.approx(math.log(2), rel=1e-15)
    assert measure.expected_entropy(opposite).item() == 0
    assert measure.variation_ratio(opposite).item() == 0.5
    assert measure.model_variance(opposite).item() == 0.5


def test_samples_against_loops() -> None:
    """All sample functions equal a loop over inputs, dense dimensions included."""
    samples = _draws(2, 9, 4, 3, 5)
    for n in range(4):
        for t in range(3):
            draws = [samples[s, n, t].tolist() for s in range(9)]
            mean = [sum(draw[c] for draw in draws) / 9 for c in range(5)]
            parts = [-sum(p * math.log(p) for p in draw) for draw in draws]
            expected = sum(parts) / 9
            total = -sum(p * math.log(p) for p in mean)
            votes = Counter(draw.index(max(draw)) for draw in draws)
            squares = sum(sum(p * p for p in draw) for draw in draws) / 9
            references = {
                measure.expected_entropy: expected,
                measure.mutual_information: total - expected,
                measure.variation_ratio: 1 - votes.most_common(1)[0][1] / 9,
                measure.model_variance: squares - sum(p * p for p in mean),
            }
            for function, value in references.items():
                assert function(samples)[n, t].item() == pytest.approx(value, rel=1e-12, abs=1e-14)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.0, 1.0, 30.0, 1000.0]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_bounds_hold_at_every_scale(seed: int, scale: float, dtype: torch.dtype) -> None:
    """Results are finite and in their range, from uniform to one-hot, in every precision."""
    samples = _draws(seed, 4, 6, 3, scale=scale).to(dtype)
    bound = math.log(3)
    entropies = measure.expected_entropy(samples)
    information = measure.mutual_information(samples)
    for value in (entropies, information):
        assert value.dtype == torch.float64
        assert ((value >= 0) & (value <= bound)).all()
    assert (entropies + information <= bound + 0.02).all()
    assert ((measure.variation_ratio(samples) >= 0) & (measure.variation_ratio(samples) < 1)).all()


def test_gradient_passes_through() -> None:
    """Uncertainties stay differentiable: d H / d p = -(log p + 1)."""
    probs = _draws(3, 4, 5).requires_grad_()
    (gradient,) = torch.autograd.grad(measure.entropy(probs).sum(), probs)
    torch.testing.assert_close(gradient, -(probs.detach().log() + 1))


@pytest.mark.parametrize("name", ["expected_entropy", "mutual_information", "variation_ratio"])
def test_samples_need_three_dimensions(name: str) -> None:
    """(S, C) without inputs is ambiguous and refused."""
    with pytest.raises(ValueError, match="unsqueeze"):
        getattr(measure, name)([[0.5, 0.5], [0.5, 0.5]])
