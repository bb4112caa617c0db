"""Posteriors of files: tables, texts and images by path, networks by name, predictions row by row.

`load` gives what `bayesify fit --data FILE` saved: a `Fitted`, whose `predict` reads a file of any length in constant
memory. Readers and encodings themselves are in `bayesify.data`.
"""

from __future__ import annotations

from bayesify.files.folders import Fitted, Settings, load, read_settings, save, source_digest
from bayesify.files.networks import MLP, is_named, make_network
from bayesify.files.writing import RowWriter, rows_of

__all__ = [
    "MLP",
    "Fitted",
    "RowWriter",
    "Settings",
    "is_named",
    "load",
    "make_network",
    "read_settings",
    "rows_of",
    "save",
    "source_digest",
]
