"""The UCI regression tables with their published train/test splits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bayesify.data import Split
from experiments.data._io import PathLike, read_arrays

__all__ = ["read_uci"]


def read_uci(path: PathLike, fold: int = 0) -> tuple[Split, Split]:
    """Read the training and test part of one published split of an npz file.

    The file holds ``x (n, d)``, ``y (n,)`` and ``test_idx (splits, n_test)``; the training part is
    what ``test_idx[fold]`` leaves, in the order of the table.

    Returns:
        ``(train, test)`` with inputs ``(N, d)`` and targets ``(N, 1)``, float64.
    """
    x, y, test_idx = read_arrays(path, "x", "y", "test_idx")
    shapes_fit = x.ndim == 2 and y.shape == x.shape[:1] and test_idx.ndim == 2
    if not shapes_fit or test_idx.dtype.kind not in "iu":
        raise ValueError(
            f"{path} holds x {x.shape}, y {y.shape}, test_idx {test_idx.shape} {test_idx.dtype}; "
            "expected (n, d), (n,) and integers (splits, n_test)"
        )
    if not 0 <= fold < len(test_idx):
        raise ValueError(f"{path} has the splits 0..{len(test_idx) - 1}, not {fold}")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError(f"{path} holds values that are not finite: clean the table first")
    test = np.zeros(len(y), dtype=bool)
    chosen = test_idx[fold]
    if chosen.min(initial=0) < 0 or chosen.max(initial=0) >= len(y):
        raise ValueError(f"{path}: split {fold} points outside the {len(y)} rows of the table")
    test[chosen] = True
    if test.sum() != len(chosen) or test.all():
        raise ValueError(f"{path}: split {fold} repeats a row or leaves nothing to train on")
    # The published order of the test part is kept.
    return _split(x[~test], y[~test]), _split(x[chosen], y[chosen])


def _split(x: NDArray[Any], y: NDArray[Any]) -> Split:
    return Split(torch.from_numpy(x.astype(np.float64)), torch.from_numpy(y.astype(np.float64))[:, None])
