"""Common corruptions of images at five strengths, after the definitions of Hendrycks and Dietterich (2019).

Strengths are those of CIFAR-10-C for images of up to 32 pixels, of Tiny-ImageNet-C up to 64, and of ImageNet-C beyond.
Values stay floats: only JPEG rounds to 256 levels, where the published files are rounded throughout. Weather, glass,
zoom and elastic distortions of the benchmark are left out; saturation too, which is not ordered by its strength.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

from bayesify.data.fakes import blur, jpeg
from bayesify.data.ood import check_images, check_scale, draw, gaussian_noise, salt_and_pepper

__all__ = ["CORRUPTIONS", "corrupt"]

SIDES = (32, 64, math.inf)  # the largest images of each column of levels
ANGLE = 45.0  # motion is within so many degrees of the horizontal

Levels = tuple[Any, ...]


def corrupt(images: Tensor, name: str, strength: int, *, seed: int = 0) -> Tensor:
    """Corrupt images as CIFAR-10-C and ImageNet-C do (Hendrycks and Dietterich 2019, section 4.1 and appendix).

    With the level c of a strength, clipped to [0, 1]:

    - gaussian_noise: x + c e; speckle_noise: x + c x e, with e ~ N(0, 1) for each number
    - shot_noise: Poisson(c x) / c
    - impulse_noise: each number becomes 0 or 1 with probability c / 2 each
    - gaussian_blur: a Gaussian of c pixels; defocus_blur: a disk; motion_blur: half a Gaussian along a line, at its own
      angle for each image
    - brightness: V of HSV plus c; contrast: m + c (x - m) with the mean m of each image and channel
    - pixelate: boxes, at c times the size and back; jpeg_compression: at quality c, which needs Pillow

    Args:
        images: ``(B, C, H, W)`` with values from 0 to 1: corrupt before normalising.
        name: One of `CORRUPTIONS`.
        strength: 1 to 5.
        seed: Of what is random. Draws are made on the CPU, the same on every device.

    Returns:
        Images of the same shape, dtype and device.

    Example:
        >>> images = torch.linspace(0, 1, 192).reshape(1, 3, 8, 8)
        >>> [round(float((corrupt(images, "contrast", s) - images).abs().mean()), 4) for s in (1, 5)]
        [0.0209, 0.071]
        >>> set(CORRUPTIONS) > {"gaussian_noise", "defocus_blur", "contrast", "brightness", "jpeg_compression"}
        True
    """
    if name not in CORRUPTIONS:
        raise ValueError(f"There is no corruption {name!r}; there are {', '.join(CORRUPTIONS)}.")
    if isinstance(strength, bool) or strength not in range(1, 6):
        raise ValueError(f"The strength is a whole number from 1 to 5, not {strength!r}.")
    check_images(images)
    check_scale(images, (0.0, 1.0))
    column = next(i for i, side in enumerate(SIDES) if min(images.shape[2:]) <= side)
    function, levels = _KINDS[name]
    return function(images.clamp(0, 1), levels[column][strength - 1], seed).clamp(0, 1)


def _gaussian_noise(x: Tensor, std: float, seed: int) -> Tensor:
    return gaussian_noise(x, std, generator=seed)


def _speckle_noise(x: Tensor, std: float, seed: int) -> Tensor:
    return x + std * x * draw(torch.randn, x, x.shape, seed)


def _shot_noise(x: Tensor, photons: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.poisson((photons * x).cpu(), generator).to(x.device) / photons


def _impulse_noise(x: Tensor, share: float, seed: int) -> Tensor:
    return salt_and_pepper(x, share, generator=seed, per="element")


def _gaussian_blur(x: Tensor, sigma: float, _: int) -> Tensor:
    return blur(x, sigma, reach=int(4 * sigma + 0.5), border="replicate")


def _defocus_blur(x: Tensor, level: tuple[float, float], _: int) -> Tensor:
    kernel = disk(*level, dtype=x.dtype, device=x.device)
    reach = len(kernel) // 2
    if reach >= min(x.shape[2:]):
        raise ValueError(f"A disk that reaches {reach} pixels is too wide for images of {x.shape[2]} x {x.shape[3]}.")
    wide = pad(x, [reach] * 4, mode="reflect")
    return conv2d(wide, kernel.expand(x.shape[1], 1, -1, -1), groups=x.shape[1])


def disk(radius: float, sigma: float, **options: Any) -> Tensor:
    """Return the kernel of a lens out of focus: a disk, smoothed by a Gaussian of 3 x 3 (5 x 5 for a radius above 8).

    The disk lies on a square that reaches 8 pixels, or the radius if that is larger, mirrored at its border; the kernel
    is cut to what is not zero.

    >>> disk(1.0, 0.01, dtype=torch.float64)[1:-1, 1:-1]
    tensor([[0.0000, 0.2000, 0.0000],
            [0.2000, 0.2000, 0.2000],
            [0.0000, 0.2000, 0.0000]], dtype=torch.float64)
    """
    reach, taps = (8, 1) if radius <= 8 else (int(radius), 2)
    squares = torch.arange(-reach, reach + 1, **options) ** 2
    inside = (squares[:, None] + squares <= radius**2).to(squares.dtype)
    weights = torch.exp(-0.5 * (torch.arange(-taps, taps + 1, **options) / sigma) ** 2)
    kernel = (weights[:, None] * weights / weights.sum() ** 2)[None, None]
    made = conv2d(pad((inside / inside.sum())[None, None], [taps] * 4, mode="reflect"), kernel)[0, 0]
    cut = max(0, reach - math.floor(radius) - taps)
    return made[cut : len(made) - cut, cut : len(made) - cut]


def _motion_blur(x: Tensor, level: tuple[float, float], seed: int) -> Tensor:
    """Average over pixels ahead, nearest to a line, with border pixels repeated: ImageMagick's motion blur."""
    radius, sigma = level
    steps = torch.arange(2 * math.ceil(radius) + 1, dtype=torch.float64)
    weights = torch.exp(-0.5 * (steps / sigma) ** 2)
    weights /= weights.sum()
    angles = ANGLE * (2 * draw(torch.rand, steps, torch.Size((len(x),)), seed) - 1)
    ahead = torch.stack([angles.deg2rad().sin(), angles.deg2rad().cos()])
    # (2, N, K) pixels down and to the right
    offsets = (steps * ahead[..., None] - 0.5).ceil().long().to(x.device)
    height, width = x.shape[2:]
    made = torch.zeros_like(x)
    for weight, (down, right) in zip(weights.tolist(), offsets.permute(2, 0, 1), strict=True):
        rows = (torch.arange(height, device=x.device) + down[:, None]).clamp(0, height - 1)
        columns = (torch.arange(width, device=x.device) + right[:, None]).clamp(0, width - 1)
        places = (rows[:, :, None] * width + columns[:, None]).flatten(1)[:, None].expand(-1, x.shape[1], -1)
        made += weight * x.flatten(2).gather(2, places).view_as(x)
    return made


