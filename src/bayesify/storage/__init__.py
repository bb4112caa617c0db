"""Save and load posteriors: a small folder, without the network's own weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from bayesify._core.files import check_values, fingerprint
from bayesify.conversion import describe
from bayesify.laws import Posterior, require_posterior
from bayesify.storage.configuration import FORMAT, check_config
from bayesify.storage.probe import check_probe, check_rates, drop_rates, make_probe
from bayesify.storage.rebuilding import make_room, rebuild
from bayesify.storage.tensors import (
    LEFT,
    check_likelihood,
    check_names,
    check_shapes,
    file_name,
    kept,
    modernised,
    network_tensors,
    tensors_of,
)
from bayesify.storage.versions import read_version, write_version

__all__ = ["FORMAT", "load", "read_notes", "save"]


def save(
    posterior: Posterior, path: str | Path, *, whole: bool = False, notes: Mapping[str, Any] | None = None
) -> None:
    """Save a posterior as a folder: `config.json`, and a safetensors file with what the method added.

    Tensors with the values of one of the user's network's own are not stored: the configuration names it and keeps
    its fingerprint. The new configuration replaces an old one in one step, so that a reader finds either the old
    posterior or the new, whole; the tensors of the version before stay in the folder for who is reading them. Several
    processes may save to one folder, one after another: the last one's posterior stays. What else is in the folder is
    left alone.

    The folder also gets a probe: made-up inputs that look like the last ones that the posterior was run on (structure,
    types, shapes, ranges of whole numbers; no values of theirs), and what it returns for them. A posterior that never
    ran, or that cannot be run on such inputs, has none.

    Args:
        posterior: Any posterior.
        path: A folder; made if it does not exist.
        whole: Store the network's own tensors too: `load` then takes a network of the same architecture with any
            weights. For networks that are nowhere else.
        notes: Plain values that JSON has, kept with the posterior and returned by `read_notes`; integrations of other
            packages keep there what they need.

    Raises:
        ValueError: The folder has a `config.json` that is not a posterior's, or a loop of one's own has begun that
            `Learner.finish` did not end.

    Example:
        >>> import tempfile
        >>> from bayesify import MCDropout, convert
        >>> network = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 3))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(convert(network, MCDropout()), folder)
        ...     print(load(folder, network).method.name)
        mc-dropout
    """
    require_posterior(posterior)
    if posterior.unfinished:  # which the files would not remember
        raise ValueError(posterior.learned)
    posterior.require_unchanged()
    state = kept(posterior)
    marks = {name: fingerprint(tensor) for name, tensor in state.items()}
    origin = {} if whole else posterior.origin
    network = {name: origin[mark] for name, mark in marks.items() if mark in origin}
    added = {name: tensor for name, tensor in state.items() if name not in network}
    config = {
        "format": FORMAT,
        "method": describe(posterior),
        "likelihood": posterior.likelihood.to_dict(),
        "output_key": posterior.output_key,
        "default_samples": posterior.default_draws,
        "conversion": [asdict(row) for row in posterior.conversion.rows] if posterior.conversion else [],
        "frozen": posterior.frozen,
        "network": network,
        "fingerprints": {network[name]: marks[name] for name in network},
        "rates": drop_rates(posterior),
        "probe": make_probe(posterior),
        "views": None if posterior.views is None else posterior.views.config(),
        **({} if notes is None else {"notes": dict(notes)}),
    }
    write_version(Path(path), config, added, {name: marks[name] for name in added})


def load(path: str | Path, network: nn.Module, *, memory_map: bool = False, probe: bool = True) -> Posterior:
    """Load a posterior onto the network it was made from.

    All that was stored is checked: the configuration and every tensor by a digest (a reading of the file), the
    network's own tensors by theirs, sizes before room is made for them. Digests are against accidents, not forgers.
    Then the posterior is run on the folder's probe, if it has one, and must return what it returned when it was saved,
    to 1e-3 of the largest number (more in half precision): another activation, another order of modules or another
    rate of dropout are refused, and so is a network that cannot be run on the probe.

    Args:
        path: The folder that `save` made.
        network: The network, with the weights it had when it was converted; it is left untouched. On another device
            or not, the posterior lands where the network is.
        memory_map: Leave buffers, such as the samples of a large bank, in the file and read what is used; their values
            are not checked then. The file must stay; what is written to them is not written to it. On a CPU only.
        probe: Whether the probe is run; False for a network that is meant to compute something else.

    Returns:
        The posterior, bit for bit.

    Raises:
        ValueError: The folder is missing, damaged, of a newer version, or of another network; the message says which.
    """
    folder = Path(path)
    config, tensors, marks, file = read_version(folder, lambda found: check_config(found, folder))
    posterior = rebuild(config, tensors, network, folder)
    learns = posterior.learning is not None
    posterior.learning = None
    make_room(posterior, tensors, folder)
    state = kept(posterior)
    stored, tensors = tensors, modernised(tensors, state, learns)
    ours = {name for name in config["network"] if name in state or not (learns and LEFT.match(name))}
    check_names(state.keys(), tensors.keys(), ours, folder)
    check_shapes(state, tensors, folder)
    own = {name: tensor for name, tensor in network_tensors(config, network, folder).items() if name in ours}
    check_shapes(state, own, folder)
    mapped = {file_name(name) for name, _ in posterior.named_buffers()} & set(tensors) if memory_map else set()
    check_values(file, {name: tensor for name, tensor in stored.items() if name not in mapped}, marks)
    tensors |= own
    for name, tensor in state.items():  # what was saved in another precision than the network's keeps it
        tensor.data = tensor.data.to(tensors[name].dtype)
    for name in mapped:
        if state[name].device.type != "cpu":
            raise ValueError(f"memory_map reads files on a CPU, and the network is on {state[name].device}.")
        state[name].data = tensors[name]  # as the file is read: page by page
    names = {file_name(name): name for name in tensors_of(posterior)}
    own_memory = {names[name]: tensor for name, tensor in tensors.items() if name not in mapped}
    posterior.load_state_dict({**posterior.state_dict(), **own_memory})
    check_likelihood(posterior.likelihood, folder)
    if config["format"] > 1:
        check_rates(posterior, config["rates"], str(folder))
    if config.get("probe") is not None:
        if probe:
            check_probe(posterior, config["probe"], str(folder))
        posterior.inputs_seen.form = config["probe"].get("form")
    return posterior


def read_notes(path: str | Path) -> dict[str, Any]:
    """Return what was noted when a posterior was saved, with nothing of it built; an empty dictionary if nothing was.

    Example:
        >>> import tempfile
        >>> from bayesify import MAP, convert
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(convert(nn.Linear(2, 3), MAP()), folder, notes={"classes": ["cat", "dog", "owl"]})
        ...     read_notes(folder)
        {'classes': ['cat', 'dog', 'owl']}
    """
    folder = Path(path)
    config, _, _, _ = read_version(folder, lambda found: check_config(found, folder))
    notes: dict[str, Any] = config.get("notes", {})
    return notes
