"""Names that left the package, and the sentence that says where they went."""

from __future__ import annotations

__all__ = ["MOVED", "missing"]

_READERS = (
    "CIFAR10_CLASSES", "File", "TextSplit", "data_root", "download", "locate", "read_cifar10", "read_cifar10_archive",
    "read_cifar10_file", "read_clinc150", "read_idx", "read_idx_split", "read_sst2", "read_table", "read_uci",
)  # fmt: skip
MOVED = {
    **dict.fromkeys(_READERS, "experiments.data"),
    **dict.fromkeys(("Separation", "anomaly_table", "attack_table", "separation"), "experiments.protocols"),
    **dict.fromkeys(("Verification", "cosine_scores", "verification_accuracy"), "experiments.verification"),
    **dict.fromkeys(("DrawsCurve", "draws_curve"), "experiments.draws"),
    **dict.fromkeys(("components", "plot_components"), "experiments.components"),
}
"""Where each name is now: a module of the source repository, which is not installed with the package."""


def missing(module: str, name: str) -> Exception:
    """Return the error for a name that a module has not, which says where it went if it was there.

    It is an `ImportError` for a name that moved, because `from module import name` shows only that kind's sentence.

    >>> print(missing("a_module", "read_idx"))
    a_module.read_idx left the package: it is experiments.data.read_idx in the source repository.
    """
    if name not in MOVED:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    now = MOVED[name] if MOVED[name].endswith(f".{name}") else f"{MOVED[name]}.{name}"
    return ImportError(f"{module}.{name} left the package: it is {now} in the source repository.")
