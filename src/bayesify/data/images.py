"""Images of a folder or of a list of files, as the inputs of a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from bayesify.data.encoding import Encoding
from bayesify.data.folder import CHANNELS, read_image
from bayesify.data.labels import Labels
from bayesify.data.records import Records, Remark

__all__ = ["ImageEncoding"]

KEPT = 2**30  # bytes of pixels that a data set holds; the rest is read from the files again in each epoch


@dataclass(frozen=True, eq=False)
class _Picture:
    """A file, and its pixels (C, H, W) as long as there is room for them."""

    path: Path
    pixels: Tensor | None


@dataclass(frozen=True)
class ImageEncoding(Encoding):
    """Read image files, upright and resized without cropping, and normalise them: (pixel / 255 - mean) / std.

    Attributes:
        column: The column with the files' paths.
        root: The folder that relative paths start from.
        size: Height and width.
        mode: "RGB" or "L" (grey).
        mean: Of each channel.
        std: Of each channel.
        labels: How the label column is read.
    """

    kind: ClassVar[str] = "images"

    column: str
    root: Path
    size: tuple[int, int] = (224, 224)
    mode: str = "RGB"
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    labels: Labels | None = None

    def __post_init__(self) -> None:
        """Check that sizes and channels fit."""
        if len(self.size) != 2 or min(self.size) < 1 or self.mode not in CHANNELS:
            raise ValueError(f"Images are read as RGB or L, of a height and a width, not as {self.mode}, {self.size}.")
        if len(self.mean) != CHANNELS[self.mode] or len(self.std) != CHANNELS[self.mode]:
            raise ValueError(f"{self.mode} images need {CHANNELS[self.mode]} means and deviations.")

    def features(self, records: Records) -> tuple[list[Any], dict[int, str], list[Remark]]:
        """Read the files."""
        if self.column not in records.columns and records.rows:
            there = ", ".join(map(repr, records.columns))
            raise ValueError(f"There is no column {self.column!r} with the files of images; there are {there}.")
        found: list[Any] = []
        wrong: dict[int, str] = {}
        for i, name in enumerate(records.columns.get(self.column, [])):
            path = self.root / str(name)
            try:
                found.append(_Picture(path, read_image(path, self.size, self.mode)))
            except ValueError as error:
                found.append(None)
                wrong[i] = str(error)
        return found, wrong, []

    def inputs(self, features: Sequence[_Picture]) -> Tensor:
        """Return images (B, C, H, W)."""
        return self._normalised(torch.stack([self._pixels(picture) for picture in features]))

    def read(self, file: Path | BinaryIO) -> Tensor:
        """Read one image, (1, C, H, W); a ValueError says that it cannot be read."""
        return self._normalised(read_image(file, self.size, self.mode)[None])

    def _pixels(self, picture: _Picture) -> Tensor:
        return read_image(picture.path, self.size, self.mode) if picture.pixels is None else picture.pixels

    def _normalised(self, pixels: Tensor) -> Tensor:
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        return (pixels.float() / 255 - mean) / std

    def kept(self, features: list[_Picture], before: int) -> list[_Picture]:
        """Drop the pixels where there is no room for them."""
        most = KEPT // (self.size[0] * self.size[1] * CHANNELS[self.mode])
        return [p if before + i < most else _Picture(p.path, None) for i, p in enumerate(features)]

    def dataset(self, features: list[list[_Picture]], targets: Tensor) -> Dataset[tuple[Tensor, Tensor]]:
        """Return a data set of (image, target)."""
        return _Images(self, list(chain.from_iterable(features)), targets)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON; the root is the data's, not the encoding's."""
        labels = None if self.labels is None else self.labels.to_dict()
        shape = {"size": list(self.size), "mode": self.mode, "mean": list(self.mean), "std": list(self.std)}
        return {"kind": self.kind, "column": self.column, **shape, "labels": labels}

    @classmethod
    def from_dict(cls, values: dict[str, Any], root: Path) -> ImageEncoding:
        """Return what `to_dict` described, for files below `root`."""
        labels = None if values["labels"] is None else Labels.from_dict(values["labels"])
        height, width = values["size"]
        mean, std = (tuple(map(float, values[name])) for name in ("mean", "std"))
        return cls(str(values["column"]), root, (int(height), int(width)), str(values["mode"]), mean, std, labels)


class _Images(Dataset[tuple[Tensor, Tensor]]):
    """Images with their targets; pixels that were not kept are read from the files."""

    def __init__(self, encoding: ImageEncoding, pictures: list[_Picture], targets: Tensor) -> None:
        self.encoding, self.pictures, self.targets = encoding, pictures, targets
        labels = encoding.labels
        self.classes = None if labels is None else labels.classes

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.encoding.inputs([self.pictures[index]])[0], self.targets[index]
