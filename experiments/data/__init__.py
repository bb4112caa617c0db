"""Readers of the sets that the experiments use, in the formats in which they lie in the folder BAYESIFY_DATA.

Loading never runs code: nothing is unpickled, and every file of a named set is checked for being whole before it is
used. `load(name, split)` reads a named set, and downloads what has an address.
"""

from __future__ import annotations

from experiments.data.cifar import CIFAR10_CLASSES, read_cifar10, read_cifar10_archive, read_cifar10_file
from experiments.data.files import File, data_root, download, locate
from experiments.data.idx import read_idx, read_idx_split
from experiments.data.sets import SPLITS, load
from experiments.data.text import TextSplit, read_clinc150, read_sst2, read_table
from experiments.data.uci import read_uci

__all__ = [
    "CIFAR10_CLASSES",
    "SPLITS",
    "File",
    "TextSplit",
    "data_root",
    "download",
    "load",
    "locate",
    "read_cifar10",
    "read_cifar10_archive",
    "read_cifar10_file",
    "read_clinc150",
    "read_idx",
    "read_idx_split",
    "read_sst2",
    "read_table",
    "read_uci",
]
