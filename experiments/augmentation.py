"""Augmentations that the pretrained networks have not seen, for members that are trained on.

`cutout` hides a square (DeVries and Taylor 2017). `augmix` mixes an image with chains of operations (Hendrycks et al.
2020): the paper's, which leave out what the corruptions of CIFAR-10-C and of the scoreboard do (noise, blur, contrast,
brightness, compression). Random numbers are torch's, so that a run that was killed goes on with the same images.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

__all__ = ["augmix", "cutout"]

Operation = Callable[[Image.Image, float], Image.Image]


def cutout(image: Tensor, size: int) -> Tensor:
    """Return a copy of (C, H, W) with a square of this size, centred anywhere, at zero (the mean colour).

    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <torch._C.Generator object at ...>
    >>> int((cutout(torch.ones(1, 8, 8), 4) == 0).sum()) <= 16
    True
    """
    height, width = image.shape[-2:]
    top, left = int(torch.randint(height, ())) - size // 2, int(torch.randint(width, ())) - size // 2
    hidden = image.clone()
    hidden[..., max(top, 0) : max(top + size, 0), max(left, 0) : max(left + size, 0)] = 0
    return hidden


def augmix(image: Image.Image, *, severity: float = 0.3, width: int = 3) -> Tensor:
    """Return an image (3, H, W) from 0 to 1, mixed with `width` chains of one to three operations.

    x' = m x + (1 - m) sum_k w_k chain_k(x), w ~ Dirichlet(1), m ~ Beta(1, 1).

    Args:
        image: In colours.
        severity: Of the operations, up to 1.
        width: How many chains.
    """
    weights = -torch.rand(width).clamp_min(1e-12).log()
    weights /= weights.sum()
    share = float(torch.rand(()))
    mixed = share * _array(image)
    for weight in weights.tolist():
        chained = image
        for _ in range(int(torch.randint(1, 4, ()))):
            operation = _OPERATIONS[int(torch.randint(len(_OPERATIONS), ()))]
            chained = operation(chained, severity * (0.1 + 0.9 * float(torch.rand(()))))
        mixed = mixed + (1 - share) * weight * _array(chained)
    return torch.from_numpy(mixed.transpose(2, 0, 1).copy())


def _array(image: Image.Image) -> np.ndarray:
    return np.asarray(image, dtype=np.float32) / 255


def _signed(level: float) -> float:
    return level if torch.rand(()) < 0.5 else -level


def _affine(image: Image.Image, values: tuple[float, ...]) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, values, resample=Image.Resampling.BILINEAR)


_OPERATIONS: tuple[Operation, ...] = (
    lambda image, _: ImageOps.autocontrast(image),
    lambda image, _: ImageOps.equalize(image),
    lambda image, level: ImageOps.posterize(image, max(1, round(8 - 4 * level))),
    lambda image, level: ImageOps.solarize(image, round(256 * (1 - level))),
    lambda image, level: image.rotate(_signed(30 * level), resample=Image.Resampling.BILINEAR),
    lambda image, level: _affine(image, (1, _signed(0.3 * level), 0, 0, 1, 0)),
    lambda image, level: _affine(image, (1, 0, 0, _signed(0.3 * level), 1, 0)),
    lambda image, level: _affine(image, (1, 0, _signed(level * image.size[0] / 3), 0, 1, 0)),
    lambda image, level: _affine(image, (1, 0, 0, 0, 1, _signed(level * image.size[1] / 3))),
)
