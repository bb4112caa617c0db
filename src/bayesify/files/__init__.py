"""Posteriors of files: tables, texts and images by path, networks by name, predictions row by row.

`load` gives what `bayesify fit --data FILE` saved: a `Fitted`, whose `predict` reads a file of any length in constant
memory; `load_guard` gives what `bayesify guard` saved. Readers and encodings themselves are in `bayesify.data`.
"""

from __future__ import annotations

from bayesify.files.folders import Fitted, Settings, load, read_settings, save, source_digest
from bayesify.files.guarded import Guarded, load_guard, save_guard
from bayesify.files.networks import MLP, is_named, make_network
from bayesify.files.writing import RowWriter, rows_of

__all__ = [
    "MLP",
    "Fitted",
    "Guarded",
    "RowWriter",
    "Settings",
    "is_named",
    "load",
    "load_guard",
    "make_network",
    "read_settings",
    "rows_of",
    "save",
    "save_guard",
    "source_digest",
]
