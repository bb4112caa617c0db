"""Inputs that are OOD by construction, and corruptions of increasing level.

Everything random takes a ``generator``: a ``torch.Generator``, or a seed. Draws are made on the
generator's device (the CPU for a seed), so that a seed means the same numbers on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

__all__ = [
    "gaussian_like",
    "gaussian_noise",
    "rotate",
    "salt_and_pepper",
    "to_scale",
    "uniform_like",
]

Range = tuple[float, float]


def gaussian_like(x: Tensor, *, generator: torch.Generator | int) -> Tensor:
    """Draw Gaussian noise with the shape of ``x`` and its mean and deviation in each channel.

    The channel is dimension 1; an ``x (N, D)`` has D channels. Values are not clamped.

    >>> noise = gaussian_like(torch.tensor([[0.0, 4.0], [2.0, 4.0]]), generator=0)
    >>> noise[:, 1].tolist()
    [4.0, 4.0]
    """
    _check_batch(x)
    others = [d for d in range(x.ndim) if d != 1]
    std, mean = torch.std_mean(x, others, correction=0, keepdim=True)
    return mean + std * draw(torch.randn, x, x.shape, generator)


def uniform_like(x: Tensor, *, generator: torch.Generator | int) -> Tensor:
    """Draw uniform noise with the shape of ``x``, between its smallest and largest value.

    >>> noise = uniform_like(torch.tensor([[2.0, 3.0]]), generator=0)
    >>> bool(((noise >= 2) & (noise <= 3)).all())
    True
    """
    _check_batch(x)
    low, high = x.aminmax()
    return low + (high - low) * draw(torch.rand, x, x.shape, generator)


def gaussian_noise(
    x: Tensor,
    level: float,
    *,
    generator: torch.Generator | int,
    scale: Range = (0.0, 1.0),
    how: Literal["add", "mix"] = "add",
) -> Tensor:
    """Corrupt inputs with Gaussian noise.

    Args:
        x: ``(N, ...)``, for "add" with values on ``scale``, for "mix" normalised.
        level: "add": the standard deviation of the noise, as a share of the width of ``scale``; "mix": its share g.
        generator: source of randomness, or a seed.
        scale: smallest and largest possible value, for "add".
        how: "add" noise, and clamp to the scale; or "mix" (1 - g) x + g e, e ~ N(0, 1), of normalised inputs, without a
            clamp (Trinh et al. 2020, eq. 28).

    >>> gaussian_noise(torch.full((1, 2), 0.5), 0.0, generator=0)
    tensor([[0.5000, 0.5000]])
    """
    if how == "mix":
        if not 0 <= level <= 1:
            raise ValueError(f"the level of a mixture is a share from 0 to 1, not {level}")
        return (1 - level) * x + level * draw(torch.randn, x, x.shape, generator)
    if how != "add":
        raise ValueError(f"how must be 'add' or 'mix', not {how!r}")
    check_scale(x, scale)
    if not 0 <= level < math.inf:
        raise ValueError(f"the level is a standard deviation of at least 0, not {level}")
    noise = draw(torch.randn, x, x.shape, generator)
    return (x + level * (scale[1] - scale[0]) * noise).clamp(*scale)


def salt_and_pepper(
    x: Tensor,
    level: float,
    *,
    generator: torch.Generator | int,
    scale: Range = (0.0, 1.0),
    per: Literal["pixel", "element"] = "pixel",
) -> Tensor:
    """Set a share of the pixels, or of all numbers, to the smallest or largest value.

    Args:
        x: ``(N, C, H, W)``, for "pixel" with values on ``scale``.
        level: expected share that changes, 0 to 1; half become the smallest value, half the largest.
        generator: source of randomness, or a seed.
        scale: smallest and largest possible value.
        per: "pixel", all channels together; or "element", each number by itself, of inputs on any scale: Trinh et al.
            (2020) set normalised inputs to 0 and 1 with probability level / 2 each.

    >>> salt_and_pepper(torch.full((1, 3, 2, 2), 0.5), 1.0, generator=0).unique()
    tensor([0., 1.])
    """
    check_images(x)
    if per not in ("pixel", "element"):
        raise ValueError(f"per must be 'pixel' or 'element', not {per!r}")
    if per == "pixel":
        check_scale(x, scale)
    if not 0 <= level <= 1:
        raise ValueError(f"the level is a share from 0 to 1, not {level}")
    chance = draw(torch.rand, x, torch.Size((len(x), 1, *x.shape[2:])) if per == "pixel" else x.shape, generator)
    low, high = scale
    return torch.where(chance < level / 2, low, torch.where(chance < level, high, x))


def rotate(x: Tensor, degrees: float | Tensor) -> Tensor:
    """Turn images anticlockwise about their centre, bilinearly; what comes in is 0.

    Args:
        x: ``(N, C, H, W)``.
        degrees: one angle, or ``(N,)`` angles.

    >>> rotate(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), 90.0).round()
    tensor([[[[2., 4.],
              [1., 3.]]]])
    """
    check_images(x)
    angles = torch.as_tensor(degrees, dtype=x.dtype, device=x.device).deg2rad()
    if angles.ndim > 1 or (angles.ndim == 1 and len(angles) != len(x)):
        raise ValueError(f"give one angle or {len(x)}, not a tensor {tuple(angles.shape)}")
    cos, sin = angles.expand(len(x)).cos(), angles.expand(len(x)).sin()
    # affine_grid measures each axis in half its own length, so that the sides' ratio enters.
    ratio = x.shape[2] / x.shape[3]
    zero = torch.zeros_like(cos)
    rows = torch.stack([cos, -sin * ratio, zero, sin / ratio, cos, zero], 1)
    grid = affine_grid(rows.reshape(-1, 2, 3), list(x.shape), align_corners=False)
    return grid_sample(x, grid, padding_mode="zeros", align_corners=False)


def to_scale(x: Tensor, low: float, high: float, *, source: Range | None = None) -> Tensor:
    """Map values linearly so that the range ``source`` becomes ``low`` to ``high``.

    Args:
        x: any shape.
        low: what the lower end of ``source`` becomes.
        high: what its upper end becomes.
        source: by default 0 to 255 for uint8, otherwise the smallest and largest value of ``x``.

    >>> to_scale(torch.tensor([0, 51, 255], dtype=torch.uint8), -1.0, 1.0)
    tensor([-1.0000, -0.6000,  1.0000])
    """
    if source is None:
        source = (0.0, 255.0) if x.dtype == torch.uint8 else (float(x.min()), float(x.max()))
    if not source[0] < source[1]:
        raise ValueError(f"the source range {source} is empty: give that of the data as source")
    wide = x if x.is_floating_point() else x.float()
    return low + (wide - source[0]) * ((high - low) / (source[1] - source[0]))


def draw(kind: Callable[..., Tensor], x: Tensor, shape: torch.Size, generator: torch.Generator | int | None) -> Tensor:
    """Draw numbers on the generator's device and move them to that of ``x``; None is torch's global generator."""
    if isinstance(generator, int):
        generator = torch.Generator().manual_seed(generator)
    device = torch.device("cpu") if generator is None else generator.device
    return kind(shape, generator=generator, dtype=x.dtype, device=device).to(x.device)


def _check_batch(x: Tensor) -> None:
    if not x.is_floating_point() or x.ndim < 2 or not x.numel():
        raise ValueError(
            f"expected a floating-point batch (N, ...), got {tuple(x.shape)} {x.dtype}; "
            "to_scale turns uint8 into floats"
        )


def check_images(x: Tensor) -> None:
    """Raise, with a sentence, for anything but a batch of images."""
    _check_batch(x)
    if x.ndim != 4:
        raise ValueError(f"expected images (N, C, H, W), got {tuple(x.shape)}")


def check_scale(x: Tensor, scale: Range) -> None:
    """Raise, with a sentence, for values outside a scale."""
    _check_batch(x)
    low, high = (float(v) for v in x.aminmax())
    # `not (...)` also refuses NaN. The slack is for rounding of normalised inputs.
    slack = 1e-4 * (scale[1] - scale[0])
    if not (scale[0] - slack <= low and high <= scale[1] + slack):
        raise ValueError(
            f"values go from {low:.4g} to {high:.4g}, outside the scale {scale}: "
            "pass the scale of these inputs, or corrupt before normalising"
        )
