"""Save and load posteriors: a small folder, without the network's own weights."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bayesify._files import (
    FileError,
    fingerprint,
    read_json,
    read_tensors,
    write_atomically,
    write_tensors,
)
from bayesify.convert import Conversion, ConversionRow, Selection, build
from bayesify.likelihoods import likelihood_from_dict
from bayesify.methods import method_from_dict
from bayesify.posteriors import Posterior, require_posterior

__all__ = ["FORMAT", "load", "save"]

FORMAT = 1
_TYPES: dict[str, type | tuple[type, ...]] = {
    "method": dict,
    "likelihood": dict,
    "output_key": (str, int, type(None)),
    "default_samples": int,
    "conversion": list,
    "frozen": list,
    "network": dict,
    "fingerprints": dict,
    "tensors": str,
}


def save(posterior: Posterior, path: str | Path) -> None:
    """Save a posterior as a folder: `config.json`, and a safetensors file with what the method added.

    Tensors with the values of one of the user's network's own are not stored: the configuration names it and keeps
    its fingerprint. The new configuration replaces an old one in one step, so that a reader finds either the old
    posterior or the new.

    Args:
        posterior: Any posterior.
        path: A folder; made if it does not exist.
    """
    require_posterior(posterior)
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise FileError(f"{folder} is a file, and a posterior is saved as a folder. Give another path.")
    state = _tensors_of(posterior)
    marks = {name: fingerprint(tensor) for name, tensor in state.items()}
    network = {name: posterior.origin[mark] for name, mark in marks.items() if mark in posterior.origin}
    added = {name: tensor for name, tensor in state.items() if name not in network}
    # The name says which tensors are in it: a file that an older configuration refers to is never overwritten.
    digest = hashlib.sha1(json.dumps([marks, sorted(network)]).encode(), usedforsecurity=False).hexdigest()[:12]
    file = f"posterior-{digest}.safetensors"
    config = {
        "format": FORMAT,
        "method": posterior.method.to_dict(),
        "likelihood": posterior.likelihood.to_dict(),
        "output_key": posterior.output_key,
        "default_samples": posterior.default_samples,
        "conversion": [asdict(row) for row in posterior.conversion.rows] if posterior.conversion else [],
        "frozen": posterior.frozen,
        "network": network,
        "fingerprints": {network[name]: marks[name] for name in network},
        "tensors": file,
    }
    text = json.dumps(config, indent=2)
    write_tensors(folder / file, added)
    write_atomically(folder / "config.json", text.encode())
    for old in folder.glob("posterior-*.safetensors"):
        if old.name != file:
            old.unlink(missing_ok=True)


def load(path: str | Path, network: nn.Module, *, memory_map: bool = False) -> Posterior:
    """Load a posterior onto the network it was made from.

    Args:
        path: The folder that `save` made.
        network: The network, with the weights it had when it was converted; it is left untouched. On another device
            or not, the posterior lands where the network is.
        memory_map: Leave buffers, such as the samples of a large bank, in the file and read what is used. The file
            must then stay; what is written to them is not written to it. On a CPU only.

    Returns:
        The posterior, bit for bit.

    Raises:
        ValueError: The folder is missing, damaged, of a newer version, or of another network; the message says which.
    """
    folder = Path(path)
    config = read_json(folder / "config.json")
    _check_format(config, folder)
    conversion = _read_conversion(config["conversion"], folder)
    _check_modules(conversion.converted, network, folder)
    posterior = build(
        network,
        method_from_dict(config["method"]),
        Selection.exactly(conversion.converted),
        likelihood_from_dict(config["likelihood"]),
        frozen=config["frozen"],
    )
    posterior.conversion = conversion
    posterior.output_key = config["output_key"]
    posterior.default_samples = config["default_samples"]
    tensors, _ = read_tensors(folder / config["tensors"])
    posterior.make_room(tensors)
    state = _tensors_of(posterior)
    _check_names(set(state), {*tensors, *config["network"]}, folder)
    for name, tensor in tensors.items():
        if tensor.shape != state[name].shape:
            raise ValueError(
                f"{folder} holds {_plain(name)!r} with the shape {tuple(tensor.shape)}, and the network given needs "
                f"{tuple(state[name].shape)}: it is another architecture."
            )
    own = _network_tensors(config["fingerprints"], network, folder)
    tensors |= {name: own[source] for name, source in config["network"].items()}
    for name, tensor in state.items():  # what was saved in another precision than the network's keeps it
        tensor.data = tensor.data.to(tensors[name].dtype)
    mapped = {name for name, _ in posterior.named_buffers()} & set(tensors) if memory_map else set()
    for name in mapped:
        if state[name].device.type != "cpu":
            raise ValueError(f"memory_map reads files on a CPU, and the network is on {state[name].device}.")
        state[name].data = tensors[name]  # as the file is read: page by page
    own_memory = {name: tensor for name, tensor in tensors.items() if name not in mapped}
    posterior.load_state_dict({**posterior.state_dict(), **own_memory})
    return posterior


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    # What else `get_extra_state` may give is the network's own, which is not stored.
    return {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}


def _network_tensors(marks: dict[str, str], network: nn.Module, folder: Path) -> dict[str, Tensor]:
    own = _tensors_of(network)
    for name, mark in marks.items():
        if name not in own or fingerprint(own[name]) != mark:
            wrong = "another shape, type or values" if name in own else "no such tensor"
            raise ValueError(
                f"The network given is not the one that {folder} was made from: for {name!r} it has {wrong}. Load "
                "the same pretrained weights into the network first."
            )
    return own


def _check_format(config: dict[str, Any], folder: Path) -> None:
    version = config.get("format")
    if not isinstance(version, int) or not 1 <= version <= FORMAT:
        raise ValueError(
            f"{folder} has format {version!r}, and this bayesify reads formats 1 to {FORMAT}. Upgrade bayesify, or "
            "save the posterior again with this version."
        )
    missing = sorted({*_TYPES} - set(config))
    if missing:
        raise FileError(f"{folder / 'config.json'} lacks {missing}. Save the posterior again.")
    wrong = sorted(key for key, kind in _TYPES.items() if not isinstance(config[key], kind))
    if wrong:
        raise FileError(f"{folder / 'config.json'} has values of the wrong type for {wrong}. Save the posterior again.")


def _read_conversion(rows: list[dict[str, Any]], folder: Path) -> Conversion:
    try:
        return Conversion(tuple(ConversionRow(**row) for row in rows))
    except TypeError as error:
        raise FileError(f"{folder / 'config.json'} has a damaged conversion ({error}). Save it again.") from error


def _check_modules(converted: tuple[str, ...], network: nn.Module, folder: Path) -> None:
    missing = sorted(set(converted) - {name for name, _ in network.named_modules(remove_duplicate=False)})
    if missing:
        raise ValueError(
            f"{folder} was saved from another architecture: it converted {missing[:5]}, which the network given does "
            "not have."
        )


def _check_names(needed: set[str], found: set[str], folder: Path) -> None:
    missing, extra = sorted(needed - found), sorted(found - needed)
    if missing or extra:
        parts = [f"lacks {missing[:5]}"] * bool(missing) + [f"has unknown {extra[:5]}"] * bool(extra)
        raise ValueError(
            f"{folder} {' and '.join(parts)}: it was saved from another architecture, or with other modules converted."
        )


def _plain(name: str) -> str:
    return name.removeprefix("network.")
