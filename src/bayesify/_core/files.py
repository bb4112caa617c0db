"""Files that are never half-written and never executed: JSON and safetensors, put in place in one step."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "FileError",
    "check_values",
    "digest",
    "fingerprint",
    "open_tensors",
    "pack",
    "parse_json",
    "read_json",
    "read_tensors",
    "remove_temporaries",
    "seal",
    "unpack",
    "write_atomically",
    "write_tensors",
]

_MOST_JSON = 2**26


class FileError(ValueError):
    """A file is missing, damaged, or not what it should be."""


def fingerprint(tensor: Tensor) -> str:
    """Return a short hash of a tensor's type, shape and values: the first 64 bits of their SHA-1.

    It is there against accidents, not against forgers, and costs a reading of the bytes.

    >>> (
    ...     fingerprint(torch.zeros(2)) == fingerprint(torch.zeros(2)),
    ...     fingerprint(torch.zeros(2)) == fingerprint(torch.ones(2)),
    ... )
    (True, False)
    """
    if is_traceable_wrapper_subclass(tensor):  # made of other tensors, as quantised ones are
        names, settings = tensor.__tensor_flatten__()
        return digest([type(tensor).__name__, str(settings), *(fingerprint(getattr(tensor, name)) for name in names)])
    plain = tensor.detach().cpu().contiguous()
    found = hashlib.sha1(f"{plain.dtype}{tuple(plain.shape)}".encode(), usedforsecurity=False)
    if plain.numel():
        found.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]


def digest(values: Any) -> str:
    """Return a short hash of plain values, which does not depend on the order of keys.

    >>> digest({"a": 1, "b": [2.5]}) == digest({"b": [2.5], "a": 1}), digest([1]) == digest([2])
    (True, False)
    """
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:16]


# -- writing ------------------------------------------------------------------------------------------------------


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file under another name, flush it to the disk, and move it into place."""
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        _flush_folder(path.parent.parent)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")  # not tempfile's, which only its owner may read
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


def remove_temporaries(folder: Path, names: str, *, older: float = 3600.0) -> None:
    """Remove what writers that were killed left behind.

    Args:
        folder: Where they wrote.
        names: A regular expression of the whole names of the files that they were writing.
        older: In seconds; what is younger may be somebody's who is writing now. 0 where nobody else can be.
    """
    pattern = re.compile(rf"\.(?:{names})\.[0-9a-f]{{8}}")
    for path in folder.iterdir():
        if pattern.fullmatch(path.name):
            with contextlib.suppress(OSError):  # gone, or another's
                if time.time() - path.stat().st_mtime >= older:
                    path.unlink()


def _flush_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, Any] | None = None,
    *,
    marks: Mapping[str, str] | None = None,
) -> None:
    """Write tensors as safetensors; its header has plain values, a fingerprint of each tensor, and a seal of all.

    Args:
        path: The file, replaced in one step.
        tensors: By name.
        metadata: Plain values.
        marks: The tensors' fingerprints by name, where they are known; None computes them.
    """
    plain = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    marks = {name: fingerprint(tensor) for name, tensor in plain.items()} if marks is None else dict(marks)
    text = json.dumps(dict(metadata or {}))
    # One entry: safetensors writes several in an order of chance.
    sealed = json.dumps({"json": text, "marks": marks, "seal": seal(plain, marks, text)})
    write_atomically(path, save(plain, {"sealed": sealed}))


def seal(tensors: Mapping[str, Tensor], marks: Mapping[str, str], text: str = "{}") -> str:
    """Return a hash of what a file of tensors holds: names, types, shapes, fingerprints and the plain values' text."""
    return digest([[[name, str(t.dtype), list(t.shape), marks[name]] for name, t in sorted(tensors.items())], text])


# -- reading ------------------------------------------------------------------------------------------------------


