"""Tensors of a posterior: their names in files, and whether those of a file can be its own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayesify._core.files import FileError, fingerprint
from bayesify.laws import Posterior
from bayesify.likelihoods import Likelihood
from bayesify.storage.versions import CONFIG

__all__ = [
    "LEFT",
    "check_likelihood",
    "check_names",
    "check_shapes",
    "file_name",
    "kept",
    "modernised",
    "network_tensors",
    "tensors_of",
]

# What only learning needs, and files of before held: chains, samples on their way to a generator, weights of classes.
LEFT = re.compile(r"(?:chains|workshop)\.|(?:eta|kl_weight)$")


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module's state, by name."""
    # What else `get_extra_state` may give is the network's own, which is not stored.
    return {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}


def file_name(name: str) -> str:
    """Return the name that a tensor of a posterior's state has in a file.

    >>> file_name("law.log_std.0.weight"), file_name("law.parts.1.own.0.weight"), file_name("network.0.weight")
    ('log_std.0.weight', 'members.1.0.weight', 'network.0.weight')
    """
    name = re.sub(r"^law\.parts\.(\d+)\.own\.", r"members.\1.", name)
    name = re.sub(r"^statistics\.rows\.", "statistics.", name)
    name = re.sub(r"^statistics\.fresh$", "fresh_statistics", name)
    return name.removeprefix("law.")


def kept(posterior: Posterior) -> dict[str, Tensor]:
    """Return the tensors that a file holds, by their names in it: all but what only learning needs."""
    found = {name: tensor for name, tensor in tensors_of(posterior).items() if not name.startswith("learning.")}
    return {file_name(name): tensor for name, tensor in found.items()}


def modernised(tensors: Mapping[str, Tensor], state: Mapping[str, Tensor], learns: bool) -> dict[str, Tensor]:
    """Return a file's tensors without what is not kept any more, and with what changed its shape."""
    found = {name: t for name, t in tensors.items() if name in state or not (learns and LEFT.match(name))}
    fresh = found.get("fresh_statistics")
    if fresh is not None and "fresh_statistics" not in state:
        del found["fresh_statistics"]  # of a network without batch normalisation
    elif fresh is not None and fresh.ndim == 0:
        found["fresh_statistics"] = fresh.repeat(2)  # one for the mean and one for the draws
    return found


def network_tensors(config: dict[str, Any], network: nn.Module, folder: Path) -> dict[str, Tensor]:
    """Return those tensors of a posterior that are the network's own, by their name in the posterior."""
    own, marks = tensors_of(network), config["fingerprints"]
    for name, mark in marks.items():
        if name not in own or fingerprint(own[name]) != mark:
            wrong = "another shape, type or values" if name in own else "no such tensor"
            raise ValueError(
                f"The network given is not the one that {folder} was made from: for {name!r} it has {wrong}. Load "
                "the same pretrained weights into the network first."
            )
    if unknown := sorted(set(config["network"].values()) - marks.keys()):
        raise FileError(f"{folder / CONFIG} lacks the fingerprints of {unknown[:5]}. Save the posterior again.")
    return {name: own[source] for name, source in config["network"].items()}


def check_names(needed: Set[str], stored: Set[str], own: Set[str], folder: Path) -> None:
    """Raise where there are not all tensors that are needed, each once."""
    missing, extra = sorted(needed - stored - own), sorted((stored | own) - needed)
    if missing or extra:
        parts = [f"lacks {missing[:5]}"] * bool(missing) + [f"has unknown {extra[:5]}"] * bool(extra)
        raise ValueError(
            f"{folder} {' and '.join(parts)}: it was saved from another architecture, or with other modules converted."
        )
    if twice := sorted(own & stored):
        raise FileError(f"{folder} has {twice[:5]} twice, in its file and as the network's own. Save it again.")


def check_shapes(state: Mapping[str, Tensor], tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Raise where a tensor has another shape or kind of numbers than the posterior's."""
    for name, tensor in tensors.items():
        needed = state[name]
        if tensor.shape != needed.shape:
            raise ValueError(
                f"{folder} holds {_plain(name)!r} with the shape {tuple(tensor.shape)}, and the network given needs "
                f"{tuple(needed.shape)}: it is another architecture."
            )
        if tensor.dtype != needed.dtype and not (tensor.is_floating_point() and needed.is_floating_point()):
            raise ValueError(
                f"{folder} holds {_plain(name)!r} as {tensor.dtype}, and the network given needs {needed.dtype}: it is "
                "another architecture, or the file was changed."
            )


def check_likelihood(likelihood: Likelihood, folder: Path) -> None:
    """Raise where what a likelihood learned cannot be."""
    for name, tensor in likelihood.state_dict().items():
        # What predictions divide by or multiply variances with is positive, what they add is not negative.
        low = {"temperature": 0.0, "variance_scale": 0.0, "dispersion_scale": 0.0, "extra_dispersion": -1e-300}.get(
            name
        )
        if not bool(torch.isfinite(tensor).all()) or (low is not None and not bool((tensor.double() > low).all())):
            raise FileError(
                f"{folder} has a likelihood whose {name} is {tensor.tolist()}, which cannot be. Calibrate and save the "
                "posterior again."
            )


def _plain(name: str) -> str:
    return name.removeprefix("network.")
