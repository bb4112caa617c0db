"""Data of the command line: named sets and users' functions, as loaders."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, Dataset

from bayesify.cli._network import find_object
from bayesify.cli._output import JobError, UsageError
from bayesify.data import SPLITS, Split
from bayesify.data import load as load_named

__all__ = [
    "check_name",
    "class_names",
    "images_of",
    "load_split",
    "make_loader",
    "match_images",
    "normalised",
    "ood_sets",
]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
GREY = (0.299, 0.587, 0.114)  # luma of ITU-R BT.601


def load_split(spec: str, split: str, *, normalise: str = "none", option: str = "--data") -> Dataset[Any] | None:
    """Load one split of a named set or of a user's function; None where there is no 'val' split.

    >>> len(load_split("digits", "test"))
    360
    """
    if ":" in spec:
        return _of_function(spec, split, option)
    named = _named(spec, split, option)
    if named is None or normalise == "none" or named.inputs.ndim != 4:
        return named
    return Split(normalised(named.inputs), named.targets)


def ood_sets(specs: Sequence[str], like: Dataset[Any], *, normalise: str) -> dict[str, Dataset[Any]]:
    """Load OOD data by name; images of named sets get the channels and the size of those of `like`."""
    sets: dict[str, Dataset[Any]] = {}
    for spec in specs:
        found: Dataset[Any] | None
        if ":" in spec:
            found = _of_function(spec, "test", "--ood")
        else:
            named = _named(spec, "test", "--ood")
            assert named is not None  # every set has a test split
            sample = like[0][0] if isinstance(like[0], list | tuple) else like[0]
            images = named.inputs
            if images.ndim == 4 and isinstance(sample, Tensor) and sample.ndim == 3:
                images = match_images(images, sample.shape)
                images = normalised(images) if normalise == "imagenet" else images
            found = Split(images, named.targets)
        if found is None:
            raise JobError(f"--ood {spec} gave nothing for split='test'.")
        sets[spec] = found
    return sets


def make_loader(dataset: Dataset[Any], batch_size: int, *, shuffle: bool = False) -> DataLoader[Any]:
    """Make a loader; `fit` seeds the order."""
    if isinstance(dataset, Sized) and len(dataset) == 0:
        raise JobError("The data set is empty.")
    collate = getattr(dataset, "collate", None)  # of texts, which are padded
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle, collate_fn=collate)


def match_images(images: Tensor, shape: Sequence[int]) -> Tensor:
    """Give images (N, C, H, W) another number of channels and another size.

    Grey becomes equal red, green and blue; colours become their luma; sizes change bilinearly, with anti-aliasing.

    >>> match_images(torch.ones(2, 1, 28, 28), (3, 32, 32)).shape
    torch.Size([2, 3, 32, 32])
    """
    channels, height, width = shape
    if images.shape[1] == 1 and channels > 1:
        images = images.expand(-1, channels, -1, -1)
    elif images.shape[1] == 3 and channels == 1:
        images = torch.einsum("nchw,c->nhw", images, images.new_tensor(GREY))[:, None]
    elif images.shape[1] != channels:
        raise JobError(f"Images with {images.shape[1]} channels cannot become images with {channels}.")
    if images.shape[2:] != (height, width):
        images = interpolate(images, (height, width), mode="bilinear", antialias=True).clamp(0, 1)
    return images.contiguous()


def normalised(images: Tensor) -> Tensor:
    """Remove ImageNet's mean and standard deviation from images (N, 3, H, W) in [0, 1]."""
    if images.shape[1] != 3:
        raise UsageError(f"--normalise imagenet needs three colours, but the images have {images.shape[1]} channel(s)")
    mean, std = images.new_tensor(IMAGENET_MEAN), images.new_tensor(IMAGENET_STD)
    return (images - mean[:, None, None]) / std[:, None, None]


def images_of(dataset: Dataset[Any], *, most: int = 20_000) -> Tensor | None:
    """Return the inputs as images in [0, 1] for the report, (N, C, H, W), or None where they are none."""
    if not isinstance(dataset, Sized) or len(dataset) > most:
        return None
    first = dataset[0][0] if isinstance(dataset[0], list | tuple) else dataset[0]
    if not (isinstance(first, Tensor) and first.ndim == 3 and first.shape[0] in (1, 3)):
        return None
    inputs = dataset.inputs if isinstance(dataset, Split) else torch.stack([dataset[i][0] for i in range(len(dataset))])
    low, high = inputs.amin((0, 2, 3), keepdim=True), inputs.amax((0, 2, 3), keepdim=True)
    return ((inputs - low) / (high - low).clamp_min(1e-12)).float()


def class_names(dataset: object) -> list[str] | None:
    """Return the names of the classes where a data set has them: its `classes`, as in torchvision."""
    names = getattr(dataset, "classes", None)
    return None if names is None else [str(name) for name in names]


def check_name(name: str, option: str = "--data") -> None:
    """Refuse what is neither a set by name nor a function."""
    if name in SPLITS and Path(name).exists():
        print(f"{option} {name} is the set of this name; write ./{name} for the file or folder.", file=sys.stderr)
    if ":" not in name and name not in SPLITS:
        raise UsageError(
            f"{option}: there is no set {name!r}; the sets are {', '.join(SPLITS)}. Your own data are given as a path "
            "(there is none of this name), or as package.module:function"
        )


def _named(name: str, split: str, option: str) -> Split | None:
    check_name(name, option)
    return load_named(name, split)


def _of_function(spec: str, split: str, option: str) -> Dataset[Any] | None:
    function = find_object(spec, option)
    try:
        inspect.signature(function).bind(split=split)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{option}: {spec} must be a function with an argument `split`") from error
    try:
        found = function(split=split)
    except Exception as error:
        raise JobError(f"{spec}(split={split!r}) failed: {type(error).__name__}: {error}") from error
    if found is None and split == "val":
        return None
    if not hasattr(found, "__getitem__") or not isinstance(found, Sized):
        raise JobError(
            f"{spec}(split={split!r}) returned a {type(found).__name__}; a torch Dataset with a length is needed."
        )
    return found  # type: ignore[return-value]
