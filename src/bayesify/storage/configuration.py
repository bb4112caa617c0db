"""What `config.json` holds: its keys, their types and their digest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bayesify._core.files import FileError, digest
from bayesify._core.values import fits
from bayesify.storage.versions import CONFIG

__all__ = ["FORMAT", "check_config"]

FORMAT = 2
_TYPES: dict[str, Any] = {
    "format": int,
    "method": dict,
    "likelihood": dict,
    "output_key": str | int | None,
    "default_samples": int,
    "conversion": list,
    "frozen": list[str],
    "network": dict[str, str],
    "fingerprints": dict[str, str],
    "tensors": str,
}
_TYPES_2: dict[str, Any] = {
    **_TYPES,
    "rates": dict[str, float],
    "probe": dict | None,
    "previous": str | None,
    "digest": str,
}

_OPTIONAL: dict[str, Any] = {"views": list[str] | None, "notes": dict}  # which older folders of this format do not have


def check_config(config: dict[str, Any], folder: Path) -> bool:
    """Raise where a configuration is not one of ours; return whether its tensors are sealed."""
    path, version = folder / CONFIG, config.get("format")
    if not fits(version, int) or not 1 <= config["format"] <= FORMAT:
        raise FileError(
            f"{folder} has format {version!r}, and this bayesify reads formats 1 to {FORMAT}. Upgrade bayesify, or "
            "save the posterior again with this version."
        )
    types = _TYPES if version == 1 else _TYPES_2
    if missing := sorted(types.keys() - config.keys()):
        raise FileError(f"{path} lacks {missing}. Save the posterior again.")
    types = types if version == 1 else {**types, **_OPTIONAL}
    if unknown := sorted(config.keys() - types.keys()):
        raise FileError(f"{path} has {unknown[:5]}, which format {version} does not know. Save the posterior again.")
    if wrong := sorted(key for key, kind in types.items() if key in config and not fits(config[key], kind)):
        raise FileError(f"{path} has values of the wrong type for {wrong}. Save the posterior again.")
    if version == 1:
        return False
    if digest({key: value for key, value in config.items() if key != "digest"}) != config["digest"]:
        raise FileError(
            f"{path} is not what was saved: it was changed or damaged. Copy it again. Settings of a posterior can be "
            "changed after it is loaded, and saved again."
        )
    return True
