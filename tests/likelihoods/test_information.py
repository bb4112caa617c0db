"""The mutual information of Gaussian logits in closed form, against draws."""

import pytest
import torch

from bayesify import Bernoulli, Categorical


@pytest.mark.parametrize("gap", [1.0, 3.0, 6.0])
@pytest.mark.parametrize(("variance", "tolerance"), [(0.01, 0.05), (0.1, 0.05), (1.0, 0.1), (4.0, 0.15), (16.0, 0.2)])
def test_ten_classes(gap, variance, tolerance):
    """500 draws of 200 examples have a mean information within 2 %; the order has to be right too."""
    generator = torch.Generator().manual_seed(0)
    mean = gap * torch.randn(200, 10, dtype=torch.float64, generator=generator)
    spread = variance * (0.5 + torch.rand(200, 10, dtype=torch.float64, generator=generator))
    closed = Categorical().from_moments(mean, spread)
    drawn = Categorical().from_moments(mean, spread, num_samples=500)
    ratio = (closed.epistemic.sum() / drawn.epistemic.sum()).item()
    assert abs(ratio - 1) < tolerance
    assert torch.corrcoef(torch.stack([closed.epistemic, drawn.epistemic]))[0, 1] > 0.75
    torch.testing.assert_close(closed.total, closed.aleatoric + closed.epistemic)
    assert (closed.aleatoric >= 0).all()


@pytest.mark.parametrize("variance", [0.01, 0.1, 1.0, 4.0])
def test_yes_or_no(variance):
    generator = torch.Generator().manual_seed(0)
    mean = 2 * torch.randn(300, 1, dtype=torch.float64, generator=generator)
    closed = Bernoulli().from_moments(mean, torch.full_like(mean, variance))
    noise = torch.randn(4000, 1, 1, dtype=torch.float64, generator=generator)
    drawn = Bernoulli().from_samples(mean + variance**0.5 * noise)
    assert abs(closed.epistemic.sum() / drawn.epistemic.sum() - 1) < 0.1
