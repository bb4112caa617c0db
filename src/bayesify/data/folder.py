"""A folder of images, one sub-folder per class."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from bayesify._core.optional import require

__all__ = ["CHANNELS", "SUFFIXES", "ImageFolder", "read_image"]

# A closed list, because some of Pillow's other formats start external programs.
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "TIFF")
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
CHANNELS = {"RGB": 3, "L": 1}


def read_image(path: Path | BinaryIO, size: Sequence[int], mode: str) -> Tensor:
    """Read an image, upright (EXIF) and resized to (height, width), as uint8 (C, H, W).

    Raises:
        ValueError: It cannot be read as an image.
    """
    image, ops = (require(f"PIL.{name}", extra="data", purpose="reading images") for name in ("Image", "ImageOps"))
    height, width = size
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", image.DecompressionBombWarning)
            # The content decides, not the name: a JPEG called .png is common.
            with image.open(path, formats=FORMATS) as file:
                upright = ops.exif_transpose(file).convert(mode)
        resized = upright.resize((width, height), image.Resampling.BILINEAR)
    except (OSError, ValueError, SyntaxError, Warning) as error:
        raise ValueError(f"{path} cannot be read as an image: {error}") from error
    pixels = np.array(resized, dtype=np.uint8).reshape(height, width, CHANNELS[mode])
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Read the images of ``root/<class>/**`` when they are asked for.

    The sorted names of the sub-folders are the classes. Each image is turned upright (EXIF),
    resized to one size without cropping, and scaled to [0, 1].

    Items are ``(image, label)`` with the image ``(C, H, W)`` float32. Pillow is needed
    (``bayesify[data]``).

    Args:
        root: the folder that holds one sub-folder per class.
        size: the height and width of every tensor, or one number for both.
        mode: ``"RGB"`` or ``"L"`` (grey).
    """

    def __init__(self, root: str | Path, size: int | tuple[int, int], *, mode: str = "RGB") -> None:
        """List the files, without reading one."""
        self.root = Path(root)
        self.size = (size, size) if isinstance(size, int) else (*size,)
        if len(self.size) != 2 or min(self.size) < 1:
            raise ValueError(f"size is a height and a width of at least 1, not {size}")
        if mode not in CHANNELS:
            raise ValueError(f"mode is one of {list(CHANNELS)}, not {mode!r}")
        self.mode = mode
        if not self.root.is_dir():
            raise FileNotFoundError(f"there is no folder {self.root}")
        folders = sorted(p for p in self.root.iterdir() if p.is_dir() and p.name[0] != ".")
        self.classes = tuple(folder.name for folder in folders)
        if not folders:
            raise ValueError(f"{self.root} has no sub-folders; expected one for each class")
        self.files: list[Path] = []
        self.labels: list[int] = []
        for label, folder in enumerate(folders):
            files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES)
            if not files:
                raise ValueError(f"{folder} has no image (*{', *'.join(SUFFIXES)})")
            self.files += files
            self.labels += [label] * len(files)
        require("PIL.Image", extra="data", purpose="reading images")

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Read one image."""
        return self._read(self.files[index]), self.labels[index]

    def _read(self, path: Path) -> Tensor:
        return read_image(path, self.size, self.mode).float() / 255