def _brightness(x: Tensor, level: float, _: int) -> Tensor:
    """Raise V = max over channels at the same hue and saturation: the colours are scaled, black becomes grey."""
    value = x.amax(1, keepdim=True)
    raised = (value + level).clamp(max=1)
    return torch.where(value > 0, x * (raised / value), raised)


def _contrast(x: Tensor, factor: float, _: int) -> Tensor:
    mean = x.mean((2, 3), keepdim=True)
    return mean + factor * (x - mean)


def _pixelate(x: Tensor, share: float, _: int) -> Tensor:
    height, width = x.shape[2:]
    low, thin = max(1, int(height * share)), max(1, int(width * share))
    small = boxes(height, low, x) @ x @ boxes(width, thin, x).T
    return boxes(low, height, x) @ small @ boxes(thin, width, x).T


def boxes(before: int, after: int, like: Tensor) -> Tensor:
    """Return the matrix ``(after, before)`` that resizes one side by boxes: means of pixels whose centres a box holds.

    >>> boxes(4, 2, torch.zeros(()))
    tensor([[0.5000, 0.5000, 0.0000, 0.0000],
            [0.0000, 0.0000, 0.5000, 0.5000]])
    """
    scale = before / after
    middles = (torch.arange(after, dtype=torch.float64) + 0.5) * scale
    apart = (torch.arange(before, dtype=torch.float64) + 0.5 - middles[:, None]) / max(scale, 1.0)
    held = ((apart > -0.5) & (apart <= 0.5)).double()
    return (held / held.sum(1, keepdim=True)).to(like.device, like.dtype)


