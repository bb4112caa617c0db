"""Small real images that come with scikit-learn: digits, and patches of photographs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from bayesify._core.optional import require
from bayesify.data.split import Split

__all__ = ["photo_patches", "read_digits"]

SHARES = {"train": 0.6, "val": 0.2, "test": 0.2}
GREY = (0.299, 0.587, 0.114)  # luma of ITU-R BT.601, as Pillow converts
REDUCTIONS = (3, 8)  # patches of 24..64 pixels for size 8
MIN_STD = 0.05  # a third of all patches is plain sky or blur, which shows nothing


def read_digits(split: str = "train", *, seed: int = 0) -> Split:
    """Read scikit-learn's 1797 handwritten digits, 60/20/20 in every class.

    Needs scikit-learn (``bayesify[demo]``); nothing is downloaded.

    Args:
        split: ``"train"``, ``"val"`` or ``"test"``.
        seed: decides which digit is in which part.

    Returns:
        Inputs ``(N, 1, 8, 8)`` float32 in [0, 1] and targets ``(N,)`` int64.

    >>> [len(read_digits(split)) for split in ("train", "val", "test")]
    [1078, 359, 360]
    """
    if split not in SHARES:
        raise ValueError(f"the digits have the splits {list(SHARES)}, not {split!r}")
    datasets = require("sklearn.datasets", extra="demo", purpose="reading the digits")
    pixels, numbers = datasets.load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8) / 16
    labels = torch.from_numpy(numbers).long()
    generator = torch.Generator().manual_seed(seed)
    chosen = []
    for digit in range(10):
        rows = (labels == digit).nonzero()[:, 0]
        rows = rows[torch.randperm(len(rows), generator=generator)]
        first = round(SHARES["train"] * len(rows))
        second = first + round(SHARES["val"] * len(rows))
        parts = {"train": rows[:first], "val": rows[first:second], "test": rows[second:]}
        chosen.append(parts[split])
    return Split(images, labels).part(torch.cat(chosen).sort().values)


def photo_patches(n: int, size: int = 8, *, seed: int = 0) -> Tensor:
    """Cut grey patches from scikit-learn's two photographs: real images that are no digits.

    Square patches of 3 to 8 times the size are cut at random places and reduced by averaging
    areas; patches that are nearly one shade are passed over. Needs scikit-learn and Pillow
    (``bayesify[demo]``).

    Returns:
        ``(n, 1, size, size)`` float32 in [0, 1], the scale of `read_digits`.

    >>> patches = photo_patches(4)
    >>> patches.shape, bool(patches.min() >= 0), bool(patches.max() <= 1)
    (torch.Size([4, 1, 8, 8]), True, True)
    """
    photos = _grey_photos()
    largest = min(min(photo.shape) for photo in photos) // REDUCTIONS[1]
    if n < 0 or not 2 <= size <= largest:
        raise ValueError(f"n is at least 0 and size from 2 to {largest}, not {n} and {size}")
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    patches: list[Tensor] = []
    while len(patches) < n:
        photo = photos[draw(0, len(photos) - 1)]
        factor = draw(*REDUCTIONS)
        side = factor * size
        top, left = draw(0, photo.shape[0] - side), draw(0, photo.shape[1] - side)
        patch = avg_pool2d(photo[None, top : top + side, left : left + side], factor)
        if patch.std() >= MIN_STD:
            patches.append(patch)
    return torch.stack(patches) if patches else torch.zeros(0, 1, size, size)


def _grey_photos() -> list[Tensor]:
    require("PIL.Image", extra="demo", purpose="reading the photographs")
    datasets = require("sklearn.datasets", extra="demo", purpose="reading the photographs")
    images = datasets.load_sample_images().images
    weights = torch.tensor(GREY)
    return [(torch.tensor(image).float() / 255 @ weights).clamp(0, 1) for image in images]
