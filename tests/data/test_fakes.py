from __future__ import annotations

import math

import pytest
import torch
from torch.utils.data import DataLoader

from bayesify.data import OODImages, blur, jpeg, mix, noise_in_ball, shuffle_patches


def test_noise_fills_the_ball_and_stays_on_the_scale():
    x = torch.full((50, 1, 20, 20), 0.5, dtype=torch.float64)
    noise = noise_in_ball(x, 0.1, generator=0) - x
    assert noise.abs().max() <= 0.1
    # Uniform on (-.1, .1): the variance is .01 / 3, to 5 standard errors of 20,000 numbers.
    assert abs(noise.var() / (0.01 / 3) - 1) < 5 * math.sqrt(0.8 / 20000)
    assert noise_in_ball(torch.ones(1, 1, 4, 4), 0.1, generator=0).max() == 1
    assert torch.equal(noise_in_ball(x, 0.1, generator=3), noise_in_ball(x, 0.1, generator=3))
    with pytest.raises(ValueError, match="radius"):
        noise_in_ball(x, -1.0)


def test_blur_is_a_sum_over_gaussian_weights_with_reflected_borders():
    x = torch.rand(2, 3, 9, 8, dtype=torch.float64)
    sigmas = torch.tensor([0.8, 1.7], dtype=torch.float64)
    found = blur(x, sigmas)
    reach = 6

    def reflect(i: int, n: int) -> int:
        i = abs(i)
        return 2 * (n - 1) - i if i >= n else i

    for image, sigma in enumerate(sigmas.tolist()):
        weights = [math.exp(-0.5 * (d / sigma) ** 2) for d in range(-reach, reach + 1)]
        total = sum(weights) ** 2
        for i, j in ((0, 0), (4, 3), (8, 7)):
            value = sum(
                weights[a + reach] * weights[b + reach] * x[image, :, reflect(i + a, 9), reflect(j + b, 8)]
                for a in range(-reach, reach + 1)
                for b in range(-reach, reach + 1)
            )
            assert torch.allclose(found[image, :, i, j], value / total, atol=1e-12)
    assert torch.allclose(blur(x, 0.0), x, atol=1e-15)


def test_jpeg_loses_more_at_lower_quality():
    pytest.importorskip("PIL")
    x = torch.rand(3, 3, 16, 16)
    losses = [(jpeg(x, quality) - x).abs().mean() for quality in (95, 50, 5)]
    assert 0 < losses[0] < losses[1] < losses[2]
    smooth = torch.linspace(0, 1, 16).expand(1, 1, 16, 16)
    assert (jpeg(smooth, 100) - smooth).abs().max() < 0.02
    assert torch.equal(jpeg(x, [95, 50, 5])[1], jpeg(x[1:2], 50)[0])
    with pytest.raises(ValueError, match="one channel or three"):
        jpeg(torch.rand(1, 2, 8, 8), 50)


def test_patches_are_moved_whole():
    x = torch.rand(6, 2, 8, 12)
    shuffled = shuffle_patches(x, 4, generator=1)

    def patches(images):
        return [
            sorted(tuple(image[:, i : i + 4, j : j + 4].flatten().tolist()) for i in (0, 4) for j in (0, 4, 8))
            for image in images
        ]

    assert patches(x) == patches(shuffled)
    assert sum(torch.equal(a, b) for a, b in zip(x, shuffled, strict=True)) <= 1
    with pytest.raises(ValueError, match="do not fill"):
        shuffle_patches(x, 5)


def test_mix():
    x, y = torch.rand(2, 3, 1, 4, 4)
    assert torch.allclose(mix(x, y, 0.3), 0.3 * x + 0.7 * y)
    with pytest.raises(ValueError, match="do not mix"):
        mix(x, y[:2])


def test_items_are_noisy_images_or_fakes():
    images = torch.rand(40, 3, 8, 8)
    noisy = OODImages(images, radius=0.05, share=0.0, shift=0, mirror=False)
    for index in range(40):
        gap = (noisy[index] - images[index]).abs().max()
        assert 0.02 < gap <= 0.0501
    fakes = torch.zeros(2, 3, 8, 8)
    given = OODImages(images, fakes=fakes, share=1.0, compress=False, transform=lambda image: image - 1)
    assert all(torch.equal(given[index], -torch.ones(3, 8, 8)) for index in range(5))
    called = OODImages(images, fakes=lambda: torch.full((3, 8, 8), 0.25), share=1.0, shift=0, compress=False)
    assert torch.allclose(called[0], torch.full((3, 8, 8), 0.25))
    made = OODImages(images, share=1.0, compress=False)
    torch.manual_seed(0)
    far = [min(float((made[i] - image).abs().mean()) for image in images) for i in range(10)]
    assert min(far) > 0.01
    half = OODImages(images, radius=0.0, fakes=fakes, shift=0, mirror=False, compress=False)
    count = sum(not half[index % 40].any() for index in range(400))
    assert abs(count - 200) < 5 * 10  # five standard deviations


def test_workers_do_not_repeat_each_other():
    data = OODImages(torch.full((16, 1, 8, 8), 0.5), radius=0.1, share=0.0, shift=0, mirror=False)
    torch.manual_seed(0)
    rows = torch.cat(list(DataLoader(data, batch_size=4, num_workers=2)))
    assert len({tuple(row.flatten().tolist()) for row in rows}) == 16
