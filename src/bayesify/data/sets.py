"""Sets by name."""

from __future__ import annotations

from bayesify.data.digits import read_digits
from bayesify.data.split import Split

__all__ = ["SPLITS", "load"]

SPLITS: dict[str, tuple[str, ...]] = {"digits": ("train", "val", "test")}
"""The splits of each named set."""


def load(name: str, split: str = "train") -> Split:
    """Load one split of a named set: scikit-learn's digits, which need no download.

    Args:
        name: A key of `SPLITS`.
        split: One of `SPLITS[name]`.

    Returns:
        Images as float32 (N, C, H, W) in [0, 1] with int64 targets (N,).

    >>> load("digits", "test").inputs.shape
    torch.Size([360, 1, 8, 8])
    """
    if name not in SPLITS:
        raise ValueError(
            f"There is no set {name!r}; the sets are {', '.join(SPLITS)}. Give your own data as a torch Dataset. The "
            "readers of MNIST, CIFAR-10 and others are in experiments/data of the source repository."
        )
    return read_digits(split)
