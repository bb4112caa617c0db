from __future__ import annotations

import math

import pytest
import torch

from bayesify.data import (
    gaussian_like,
    gaussian_noise,
    rotate,
    salt_and_pepper,
    to_scale,
    uniform_like,
)

RANDOM = [
    gaussian_like,
    uniform_like,
    lambda x, generator: gaussian_noise(x, 0.3, generator=generator),
    lambda x, generator: salt_and_pepper(x, 0.3, generator=generator),
]


@pytest.mark.parametrize("make", RANDOM)
def test_seeds_and_generators_decide_everything(make):
    x = torch.rand(4, 3, 8, 8, dtype=torch.float64)
    before = x.clone()
    first = make(x, generator=7)
    torch.rand(5)
    assert torch.equal(first, make(x, generator=7))
    assert torch.equal(first, make(x, generator=torch.Generator().manual_seed(7)))
    assert not torch.equal(first, make(x, generator=8))
    assert torch.equal(x, before)
    assert first.dtype == x.dtype
    with pytest.raises(ValueError, match="floating-point batch"):
        make(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), generator=0)


def test_gaussian_like_has_the_moments_of_each_channel():
    x = torch.rand(50, 2, 20, 20) * torch.tensor([1.0, 6.0])[:, None, None] - 2
    noise = gaussian_like(x, generator=0)
    # 20,000 draws per channel: both tolerances are 5 standard errors.
    for channel in range(2):
        std = x[:, channel].std()
        assert abs(noise[:, channel].mean() - x[:, channel].mean()) < 5 * std / math.sqrt(20000)
        assert abs(noise[:, channel].std() / std - 1) < 5 / math.sqrt(40000)
    assert noise.max() > x.max()


def test_uniform_like_fills_the_range():
    noise = uniform_like(torch.tensor([[-3.0, 5.0]]).expand(5000, 2), generator=0)
    assert noise.min() >= -3
    assert noise.max() <= 5
    counts = torch.histc(noise, 4, -3, 5)
    assert (counts - 2500).abs().max() < 5 * math.sqrt(10000 * 0.25 * 0.75)


def test_gaussian_noise_has_its_level_and_stays_on_the_scale():
    x = torch.full((100, 1, 10, 10), 5.0)
    noisy = gaussian_noise(x, 0.05, generator=0, scale=(0.0, 10.0))
    assert abs((noisy - x).std() / 0.5 - 1) < 5 / math.sqrt(20000)
    loud = gaussian_noise(x / 10, 3.0, generator=0)
    assert (loud.min(), loud.max()) == (0, 1)


def test_salt_and_pepper_changes_whole_pixels_by_halves():
    x = torch.full((20, 3, 20, 20), 0.5)
    spotted = salt_and_pepper(x, 0.4, generator=0)
    assert torch.equal(spotted[:, 0], spotted[:, 2])
    for value, share in ((0.0, 0.2), (1.0, 0.2), (0.5, 0.6)):
        found = (spotted[:, 0] == value).float().mean().item()
        assert abs(found - share) < 5 * math.sqrt(share * (1 - share) / 8000)
    assert torch.equal(salt_and_pepper(x, 0.0, generator=0), x)


def test_a_mixture_with_noise_is_that_of_the_paper():
    """(1 - g) x + g e of normalised inputs: no clamp, and noise alone at g = 1."""
    x = 3 + torch.randn(50, 3, 20, 20)
    for share in (0.0, 0.3, 1.0):
        mixed = gaussian_noise(x, share, generator=0, how="mix")
        rest = mixed - (1 - share) * x
        count = x.numel()
        assert abs(rest.mean().item()) <= 5 * share / math.sqrt(count)
        assert abs(rest.std().item() - share) <= 5 * share / math.sqrt(2 * count) + 1e-6
    with pytest.raises(ValueError, match="a share from 0 to 1"):
        gaussian_noise(x, 1.1, generator=0, how="mix")
    with pytest.raises(ValueError, match="'add' or 'mix'"):
        gaussian_noise(x, 0.1, generator=0, how="both")


def test_salt_and_pepper_of_elements_is_independent_over_channels():
    x = 3 + torch.randn(20, 3, 20, 20)  # normalised: not on any scale
    spotted = salt_and_pepper(x, 0.4, generator=0, per="element")
    for value, share in ((0.0, 0.2), (1.0, 0.2)):
        hit = (spotted == value).float()
        assert abs(hit.mean().item() - share) < 5 * math.sqrt(share * (1 - share) / x.numel())
        both = (hit[:, 0] * hit[:, 1]).mean().item()
        assert abs(both - share**2) < 5 * math.sqrt(share**2 / 8000)
    assert bool(((spotted == x) | (spotted == 0) | (spotted == 1)).all())
    with pytest.raises(ValueError, match="'pixel' or 'element'"):
        salt_and_pepper(x, 0.4, generator=0, per="image")


def test_quarter_turns_are_exact():
    x = torch.rand(3, 2, 7, 7, dtype=torch.float64)
    for turns in range(4):
        assert torch.allclose(rotate(x, 90.0 * turns), x.rot90(turns, (2, 3)), atol=1e-12)
    each = rotate(x, torch.tensor([0.0, 90.0, 180.0]))
    for i in range(3):
        assert torch.allclose(each[i], x[i].rot90(i, (1, 2)), atol=1e-12)


def test_a_turn_keeps_shapes_in_oblong_images():
    # A bright disc right of the centre goes above it, at the same distance in pixels.
    row, column = torch.meshgrid(torch.arange(41.0), torch.arange(81.0), indexing="ij")

    def disc(r: float, c: float) -> torch.Tensor:
        return torch.exp(-((row - r) ** 2 + (column - c) ** 2) / 8)[None, None]

    assert torch.allclose(rotate(disc(20, 52), 90.0), disc(8, 40), atol=1e-4)
    assert torch.allclose(rotate(disc(20, 50), 36.87), disc(14, 48), atol=0.05)


def test_to_scale_maps_ends_to_ends():
    x = torch.tensor([2.0, 3.0, 6.0])
    assert to_scale(x, -1.0, 1.0).tolist() == [-1.0, -0.5, 1.0]
    assert to_scale(x, 0.0, 1.0, source=(0.0, 10.0)).tolist() == pytest.approx([0.2, 0.3, 0.6])
    # uint8 has its own range, whatever occurs in this batch.
    assert to_scale(torch.tensor([51], dtype=torch.uint8), 0.0, 1.0).tolist() == pytest.approx([0.2])
    with pytest.raises(ValueError, match="is empty: give that of the data as source"):
        to_scale(torch.ones(3), 0.0, 1.0)


def test_wrong_levels_scales_and_shapes_are_described():
    x = torch.rand(2, 1, 4, 4)
    for corrupt in (gaussian_noise, salt_and_pepper):
        with pytest.raises(ValueError, match="the level is"):
            corrupt(x, -0.1, generator=0)
        with pytest.raises(ValueError, match=r"outside the scale \(0.0, 1.0\)"):
            corrupt(x - 2, 0.1, generator=0)
        with pytest.raises(ValueError, match="outside the scale"):
            corrupt(x * float("nan"), 0.1, generator=0)
    with pytest.raises(ValueError, match=r"from 0 to 1, not 1\.5"):
        salt_and_pepper(x, 1.5, generator=0)
    with pytest.raises(ValueError, match=r"images \(N, C, H, W\)"):
        rotate(torch.rand(3, 4), 10.0)
    with pytest.raises(ValueError, match="one angle or 2"):
        rotate(x, torch.zeros(3))
