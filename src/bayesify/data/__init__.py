"""Readers of files, small sets to try things on, and inputs that are OOD by construction.

Loading never runs code: nothing is unpickled.
"""

from __future__ import annotations

from typing import Any

from bayesify._core.deprecation import moved_names
from bayesify._moved import missing
from bayesify.data.corruptions import CORRUPTIONS, corrupt
from bayesify.data.digits import photo_patches, read_digits
from bayesify.data.encoding import Batch, Encoding, load_records, stream
from bayesify.data.fakes import OODImages, blur, jpeg, mix, noise_in_ball, shuffle_patches
from bayesify.data.folder import ImageFolder
from bayesify.data.images import ImageEncoding
from bayesify.data.labels import Labels
from bayesify.data.ood import (
    gaussian_like,
    gaussian_noise,
    rotate,
    salt_and_pepper,
    to_scale,
    uniform_like,
)
from bayesify.data.parts import Parts
from bayesify.data.records import Records, Remark, read_records, read_stream
from bayesify.data.scales import Scale, Standardised, standardise
from bayesify.data.sets import SPLITS, load
from bayesify.data.split import Split, hold_out
from bayesify.data.tables import Category, Number, TableEncoding
from bayesify.data.text import TextEncoding

__all__ = [
    "CORRUPTIONS",
    "SPLITS",
    "Batch",
    "Category",
    "Encoding",
    "ImageEncoding",
    "ImageFolder",
    "Labels",
    "Number",
    "OODImages",
    "Parts",
    "Records",
    "Remark",
    "Scale",
    "Split",
    "Standardised",
    "TableEncoding",
    "TextEncoding",
    "blur",
    "corrupt",
    "gaussian_like",
    "gaussian_noise",
    "hold_out",
    "jpeg",
    "load",
    "load_records",
    "mix",
    "noise_in_ball",
    "photo_patches",
    "read_digits",
    "read_records",
    "read_stream",
    "rotate",
    "salt_and_pepper",
    "shuffle_patches",
    "standardise",
    "stream",
    "to_scale",
    "uniform_like",
]


_OLD = {"ForeignImages": "bayesify.data.OODImages"}
_old_name = moved_names(__name__, _OLD, stacklevel=4)


def __getattr__(name: str) -> Any:
    """Find old names, and say where one went that is no longer here."""
    if name in _OLD:
        return _old_name(name)
    raise missing(__name__, name)
