"""A folder in which a whole version of a posterior is always present.

`config.json` is replaced in one step and names the file of tensors that belongs to it, whose name says what is in it.
The file that the version before named is kept, for who is reading it; older ones are removed. Savers wait for each
other, readers for nobody.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from bayesify._core.files import (
    FileError,
    digest,
    open_tensors,
    read_json,
    remove_temporaries,
    seal,
    write_atomically,
    write_tensors,
)

__all__ = ["CONFIG", "read_version", "write_version"]

CONFIG = "config.json"
_TENSORS = r"posterior-([0-9a-f]{12}|[0-9a-f]{16})\.safetensors"
_ATTEMPTS = 100
_STALE = 3600.0  # seconds after which what a saver left is nobody's, where savers cannot wait for each other

Marks = Mapping[str, str]


# -- writing ------------------------------------------------------------------------------------------------------


def write_version(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], marks: Marks) -> None:
    """Put a new version in place of the one there is, if any.

    Args:
        folder: Made if it does not exist.
        config: All but the keys "tensors", "previous" and "digest", which are added.
        tensors: By name.
        marks: Their fingerprints.

    Raises:
        FileError: The folder has a `config.json` that is not a posterior's.
    """
    if folder.exists() and not folder.is_dir():
        raise FileError(f"{folder} is a file, and a posterior is saved as a folder. Give another path.")
    file = f"posterior-{seal(tensors, marks)}.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder) as alone:
        replaced = _own(folder)
        full = {**config, "tensors": file, "previous": _name(replaced, "tensors")}
        write_tensors(folder / file, tensors, marks=marks)
        text = json.dumps({**full, "digest": digest(full)}, indent=2)
        write_atomically(folder / CONFIG, text.encode())
        _clean(folder, {file, full["previous"]}, {_name(replaced, "tensors"), _name(replaced, "previous")}, alone)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Wait for other savers; yield whether that is possible here. The system ends the locks of processes that end."""
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):  # Windows
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            alone = True
        except OSError:  # some network file systems
            alone = False
        yield alone
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for a process that was forked meanwhile
        os.close(descriptor)


def _own(folder: Path) -> dict[str, Any]:
    """Return the configuration that is there; raise where it is somebody else's."""
    path = folder / CONFIG
    if not path.exists() and not path.is_symlink():
        return {}
    try:
        found = read_json(path)
    except FileError:
        found = {}
    if not {"format", "method", "tensors"} <= found.keys():
        raise FileError(
            f"{path} is damaged, or not a posterior's (a pretrained model's?): it is left as it is, and nothing was "
            "saved. Give another folder, or move that file away."
        )
    return found


def _name(config: Mapping[str, Any], key: str) -> str | None:
    """Return a file of tensors that a configuration names, if it can be one of ours."""
    found = config.get(key)
    return found if isinstance(found, str) and re.fullmatch(_TENSORS, found) else None


def _clean(folder: Path, kept: set[str | None], named: set[str | None], alone: bool) -> None:
    """Remove the version before the previous one, and what savers that were killed left."""
    remove_temporaries(folder, rf"{re.escape(CONFIG)}|{_TENSORS}", older=0 if alone else _STALE)
    for path in folder.iterdir():
        if path.name in kept or not re.fullmatch(_TENSORS, path.name):
            continue
        with contextlib.suppress(OSError):  # gone, or open on a system that keeps open files
            if path.name in named or (_is_sealed(path) and (alone or time.time() - path.stat().st_mtime > _STALE)):
                path.unlink()


def _is_sealed(path: Path) -> bool:
    """Whether a file was written by `write_version`, of which nobody else's has the name that its content gives."""
    try:
        open_tensors(path, sealed=path.name.removeprefix("posterior-").removesuffix(".safetensors"))
    except FileError:
        return False
    return True


# -- reading ------------------------------------------------------------------------------------------------------


def read_version(
    folder: Path, check: Callable[[dict[str, Any]], bool]
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, str], Path]:
    """Read a configuration and open the tensors that belong to it, whoever saves meanwhile.

    Args:
        folder: The folder.
        check: Raises where a configuration is not what it should be; returns whether its tensors must be sealed.

    Returns:
        The configuration, the tensors, whose values are not checked yet, their fingerprints, and their file.
    """
    for attempt in range(_ATTEMPTS):
        config = read_json(folder / CONFIG)
        sealed = check(config)
        path = _confined(folder, config["tensors"])
        try:
            tensors, _, marks = open_tensors(path, sealed=_seal_of(config) if sealed else False)
        except FileError:
            # Two versions were saved between the two readings, so that this one is gone.
            if attempt + 1 == _ATTEMPTS or read_json(folder / CONFIG) == config:
                raise
            continue
        return config, tensors, marks, path
    raise AssertionError


def _seal_of(config: Mapping[str, Any]) -> str:
    found = re.fullmatch(_TENSORS, config["tensors"])
    return found[1] if found else "none"


def _confined(folder: Path, name: str) -> Path:
    """Return the path of a file in the folder, or beside what `config.json` is a link to (a cache of downloads)."""
    path = folder / name
    try:
        plain = name not in ("", ".", "..") and Path(name).name == name and "\\" not in name
        homes = {folder.resolve(), (folder / CONFIG).resolve().parent}
        inside = plain and path.resolve().parent in homes
    except (OSError, ValueError, RuntimeError):  # a NUL in it, a link to itself
        inside = False
    if not inside:
        raise FileError(
            f"{folder / CONFIG} names the tensors {name!r}, which is not a file in its folder. Copy or save the "
            "posterior again."
        )
    return path
