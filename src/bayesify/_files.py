"""Files that are never half-written and never executed: JSON and safetensors, put in place in one step."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

__all__ = [
    "FileError",
    "fingerprint",
    "pack",
    "read_json",
    "read_tensors",
    "unpack",
    "write_atomically",
    "write_tensors",
]


class FileError(ValueError):
    """A file is missing, damaged, or not what it should be."""


def fingerprint(tensor: Tensor) -> str:
    """Return a short hash of a tensor's type, shape and values.

    >>> (
    ...     fingerprint(torch.zeros(2)) == fingerprint(torch.zeros(2)),
    ...     fingerprint(torch.zeros(2)) == fingerprint(torch.ones(2)),
    ... )
    (True, False)
    """
    plain = tensor.detach().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8)
    head = f"{plain.dtype}{tuple(plain.shape)}".encode()
    return hashlib.sha1(head + data.tobytes(), usedforsecurity=False).hexdigest()[:16]


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file under another name, flush it to the disk, and move it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
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


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any] | None = None) -> None:
    """Write tensors as safetensors, with plain values in its header."""
    plain = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    write_atomically(path, save(plain, {"json": json.dumps(metadata or {})}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write_tensors` wrote."""
    if not path.is_file():
        raise FileError(f"There is no file {path}.")
    try:
        tensors = load_file(path)
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {}).get("json", "{}"))
    except (SafetensorError, ValueError, OSError) as error:
        raise FileError(
            f"{path} is damaged or not a safetensors file ({error}). It was probably cut short by a copy or a full "
            "disk: copy it again, or delete it and run again."
        ) from error
    return tensors, metadata


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    if not path.is_file():
        raise FileError(f"There is no file {path}. A saved posterior is a folder with config.json in it.")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FileError(f"{path} is not valid JSON ({error}). Copy it again, or save the posterior again.") from error
    if not isinstance(values, dict):
        raise FileError(f"{path} holds a {type(values).__name__} where a JSON object is expected.")
    return values


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