def _jpeg_compression(x: Tensor, quality: int, _: int) -> Tensor:
    return jpeg(x, quality)


# Of CIFAR-10-C, Tiny-ImageNet-C and ImageNet-C. A disk has its radius and the width of its smoothing, motion the reach
# and the width of its Gaussian.
_KINDS: Mapping[str, tuple[Callable[[Tensor, Any, int], Tensor], tuple[Levels, Levels, Levels]]] = {
    "gaussian_noise": (
        _gaussian_noise,
        ((0.04, 0.06, 0.08, 0.09, 0.10), (0.04, 0.08, 0.12, 0.15, 0.18), (0.08, 0.12, 0.18, 0.26, 0.38)),
    ),
    "shot_noise": (_shot_noise, ((500, 250, 100, 75, 50), (250, 100, 50, 30, 15), (60, 25, 12, 5, 3))),
    "impulse_noise": (
        _impulse_noise,
        ((0.01, 0.02, 0.03, 0.05, 0.07), (0.01, 0.02, 0.05, 0.08, 0.14), (0.03, 0.06, 0.09, 0.17, 0.27)),
    ),
    "speckle_noise": (
        _speckle_noise,
        ((0.06, 0.1, 0.12, 0.16, 0.2), (0.15, 0.2, 0.25, 0.3, 0.35), (0.15, 0.2, 0.35, 0.45, 0.6)),
    ),
    "defocus_blur": (
        _defocus_blur,
        (
            ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
            ((0.5, 0.6), (1, 0.1), (1.5, 0.1), (2.5, 0.01), (3, 0.1)),
            ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
        ),
    ),
    "gaussian_blur": (_gaussian_blur, ((0.4, 0.6, 0.7, 0.8, 1), (0.5, 0.75, 1, 1.25, 1.5), (1, 2, 3, 4, 6))),
    "motion_blur": (
        _motion_blur,
        (
            ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
            ((10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3)),
            ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
        ),
    ),
    "brightness": (
        _brightness,
        ((0.05, 0.1, 0.15, 0.2, 0.3), (0.1, 0.2, 0.3, 0.4, 0.5), (0.1, 0.2, 0.3, 0.4, 0.5)),
    ),
    "contrast": (
        _contrast,
        ((0.75, 0.5, 0.4, 0.3, 0.15), (0.4, 0.3, 0.2, 0.1, 0.05), (0.4, 0.3, 0.2, 0.1, 0.05)),
    ),
    "pixelate": (
        _pixelate,
        ((0.95, 0.9, 0.85, 0.75, 0.65), (0.9, 0.8, 0.7, 0.6, 0.5), (0.6, 0.5, 0.4, 0.3, 0.25)),
    ),
    "jpeg_compression": (_jpeg_compression, ((80, 65, 58, 50, 40), (65, 58, 50, 40, 25), (25, 18, 15, 10, 7))),
}
CORRUPTIONS: tuple[str, ...] = tuple(_KINDS)
"""The names of the corruptions: of noise, of blur, and of how an image is stored."""
