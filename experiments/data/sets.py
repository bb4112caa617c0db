"""Named data sets with the splits that results are compared on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, overload

import torch

from bayesify.data import Split, read_digits
from experiments.data._io import PathLike, read_arrays
from experiments.data._table import CIFAR10, CIFAR10_ZIPS, CLINC150, IDX, OMNIGLOT, SST2, UCI
from experiments.data.cifar import BATCHES, batch_files, read_cifar10
from experiments.data.files import File, Opener, Progress, data_root, locate
from experiments.data.idx import read_idx_split
from experiments.data.text import CLINC150_PARTS, TextSplit, read_clinc150, read_sst2
from experiments.data.uci import read_uci

__all__ = ["SPLITS", "load"]

Find = Callable[[File], Path]
TensorName = Literal[
    "mnist",
    "fashion-mnist",
    "notmnist",
    "omniglot",
    "cifar10",
    "digits",
    "uci/bostonHousing",
    "uci/energy",
    "uci/wine-quality-red",
    "uci/yacht",
    "uci/power-plant",
    "uci/naval-propulsion-plant",
    "uci/protein-tertiary-structure",
]
TextName = Literal["sst2", "clinc150"]

VAL_MNIST = 10_000  # the last training images
CIFAR10_BATCH = 10_000
VAL_CIFAR10 = 2_000  # the first test images: the public networks saw all training images

SPLITS: dict[str, tuple[str, ...]] = {
    "mnist": ("train", "val", "test"),
    "fashion-mnist": ("train", "val", "test"),
    "notmnist": ("test",),
    "omniglot": ("test",),
    "cifar10": ("train", "val", "test", "all-test"),
    "digits": ("train", "val", "test"),
    **{f"uci/{name}": ("train", "test") for name in UCI},
    "sst2": ("train", "val", "test"),
    "clinc150": tuple(part.replace("_", "-") for part in CLINC150_PARTS),
}
"""The splits of each named set."""


@overload
def load(
    name: TensorName,
    split: str = ...,
    *,
    root: PathLike | None = ...,
    fold: int | None = ...,
    opener: Opener | None = ...,
    progress: Progress | None = ...,
) -> Split: ...
@overload
def load(
    name: TextName,
    split: str = ...,
    *,
    root: PathLike | None = ...,
    fold: int | None = ...,
    opener: Opener | None = ...,
    progress: Progress | None = ...,
) -> TextSplit: ...
@overload
def load(
    name: str,
    split: str = ...,
    *,
    root: PathLike | None = ...,
    fold: int | None = ...,
    opener: Opener | None = ...,
    progress: Progress | None = ...,
) -> Split | TextSplit: ...
def load(
    name: str,
    split: str = "train",
    *,
    root: PathLike | None = None,
    fold: int | None = None,
    opener: Opener | None = None,
    progress: Progress | None = None,
) -> Split | TextSplit:
    """Load one split of a named set, downloading what is missing where that is possible.

    Every file is compared with its known checksum before it is read (unpacked ``*.bin`` files of
    CIFAR-10, which have none, with their number of images).

    Args:
        name: a key of `SPLITS`.
        split: one of ``SPLITS[name]``. MNIST and FashionMNIST: ``val`` is the last 10,000 training
            images. CIFAR-10: ``val`` is the first 2,000 test images, ``test`` the last 8,000,
            ``all-test`` all of them. CLINC150: ``oos-*`` are the out-of-scope texts, label -1.
        root: folder of the data, by default BAYESIFY_DATA, else ~/.cache/bayesify.
        fold: which of the published splits of a UCI set, by default 0.
        opener: opens a URL for reading.
        progress: called with the bytes so far and the total (or None) during a download.

    Returns:
        Images as float32 ``(N, C, H, W)`` in [0, 1] with int64 targets ``(N,)``; tables as float32
        ``(N, d)`` with targets ``(N, 1)``, not standardised; texts as a `TextSplit`.

    >>> load("digits", "test").inputs.shape
    torch.Size([360, 1, 8, 8])
    """
    if name not in SPLITS:
        raise ValueError(f"there is no set {name!r}; the sets are {', '.join(SPLITS)}")
    if split not in SPLITS[name]:
        hint = "; cut one off the training part with hold_out" if split == "val" else ""
        raise ValueError(f"{name} has the splits {list(SPLITS[name])}, not {split!r}{hint}")
    if fold is not None and not name.startswith("uci/"):
        raise ValueError(f"{name} has one fixed split: fold is for the UCI sets only")

    def find(file: File) -> Path:
        return locate(file, root, opener=opener, progress=progress)

    if name == "sst2":
        return read_sst2(find(SST2[split]))
    if name == "clinc150":
        return read_clinc150(find(CLINC150), split.replace("-", "_"))
    if name == "digits":
        return read_digits(split)
    if name == "omniglot":
        return _omniglot(find)
    if name == "cifar10":
        return _cifar10(split, data_root(root) / "cifar10", find)
    if name.startswith("uci/"):
        parts = dict(zip(("train", "test"), read_uci(find(UCI[name[4:]]), fold or 0), strict=True))
        return Split(parts[split].inputs.float(), parts[split].targets.float())
    return _idx(name, split, find)


def _idx(name: str, split: str, find: Find) -> Split:
    images, labels = IDX[name, "test" if split == "test" else "train"]
    whole = read_idx_split(find(images), find(labels))
    parts = {"train": slice(-VAL_MNIST), "val": slice(-VAL_MNIST, None), "test": slice(None)}
    return _unit(whole.part(parts[split]))


def _cifar10(split: str, folder: Path, find: Find) -> Split:
    part = "train" if split == "train" else "test"
    if batch_files(folder, part, ".zip"):
        for batch in BATCHES[part]:
            find(CIFAR10_ZIPS[batch])
    elif not batch_files(folder, part, ".bin"):
        find(CIFAR10)
    whole = read_cifar10(folder, part)
    # Unpacked *.bin files have no published checksum, and could end early between two images.
    if len(whole) != len(BATCHES[part]) * CIFAR10_BATCH:
        raise ValueError(
            f"{folder} holds {len(whole)} images of the {part} part instead of "
            f"{len(BATCHES[part]) * CIFAR10_BATCH}: a file is incomplete, fetch it again"
        )
    parts = {"val": slice(VAL_CIFAR10), "test": slice(VAL_CIFAR10, None)}
    return _unit(whole.part(parts.get(split, slice(None))))


def _omniglot(find: Find) -> Split:
    x, y = read_arrays(find(OMNIGLOT), "x", "y")
    return _unit(Split(torch.from_numpy(x)[:, None], torch.from_numpy(y).long()))


def _unit(split: Split) -> Split:
    return Split(split.inputs.float().div_(255), split.targets)
