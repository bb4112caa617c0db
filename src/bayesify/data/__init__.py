"""Readers for standard formats, named sets, and inputs that are OOD by construction.

Loading never runs code: nothing is unpickled, and every file of a named set is checked for
being whole before it is used.
"""

from __future__ import annotations

from bayesify._core.deprecation import moved_names
from bayesify.data.cifar import (
    CIFAR10_CLASSES,
    read_cifar10,
    read_cifar10_archive,
    read_cifar10_file,
)
from bayesify.data.digits import photo_patches, read_digits
from bayesify.data.fakes import OODImages, blur, jpeg, mix, noise_in_ball, shuffle_patches
from bayesify.data.files import File, data_root, download, locate
from bayesify.data.folder import ImageFolder
from bayesify.data.idx import read_idx, read_idx_split
from bayesify.data.ood import (
    gaussian_like,
    gaussian_noise,
    rotate,
    salt_and_pepper,
    to_scale,
    uniform_like,
)
from bayesify.data.sets import SPLITS, load
from bayesify.data.split import Split, TextSplit, hold_out
from bayesify.data.text import read_clinc150, read_sst2, read_table
from bayesify.data.uci import Scale, Standardised, read_uci, standardise

__all__ = [
    "CIFAR10_CLASSES",
    "SPLITS",
    "File",
    "ImageFolder",
    "OODImages",
    "Scale",
    "Split",
    "Standardised",
    "TextSplit",
    "blur",
    "data_root",
    "download",
    "gaussian_like",
    "gaussian_noise",
    "hold_out",
    "jpeg",
    "load",
    "locate",
    "mix",
    "noise_in_ball",
    "photo_patches",
    "read_cifar10",
    "read_cifar10_archive",
    "read_cifar10_file",
    "read_clinc150",
    "read_digits",
    "read_idx",
    "read_idx_split",
    "read_sst2",
    "read_table",
    "read_uci",
    "rotate",
    "salt_and_pepper",
    "shuffle_patches",
    "standardise",
    "to_scale",
    "uniform_like",
]

__getattr__ = moved_names(__name__, {"ForeignImages": "bayesify.data.OODImages"})
