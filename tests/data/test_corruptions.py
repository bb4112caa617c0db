"""Corruptions against their published formulas, computed pixel by pixel."""

import colorsys
import io
import math

import pytest
import torch

from bayesify.data import CORRUPTIONS, corrupt
from bayesify.data.corruptions import boxes, disk


def images(count: int = 3, side: int = 32, channels: int = 3) -> torch.Tensor:
    """Return smooth images with an edge, on 256 levels, which blur and compression change."""
    generator = torch.Generator().manual_seed(0)
    small = torch.rand(count, channels, 5, 5, generator=generator, dtype=torch.float64)
    made = torch.nn.functional.interpolate(small, size=side, mode="bicubic").clamp(0, 1)
    made[..., side // 2 :, side // 3 : side // 2] = 0.9
    return (made * 255).round() / 255


def level_of(name: str, strength: int) -> float:
    from bayesify.data.corruptions import _KINDS

    return _KINDS[name][1][0][strength - 1]


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("side", [32, 64, 80])
def test_stronger_is_further_away_and_a_seed_decides_everything(name, side):
    pytest.importorskip("PIL")
    generator = torch.Generator().manual_seed(0)
    small = torch.rand(8, 3, 9, 9, generator=generator, dtype=torch.float64)
    # Smooth: pixels of an edge may lie better in larger boxes. In float64, since strengths 3 and 4 of motion are close.
    x = torch.nn.functional.interpolate(small, size=side, mode="bicubic").clamp(0, 1)
    made = [corrupt(x, name, strength) for strength in range(1, 6)]
    distances = [float((one - x).square().mean()) for one in made]
    assert distances == sorted(distances)
    assert distances[0] > 0
    assert len(set(distances)) == 5
    for one in made:
        assert one.shape == x.shape
        assert one.dtype == x.dtype
        assert 0 <= one.min() <= one.max() <= 1
    assert torch.equal(corrupt(x, name, 3, seed=0), made[2])
    random = name.endswith("noise") or name == "motion_blur"
    assert torch.equal(corrupt(x, name, 3, seed=1), made[2]) is not random


def test_noise_has_the_published_moments():
    grey = torch.full((40, 1, 32, 32), 0.5, dtype=torch.float64)
    count = grey.numel()
    for name, variance in (
        ("gaussian_noise", 0.08**2),
        ("speckle_noise", (0.5 * 0.12) ** 2),
        ("shot_noise", 0.5 / 100),  # of Poisson(c x) / c
    ):
        noise = corrupt(grey, name, 3) - grey
        # To 5 standard errors; the fourth moment of Poisson(50) is that of a Gaussian to 1 %.
        assert abs(noise.mean()) < 5 * math.sqrt(variance / count), name
        assert abs(noise.var() / variance - 1) < 5 * math.sqrt(2.02 / count), name
    photons = corrupt(grey, "shot_noise", 3) * 100
    assert torch.allclose(photons, photons.round(), rtol=0, atol=1e-12)
    changed = corrupt(grey, "impulse_noise", 5)
    for value in (0.0, 1.0):
        share = (changed == value).double().mean()
        assert abs(share - 0.035) < 5 * math.sqrt(0.035 / count)
    assert ((changed == 0.5) | (changed == 0) | (changed == 1)).all()
    colour = corrupt(torch.full((10, 3, 32, 32), 0.5), "impulse_noise", 5) != 0.5
    assert (colour.any(1) & ~colour.all(1)).any(), "channels change apart"


def test_brightness_raises_the_value_of_hsv():
    x = images(1, 8)
    x[0, :, 0, :3] = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.2, 0.2], [0.4, 0.4, 0.4]], dtype=x.dtype).T
    made = corrupt(x, "brightness", 4)
    for row in range(8):
        for column in range(8):
            hue, saturation, value = colorsys.rgb_to_hsv(*x[0, :, row, column].tolist())
            wanted = colorsys.hsv_to_rgb(hue, saturation, min(1.0, value + 0.2))
            assert made[0, :, row, column].tolist() == pytest.approx(wanted, abs=1e-12)
    grey = images(1, 8, channels=1)
    assert torch.allclose(corrupt(grey, "brightness", 4), (grey + 0.2).clamp(max=1), rtol=0, atol=1e-15)


def test_contrast_shrinks_towards_the_mean_of_each_channel():
    x = images(2, 8)
    made = corrupt(x, "contrast", 2)
    for image in range(2):
        for channel in range(3):
            mean = sum(x[image, channel].flatten().tolist()) / 64
            wanted = [mean + 0.5 * (value - mean) for value in x[image, channel].flatten().tolist()]
            assert made[image, channel].flatten().tolist() == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize(("radius", "sigma"), [(0.3, 0.4), (1.5, 0.1), (3, 0.1), (8, 0.5), (10, 0.5)])
