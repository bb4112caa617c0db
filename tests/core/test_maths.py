"""Entropies and the search over one number."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from bayesify._core.maths import at_least_float32, entropy, minimise, scaled_channels, softmax_below


def test_half_precision_is_promoted_and_the_rest_kept():
    for given_dtype, wanted in [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ]:
        assert at_least_float32(torch.zeros(1, dtype=given_dtype)).dtype == wanted


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 5), (3, 4, 5, 2), (0, 4, 5)])
@pytest.mark.parametrize("order", ["contiguous", "transposed"])
def test_channels_are_scaled_and_shifted_with_all_gradients(shape: tuple[int, ...], shift: bool, order: str):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    x = (x if order == "contiguous" else x.transpose(0, -1).contiguous().transpose(0, -1)).requires_grad_()
    a, c = (torch.randn(shape[:2], dtype=torch.float64, requires_grad=True) for _ in range(2))
    each = (*shape[:2], *[1] * (len(shape) - 2))
    found = scaled_channels(x, a, c if shift else None)
    wanted = x * a.view(each) + (c.view(each) if shift else 0)
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-14)
    flow, inputs = torch.randn_like(wanted), (x, a, c) if shift else (x, a)
    for one, other in zip(*(torch.autograd.grad(y, inputs, flow) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_entropy_against_torch_distributions():
    logits = torch.randn(50, 7, dtype=torch.float64) * 5
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropy(logits.log_softmax(-1)), expected, rtol=1e-12, atol=1e-14)


def test_logarithms_of_a_softmax_are_exact_however_sure_it_is():
    logits = torch.randn(50, 7, dtype=torch.float64) * torch.logspace(-2, 2, 50, dtype=torch.float64)[:, None]
    largest, top = logits.max(-1, keepdim=True)
    torch.testing.assert_close(softmax_below(logits - largest, top), logits.log_softmax(-1), rtol=1e-12, atol=1e-15)
    single = softmax_below((logits - largest).float(), top)
    rest = logits.softmax(-1).scatter(-1, top, 0).sum(-1, keepdim=True)
    wanted = torch.log1p(-rest).where(rest < 0.5, logits.log_softmax(-1).amax(-1, keepdim=True))
    torch.testing.assert_close(single.gather(-1, top).double(), wanted, rtol=1e-5, atol=1e-38)
    masked = softmax_below(torch.tensor([0.0, -math.inf, 0.0]), torch.tensor([0]))
    torch.testing.assert_close(masked, torch.tensor([0.5, 0.0, 0.5]).log())


def test_entropy_of_certain_and_uniform_distributions():
    certain = torch.tensor([0.0, -math.inf, -1e30])
    assert entropy(certain).item() == 0
    uniform = torch.full((8,), -math.log(8), dtype=torch.float64)
    assert entropy(uniform).item() == pytest.approx(math.log(8), abs=1e-15)


@given(centre=st.floats(-3.9, 3.9), width=st.floats(0.1, 10))
def test_minimise_finds_the_minimum_of_a_valley(centre, width):
    found, value = minimise(lambda x: abs((x - centre) / width) ** 1.5, -4, 4, start=0.0)
    assert abs(found - centre) < 2e-6
    assert value == abs((found - centre) / width) ** 1.5


def test_minimise_reaches_both_ends():
    assert minimise(lambda x: x, -4, 4, start=0.0)[0] == -4
    assert minimise(lambda x: -x, -4, 4, start=0.0)[0] == 4


def test_minimise_is_never_worse_than_the_start():
    # A hole at the start that is too narrow for the grid.
    found, value = minimise(lambda x: -1.0 if x == 0.123 else x * x, -4, 4, start=0.123)
    assert (found, value) == (0.123, -1.0)