def read_tensors(path: Path, *, sealed: bool | str = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write_tensors` wrote; or any safetensors file, whose seal is checked if it has one.

    Args:
        path: The file.
        sealed: Whether a file without a seal is refused; text is the seal that it must have.

    Returns:
        The tensors by name, and the plain values.

    Raises:
        FileError: The file is missing, no safetensors file, or not what was written.
    """
    tensors, metadata, marks = open_tensors(path, sealed=sealed)
    check_values(path, tensors, marks)
    return tensors, metadata


def open_tensors(path: Path, *, sealed: bool | str = False) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, str]]:
    """Read a file of tensors and check its header; values stay in the file until they are used, or `check_values`.

    Returns:
        The tensors by name, the plain values, and the tensors' fingerprints, if the file has them.
    """
    if not path.is_file():
        raise FileError(f"There is no file {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            header: dict[str, Any] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a mapping
        header = parse_json(header["sealed"]) if "sealed" in header else header
        text, marks = header.get("json", "{}"), header.get("marks", {})
        metadata = parse_json(text, nan=True)
        if not isinstance(metadata, dict) or not isinstance(marks, dict):
            raise ValueError("the header's values are no objects")
    except Exception as error:
        raise FileError(
            f"{path} is damaged or not a safetensors file ({error}). It was probably cut short by a copy or a full "
            "disk: copy it again, or delete it and run again."
        ) from error
    if sealed or "seal" in header:
        found = seal(tensors, marks, text) if marks.keys() == tensors.keys() else None
        if found != header.get("seal") or found is None or (isinstance(sealed, str) and found != sealed):
            raise FileError(
                f"{path} is not what was written: its header was changed or damaged, or it is another file. "
                "Copy it again, or delete it and run again."
            )
    return tensors, metadata, marks


def check_values(path: Path, tensors: Mapping[str, Tensor], marks: Mapping[str, str]) -> None:
    """Raise a FileError if a tensor of a file does not have the values that were written."""
    for name, mark in marks.items():
        if name in tensors and fingerprint(tensors[name]) != mark:
            raise FileError(
                f"{path} is not what was written: the values of {name!r} were changed or damaged. Copy it again, "
                "or delete it and run again."
            )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    if not path.is_file():
        raise FileError(f"There is no file {path}. A saved posterior is a folder with config.json in it.")
    try:
        if path.stat().st_size > _MOST_JSON:
            raise ValueError(f"it has more than {_MOST_JSON:,} bytes")
        values = parse_json(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise FileError(
            f"{path} is not valid JSON ({error}). Copy it again, or save the posterior again, in another folder."
        ) from error
    if not isinstance(values, dict):
        raise FileError(f"{path} holds a {type(values).__name__} where a JSON object is expected.")
    return values


def parse_json(text: str, *, nan: bool = False) -> Any:
    """Return the values of a JSON text; a ValueError where a key is there twice, or NaN if that is not wanted.

    >>> parse_json('{"a": [1, 2.5, null]}')
    {'a': [1, 2.5, None]}
    """
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=float if nan else _number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a key is there twice, of {sorted(found)[:5]}")
    return found


def _number(text: str) -> float:
    if text == "NaN":
        raise ValueError("NaN is no setting")
    return float(text)


# -- nested structures --------------------------------------------------------------------------------------------


def pack(tree: Any, tensors: dict[str, Tensor], prefix: str) -> Any:
    """Split a nested structure (an optimiser's state) into plain values and tensors.

    Tensors go to `tensors` and leave a reference; dictionaries become lists of pairs, since JSON has text keys only.
    """
    if isinstance(tree, Tensor):
        while prefix in tensors:  # the keys 1 and "1", or "a.b" and b inside a
            prefix += "_"
        tensors[prefix] = tree
        return {"tensor": prefix}
    if isinstance(tree, np.ndarray):
        return {"array": pack(torch.from_numpy(tree.copy()), tensors, prefix)}
    if isinstance(tree, dict):
        for key in tree:
            if not (key is None or isinstance(key, bool | int | float | str)):
                raise TypeError(f"A dictionary key of type {type(key).__name__} cannot be written to a checkpoint.")
        return {"pairs": [[key, pack(value, tensors, f"{prefix}.{key}")] for key, value in tree.items()]}
    if isinstance(tree, tuple | list):
        items = [pack(value, tensors, f"{prefix}.{index}") for index, value in enumerate(tree)]
        return {"tuple": items} if isinstance(tree, tuple) else items
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise TypeError(f"A {type(tree).__name__} cannot be written to a checkpoint.")


def unpack(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """Undo `pack`.

    >>> held = {}
    >>> unpack(pack({0: (1.5, torch.ones(1)), "a": [None]}, held, "state"), held)
    {0: (1.5, tensor([1.])), 'a': [None]}
    """
    if isinstance(tree, list):
        return [unpack(value, tensors) for value in tree]
    if isinstance(tree, dict):
        ((tag, value),) = tree.items()
        if tag == "tensor":
            return tensors[value]
        if tag == "array":
            return unpack(value, tensors).numpy()
        if tag == "pairs":
            return {key: unpack(item, tensors) for key, item in value}
        return tuple(unpack(item, tensors) for item in value)
    return tree