def test_the_disk_is_a_smoothed_disk_of_weight_one(radius, sigma):
    reach, taps = (8, 1) if radius <= 8 else (10, 2)
    side = 2 * reach + 1
    inside = [[float((i - reach) ** 2 + (j - reach) ** 2 <= radius**2) for j in range(side)] for i in range(side)]
    total = sum(map(sum, inside))
    taper = [math.exp(-0.5 * (t / sigma) ** 2) for t in range(-taps, taps + 1)]

    def mirrored(i: int) -> int:
        i = abs(i)
        return 2 * (side - 1) - i if i >= side else i

    def smoothed(i: int, j: int) -> float:
        weights = (
            taper[a + taps] * taper[b + taps] * inside[mirrored(i + a)][mirrored(j + b)]
            for a in range(-taps, taps + 1)
            for b in range(-taps, taps + 1)
        )
        return sum(weights) / sum(taper) ** 2 / total

    kernel = disk(radius, sigma, dtype=torch.float64)
    full = torch.tensor([[smoothed(i, j) for j in range(side)] for i in range(side)], dtype=torch.float64)
    cut = (side - len(kernel)) // 2
    assert torch.allclose(kernel, full[cut : side - cut, cut : side - cut], atol=1e-15)
    assert float(kernel.sum()) == pytest.approx(float(full.sum()), abs=1e-12), "nothing was cut off"
    if radius < 8:  # a disk that touches the border of its square is mirrored there
        assert float(kernel.sum()) == pytest.approx(1.0, abs=1e-12)


def test_defocus_is_a_sum_over_the_disk():
    x = images(1, 12)
    kernel = disk(1.5, 0.1, dtype=torch.float64)
    reach = len(kernel) // 2
    made = corrupt(x, "defocus_blur", 5)
    for i, j in ((0, 0), (6, 5), (11, 3)):
        value = torch.zeros(3, dtype=torch.float64)
        for a in range(-reach, reach + 1):
            for b in range(-reach, reach + 1):
                row, column = (n if n < 12 else 22 - n for n in (abs(i + a), abs(j + b)))
                value += kernel[a + reach, b + reach] * x[0, :, row, column]
        assert torch.allclose(made[0, :, i, j], value, atol=1e-12)


@pytest.mark.parametrize("strength", [1, 3, 5])
def test_gaussian_blur_is_that_of_scipy(strength):
    ndimage = pytest.importorskip("scipy.ndimage")
    x = images(2, 28)
    sigma = level_of("gaussian_blur", strength)
    wanted = ndimage.gaussian_filter(x.numpy(), (0, 0, sigma, sigma), mode="nearest", truncate=4.0)
    assert torch.allclose(corrupt(x, "gaussian_blur", strength), torch.from_numpy(wanted).clamp(0, 1), atol=1e-12)


def test_motion_blur_averages_along_a_line_of_its_own_for_each_image():
    x = images(2, 16)
    made = corrupt(x, "motion_blur", 1, seed=7)
    angles = 90 * torch.rand(2, generator=torch.Generator().manual_seed(7), dtype=torch.float64) - 45
    weights = [math.exp(-0.5 * step**2) for step in range(13)]
    for image, angle in enumerate(angles.deg2rad().tolist()):
        for i, j in ((0, 0), (8, 7), (15, 14)):
            value = torch.zeros(3, dtype=torch.float64)
            for step, weight in enumerate(weights):
                row = min(15, max(0, i + math.ceil(step * math.sin(angle) - 0.5)))
                column = min(15, max(0, j + math.ceil(step * math.cos(angle) - 0.5)))
                value += weight * x[image, :, row, column]
            assert torch.allclose(made[image, :, i, j], value / sum(weights), atol=1e-12)


@pytest.mark.parametrize("strength", [1, 3, 5])
def test_pixelate_is_pillows_boxes_but_for_their_rounding(strength):
    image = pytest.importorskip("PIL.Image")
    numpy = pytest.importorskip("numpy")
    x = images(1, 32)
    small = int(32 * level_of("pixelate", strength))
    raw = image.fromarray((x[0] * 255).round().byte().permute(1, 2, 0).numpy())
    back = raw.resize((small, small), image.Resampling.BOX).resize((32, 32), image.Resampling.BOX)
    wanted = torch.from_numpy(numpy.array(back)).permute(2, 0, 1).double() / 255
    # Pillow rounds after each of the two directions on the way down, and copies pixels on the way up.
    assert (corrupt(x, "pixelate", strength)[0] - wanted).abs().max() <= 1.001 / 255
    assert torch.allclose(boxes(32, small, x).sum(1), torch.ones(small, dtype=x.dtype))


def test_jpeg_is_pillows():
    image = pytest.importorskip("PIL.Image")
    numpy = pytest.importorskip("numpy")
    x = images(2, 32)
    made = corrupt(x, "jpeg_compression", 2)
    for before, after in zip(x, made, strict=True):
        file = io.BytesIO()
        image.fromarray((before * 255).round().byte().permute(1, 2, 0).numpy()).save(file, "JPEG", quality=65)
        wanted = torch.from_numpy(numpy.array(image.open(file))).permute(2, 0, 1)
        assert torch.equal((after * 255).round().byte(), wanted)


def test_what_is_wrong_is_said():
    x = images(1, 8)
    with pytest.raises(ValueError, match="no corruption 'rain'; there are gaussian_noise"):
        corrupt(x, "rain", 1)
    for strength in (0, 6, 2.5, True):
        with pytest.raises(ValueError, match="from 1 to 5"):
            corrupt(x, "contrast", strength)
    with pytest.raises(ValueError, match="before normalising"):
        corrupt(2 * x, "contrast", 1)
    with pytest.raises(ValueError, match="expected images"):
        corrupt(x[0], "contrast", 1)
    with pytest.raises(ValueError, match="too wide for images of 2 x 2"):
        corrupt(x[..., :2, :2], "defocus_blur", 5)
