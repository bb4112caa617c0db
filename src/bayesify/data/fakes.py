"""OOD images made from ordinary ones, for training and testing detectors without a generative model.

Everything random takes a ``generator``: a ``torch.Generator``, a seed, or None for torch's global generator, which a
``DataLoader`` seeds differently in each of its workers.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad
from torch.utils.data import Dataset

from bayesify._core.optional import require
from bayesify.data.ood import Range, check_images, check_scale, draw

__all__ = ["OODImages", "blur", "jpeg", "mix", "noise_in_ball", "shuffle_patches"]

Source = torch.Generator | int | None


def noise_in_ball(x: Tensor, radius: float, *, generator: Source = None, scale: Range = (0.0, 1.0)) -> Tensor:
    """Add uniform noise from the ball |noise|_inf <= radius and clamp: a stand-in for adversarial examples.

    >>> near = noise_in_ball(torch.full((2, 3), 0.5), 0.1, generator=0)
    >>> bool((near - 0.5).abs().max() <= 0.1)
    True
    """
    check_scale(x, scale)
    if not 0 <= radius < math.inf:
        raise ValueError(f"the radius is a distance of at least 0, not {radius}")
    return (x + radius * (2 * draw(torch.rand, x, x.shape, generator) - 1)).clamp(*scale)


def blur(
    x: Tensor,
    sigma: float | Tensor,
    *,
    reach: int | None = None,
    border: Literal["reflect", "replicate"] = "reflect",
) -> Tensor:
    """Blur images with Gaussians of one width in pixels, or of one for each; 0 leaves an image as it is.

    Args:
        x: ``(N, C, H, W)``.
        sigma: one standard deviation, or ``(N,)``.
        reach: how many pixels a kernel goes to each side; three standard deviations, within the image, by default.
        border: what lies outside: the image mirrored at its border pixels, or these repeated.

    >>> bool((blur(torch.eye(5)[None, None], 1.0).amax() < 0.5))
    True
    """
    check_images(x)
    widths = torch.as_tensor(sigma, dtype=x.dtype, device=x.device).expand(len(x))
    if bool((widths < 0).any()):
        raise ValueError("the width of a blur is at least 0")
    if reach is None:
        reach = min(math.ceil(3 * float(widths.max())), min(x.shape[2:]) - 1)
    offsets = torch.arange(-reach, reach + 1, dtype=x.dtype, device=x.device)
    kernels = torch.exp(-0.5 * (offsets / widths[:, None].clamp_min(1e-3)) ** 2)
    kernels = (kernels / kernels.sum(1, keepdim=True)).repeat_interleave(x.shape[1], 0)
    rows = x.flatten(0, 1)[None]
    for weight, sides in (
        (kernels[:, None, :, None], [0, 0, reach, reach]),
        (kernels[:, None, None, :], [reach, reach, 0, 0]),
    ):
        rows = conv2d(pad(rows, sides, mode=border), weight, groups=len(kernels))
    return rows[0].view_as(x)


def jpeg(x: Tensor, quality: int | list[int]) -> Tensor:
    """Compress images and read them again, at one quality or one for each; needs Pillow.

    Args:
        x: ``(N, C, H, W)`` with one or three channels and values from 0 to 1.
        quality: 1 to 100.
    """
    check_images(x)
    check_scale(x, (0.0, 1.0))
    if x.shape[1] not in (1, 3):
        raise ValueError(f"a JPEG file has one channel or three, not {x.shape[1]}")
    image = require("PIL.Image", extra="data", purpose="compressing images")
    numpy = require("numpy", extra="data", purpose="compressing images")
    qualities = [quality] * len(x) if isinstance(quality, int) else quality
    made = []
    for pixels, level in zip(x, qualities, strict=True):
        raw = pixels.mul(255).round().byte().permute(1, 2, 0).cpu().numpy()
        file = io.BytesIO()
        image.fromarray(raw[..., 0] if len(pixels) == 1 else raw).save(file, "JPEG", quality=int(level))
        back = torch.from_numpy(numpy.array(image.open(file))).to(x.device, x.dtype) / 255
        made.append(back.reshape(*raw.shape).permute(2, 0, 1))
    return torch.stack(made)


def shuffle_patches(x: Tensor, size: int, *, generator: Source = None) -> Tensor:
    """Cut each image into squares of ``size`` pixels and put them back in another order, its own for each image.

    >>> x = torch.arange(16.0).view(1, 1, 4, 4)
    >>> shuffle_patches(x, 2, generator=0).flatten().sort().values.equal(x.flatten())
    True
    """
    check_images(x)
    count, channels, height, width = x.shape
    if size < 1 or height % size or width % size:
        raise ValueError(f"patches of {size} pixels do not fill an image of {height} x {width}")
    down, across = height // size, width // size
    patches = x.view(count, channels, down, size, across, size).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    order = draw(torch.rand, x, torch.Size((count, down * across)), generator).argsort(1)
    mixed = patches.gather(1, order.view(count, -1, 1, 1, 1).expand_as(patches))
    return mixed.view(count, down, across, channels, size, size).permute(0, 3, 1, 4, 2, 5).reshape(x.shape)


def mix(x: Tensor, other: Tensor, share: float = 0.5) -> Tensor:
    """Return ``share x + (1 - share) other``: two images in one.

    >>> mix(torch.zeros(1, 2), torch.ones(1, 2), 0.25)
    tensor([[0.7500, 0.7500]])
    """
    if x.shape != other.shape:
        raise ValueError(f"images {tuple(x.shape)} do not mix with images {tuple(other.shape)}")
    return share * x + (1 - share) * other


class OODImages(Dataset[Tensor]):
    """OOD inputs for the training of a posterior that knows them: as long as the training set, and random.

    An item is, half of the time, a training image with noise from a ball; else a fake: one of yours, or a
    training image with its patches shuffled or another image mixed in, then blurred (half of the time, by up to three
    pixels) and compressed (half of the time, at a quality of 30 to 100; where Pillow is installed). Both are shifted
    and mirrored as training images are (BayesAdapter, appendix B). Randomness is torch's global generator's, which a
    ``DataLoader`` seeds for each worker.

    Args:
        images: ``(N, C, H, W)`` with values from 0 to 1.
        radius: Of the ball.
        fakes: A set of them, ``(M, C, H, W)``; or a function that returns one, ``(C, H, W)``; None makes them.
        share: How often a fake is taken.
        shift: The most pixels by which an image is shifted.
        mirror: Whether images are mirrored half of the time.
        transform: What the network's inputs went through at last: normalisation.
        compress: Whether fakes are compressed.

    Example:
        >>> data = OODImages(torch.rand(10, 3, 8, 8), radius=0.03, compress=False)
        >>> len(data), data[0].shape
        (10, torch.Size([3, 8, 8]))
    """

    def __init__(
        self,
        images: Tensor,
        *,
        radius: float = 0.031,
        fakes: Tensor | Callable[[], Tensor] | None = None,
        share: float = 0.5,
        shift: int = 4,
        mirror: bool = True,
        transform: Callable[[Tensor], Tensor] | None = None,
        compress: bool = True,
    ) -> None:
        check_images(images)
        check_scale(images, (0.0, 1.0))
        if not 0 <= share <= 1:
            raise ValueError(f"share is a probability, not {share}")
        self.images = images
        self.radius = radius
        self.fakes = fakes
        self.share = share
        self.shift = shift
        self.mirror = mirror
        self.transform = transform
        self.compress = compress

    def __len__(self) -> int:
        """Return the number of images that items are made from."""
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        """Return one OOD image, another each time."""
        if float(torch.rand(())) < self.share:
            image = self._moved(self._worn(self._fake(index)))
        else:
            image = noise_in_ball(self._moved(self.images[index][None]), self.radius)
        image = image[0]
        return image if self.transform is None else self.transform(image)

    def _fake(self, index: int) -> Tensor:
        if callable(self.fakes):
            return self.fakes()[None]
        if self.fakes is not None:
            return self.fakes[int(torch.randint(len(self.fakes), ()))][None]
        image = self.images[index][None]
        size = _patch(image)
        if size is not None and float(torch.rand(())) < 0.5:
            return shuffle_patches(image, size)
        other = self.images[int(torch.randint(len(self.images), ()))][None]
        return mix(image, other, 0.3 + 0.4 * float(torch.rand(())))

    def _worn(self, image: Tensor) -> Tensor:
        if float(torch.rand(())) < 0.5:
            image = blur(image, 3 * float(torch.rand(())))
        if self.compress and float(torch.rand(())) < 0.5:
            image = jpeg(image.clamp(0, 1), int(torch.randint(30, 101, ())))
        return image.clamp(0, 1)

    def _moved(self, image: Tensor) -> Tensor:
        down, across = (int(torch.randint(2 * self.shift + 1, ())) for _ in range(2))
        height, width = image.shape[2:]
        moved = pad(image, [self.shift] * 4)[..., down : down + height, across : across + width]
        return moved.flip(-1) if self.mirror and float(torch.rand(())) < 0.5 else moved


def _patch(image: Tensor) -> int | None:
    """Return the size of patches that divide an image, about a quarter of it; None if there is none."""
    height, width = image.shape[2:]
    sizes = [s for s in range(2, min(height, width) // 2 + 1) if height % s == 0 and width % s == 0]
    return min(sizes, key=lambda s: abs(s - min(height, width) / 4), default=None)
