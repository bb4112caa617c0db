"""Save and load posteriors: a small folder, without the network's own weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayesify._core.deprecation import with_new_keys
from bayesify._core.files import FileError, check_values, digest, fingerprint
from bayesify._core.values import fits, misfits
from bayesify.conversion import build
from bayesify.laws import Law, MemberLaw, Posterior, law_class, require_posterior
from bayesify.laws.members import rebase
from bayesify.likelihoods import Likelihood, likelihood_from_dict
from bayesify.methods import list_methods, method_from_dict
from bayesify.selection import Conversion, ConversionRow, Selection, select_parameters
from bayesify.storage.probe import check_probe, check_rates, drop_rates, make_probe
from bayesify.storage.sizes import fitted_to
from bayesify.storage.versions import CONFIG, read_version, write_version

__all__ = ["FORMAT", "load", "save"]

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


def save(posterior: Posterior, path: str | Path) -> None:
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

    Raises:
        ValueError: The folder has a `config.json` that is not a posterior's.

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
    state = _kept(posterior)
    marks = {name: fingerprint(tensor) for name, tensor in state.items()}
    network = {name: posterior.origin[mark] for name, mark in marks.items() if mark in posterior.origin}
    added = {name: tensor for name, tensor in state.items() if name not in network}
    config = {
        "format": FORMAT,
        "method": _describe(posterior),
        "likelihood": posterior.likelihood.to_dict(),
        "output_key": posterior.output_key,
        "default_samples": posterior.default_draws,
        "conversion": [asdict(row) for row in posterior.conversion.rows] if posterior.conversion else [],
        "frozen": posterior.frozen,
        "network": network,
        "fingerprints": {network[name]: marks[name] for name in network},
        "rates": drop_rates(posterior),
        "probe": make_probe(posterior),
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
    config, tensors, marks, file = read_version(folder, lambda found: _check_config(found, folder))
    posterior = _rebuild(config, tensors, network, folder)
    learns = posterior.learning is not None
    posterior.learning = None
    posterior.law.make_room(tensors)
    state = _kept(posterior)
    stored, tensors = tensors, _modernised(tensors, state, learns)
    ours = {name for name in config["network"] if name in state or not (learns and _LEFT.match(name))}
    _check_names(state.keys(), tensors.keys(), ours, folder)
    _check_shapes(state, tensors, folder)
    own = {name: tensor for name, tensor in _network_tensors(config, network, folder).items() if name in ours}
    _check_shapes(state, own, folder)
    mapped = {file_name(name) for name, _ in posterior.named_buffers()} & set(tensors) if memory_map else set()
    check_values(file, {name: tensor for name, tensor in stored.items() if name not in mapped}, marks)
    tensors |= own
    for name, tensor in state.items():  # what was saved in another precision than the network's keeps it
        tensor.data = tensor.data.to(tensors[name].dtype)
    for name in mapped:
        if state[name].device.type != "cpu":
            raise ValueError(f"memory_map reads files on a CPU, and the network is on {state[name].device}.")
        state[name].data = tensors[name]  # as the file is read: page by page
    names = {file_name(name): name for name in _tensors_of(posterior)}
    own_memory = {names[name]: tensor for name, tensor in tensors.items() if name not in mapped}
    posterior.load_state_dict({**posterior.state_dict(), **own_memory})
    _check_likelihood(posterior.likelihood, folder)
    if config["format"] > 1:
        check_rates(posterior, config["rates"], str(folder))
    if config.get("probe") is not None:
        if probe:
            check_probe(posterior, config["probe"], str(folder))
        posterior.inputs_seen.form = config["probe"].get("form")
    return posterior


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    # What else `get_extra_state` may give is the network's own, which is not stored.
    return {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}


# -- names in files -------------------------------------------------------------------------------------------------

# What only learning needs, and files of before held: chains, samples on their way to a generator, weights of classes.
_LEFT = re.compile(r"(?:chains|workshop)\.|(?:eta|kl_weight)$")


def file_name(name: str) -> str:
    """Return the name that a tensor of a posterior's state has in a file.

    >>> file_name("law.log_std.0.weight"), file_name("law.parts.1.own.0.weight"), file_name("network.0.weight")
    ('log_std.0.weight', 'members.1.0.weight', 'network.0.weight')
    """
    name = re.sub(r"^law\.parts\.(\d+)\.own\.", r"members.\1.", name)
    name = re.sub(r"^statistics\.rows\.", "statistics.", name)
    name = re.sub(r"^statistics\.fresh$", "fresh_statistics", name)
    return name.removeprefix("law.")


def _kept(posterior: Posterior) -> dict[str, Tensor]:
    """Return the tensors that a file holds, by their names in it: all but what only learning needs."""
    found = {name: tensor for name, tensor in _tensors_of(posterior).items() if not name.startswith("learning.")}
    return {file_name(name): tensor for name, tensor in found.items()}


def _modernised(tensors: Mapping[str, Tensor], state: Mapping[str, Tensor], learns: bool) -> dict[str, Tensor]:
    """Return a file's tensors without what is not kept any more, and with what changed its shape."""
    found = {name: t for name, t in tensors.items() if name in state or not (learns and _LEFT.match(name))}
    fresh = found.get("fresh_statistics")
    if fresh is not None and "fresh_statistics" not in state:
        del found["fresh_statistics"]  # of a network without batch normalisation
    elif fresh is not None and fresh.ndim == 0:
        found["fresh_statistics"] = fresh.repeat(2)  # one for the mean and one for the draws
    return found


# -- the configuration --------------------------------------------------------------------------------------------


def _check_config(config: dict[str, Any], folder: Path) -> bool:
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
    if unknown := sorted(config.keys() - types.keys()):
        raise FileError(f"{path} has {unknown[:5]}, which format {version} does not know. Save the posterior again.")
    if wrong := sorted(key for key, kind in types.items() if not fits(config[key], kind)):
        raise FileError(f"{path} has values of the wrong type for {wrong}. Save the posterior again.")
    if version == 1:
        return False
    if digest({key: value for key, value in config.items() if key != "digest"}) != config["digest"]:
        raise FileError(
            f"{path} is not what was saved: it was changed or damaged. Copy it again. Settings of a posterior can be "
            "changed after it is loaded, and saved again."
        )
    return True


def _describe(posterior: Posterior) -> dict[str, Any]:
    """Return what the posterior can be built from: a method's configuration, or that of a law that is made."""
    if posterior.method is not None:
        return posterior.method.to_dict()
    return {"name": posterior.law.name, "version": 1, **posterior.law.config()}


@dataclass(frozen=True)
class _Made:
    """Builds a law that no method learns, as `sample_bank` and `distill` make them."""

    kind: type[Law]
    settings: dict[str, Any]
    where: str

    @property
    def name(self) -> str:
        return self.kind.name

    def build(self, network: nn.Module, selection: Selection) -> tuple[Law, Conversion]:
        names, table = select_parameters(network, selection, how="")
        if self.kind is MemberLaw:
            parts = [self._part(network, part) for part in self.settings["parts"]]
            return MemberLaw(network, parts, sources=self.settings["parts"]), table
        return self.kind.build(network, {**self.settings, "names": self.settings["names"] or names}), table

    def _part(self, network: nn.Module, source: Any) -> Law:
        if not (fits(source, dict) and fits(source.get("law"), dict) and fits(source.get("converted"), list[str])):
            raise FileError(f"{self.where} has a member that cannot be: {source!r}. Save it again.")
        law: Law = _maker(source["law"], self.where).build(network, Selection.exactly(source["converted"]))[0]
        return law

    def state(self, posterior: Posterior) -> None:
        del posterior


def _maker(values: dict[str, Any], where: str) -> Any:
    """Return the method, or the maker of a law, that a configuration names."""
    name = values.get("name")
    kind = law_class(name) if isinstance(name, str) and name not in list_methods() else None
    if kind is None:
        return method_from_dict(values)
    if values.get("version") != 1:
        raise ValueError(f"{where} has version {values.get('version')!r} of {name!r}, and this bayesify knows 1.")
    values = with_new_keys(values, kind.old_settings)
    wrong = [key for key, type_ in kind.settings.items() if not fits(values.get(key), type_)]
    if wrong:
        raise FileError(f"{where} has settings of {name!r} that are missing or cannot be: {wrong}. Save it again.")
    return _Made(kind, {key: values[key] for key in kind.settings}, where)


def _rebuild(config: dict[str, Any], tensors: Mapping[str, Tensor], network: nn.Module, folder: Path) -> Posterior:
    """Build the posterior that a configuration describes, if the tensors there are can belong to it."""
    where = str(folder / CONFIG)
    maker, conversion = _maker(config["method"], where), _read_conversion(config["conversion"], folder)
    plain = _tensors_of(network)
    own = {name: plain[source] for name, source in config["network"].items() if source in plain}
    shapes = {name: tuple(tensor.shape) for name, tensor in {**tensors, **own}.items()}
    noise, held = config["likelihood"].get("num_outputs"), shapes.get("likelihood.log_noise")
    if config["likelihood"].get("noise_std") == "per-output" and (noise,) != held:
        raise FileError(f"{where} asks for the noise of {noise} outputs, and there is that of {held}. Save it again.")
    likelihood = likelihood_from_dict(config["likelihood"])
    if not 1 <= config["default_samples"] < 2**31:
        raise FileError(f"{where} has default_samples={config['default_samples']}, which cannot be. Save it again.")
    random = maker.settings.get("names", ()) if isinstance(maker, _Made) else ()
    _check_modules(conversion.converted, config["frozen"], random, network, folder)
    try:
        posterior = build(
            network,
            fitted_to(maker, shapes, where),
            Selection.exactly(conversion.converted),
            likelihood,
            frozen=config["frozen"],
        )
    except ValueError:
        raise
    except Exception as error:
        raise FileError(
            f"{where} describes a posterior of {maker.name!r} that the network given cannot have "
            f"({type(error).__name__}: {error}): it is another architecture, or the file is damaged."
        ) from error
    if isinstance(maker, _Made) and isinstance(posterior.law, MemberLaw):
        _give_own(posterior.law, shapes)
    posterior.method = None if isinstance(maker, _Made) else maker
    posterior.conversion = conversion
    posterior.output_key = config["output_key"]
    posterior.default_draws = config["default_samples"]
    return posterior


def _give_own(law: MemberLaw, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Make room for the tensors in which members differ from the shared network."""
    state = {**dict(law.network.named_parameters()), **dict(law.network.named_buffers())}
    for index, part in enumerate(law.laws):
        prefix = f"members.{index}."
        names = [name.removeprefix(prefix) for name in shapes if name.startswith(prefix)]
        own = {name: state[name].detach().clone() for name in names if name in state and name not in part.own.as_dict()}
        kinds = {name: nn.Parameter(t) if isinstance(state[name], nn.Parameter) else t for name, t in own.items()}
        rebase(part, kinds)


def _read_conversion(rows: list[Any], folder: Path) -> Conversion:
    try:
        found = tuple(ConversionRow(**row) for row in rows)
        if wrong := [text for row in rows for text in misfits(row, ConversionRow)]:
            raise TypeError(wrong[0])
        return Conversion(found)
    except TypeError as error:
        raise FileError(f"{folder / CONFIG} has a damaged conversion ({error}). Save it again.") from error


def _check_modules(
    converted: tuple[str, ...], frozen: list[str], random: Sequence[str], network: nn.Module, folder: Path
) -> None:
    modules = {name for name, _ in network.named_modules(remove_duplicate=False)}
    parameters = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    for word, names, there in (
        ("it converted", converted, modules),
        ("its frozen parameters are", frozen, parameters),
        ("its random parameters are", random, parameters),
    ):
        if missing := sorted(set(names) - there):
            raise FileError(
                f"{folder} was saved from another architecture: {word} {missing[:5]}, which the network given does "
                "not have."
            )
    if len(set(random)) < len(random):
        raise FileError(f"{folder / CONFIG} names a random parameter twice. Copy or save the posterior again.")


# -- the tensors --------------------------------------------------------------------------------------------------


def _network_tensors(config: dict[str, Any], network: nn.Module, folder: Path) -> dict[str, Tensor]:
    """Return those tensors of a posterior that are the network's own, by their name in the posterior."""
    own, marks = _tensors_of(network), config["fingerprints"]
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


def _check_names(needed: Set[str], stored: Set[str], own: Set[str], folder: Path) -> None:
    """Raise where there are not all tensors that are needed, each once."""
    missing, extra = sorted(needed - stored - own), sorted((stored | own) - needed)
    if missing or extra:
        parts = [f"lacks {missing[:5]}"] * bool(missing) + [f"has unknown {extra[:5]}"] * bool(extra)
        raise ValueError(
            f"{folder} {' and '.join(parts)}: it was saved from another architecture, or with other modules converted."
        )
    if twice := sorted(own & stored):
        raise FileError(f"{folder} has {twice[:5]} twice, in its file and as the network's own. Save it again.")


def _check_shapes(state: Mapping[str, Tensor], tensors: Mapping[str, Tensor], folder: Path) -> None:
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


def _check_likelihood(likelihood: Likelihood, folder: Path) -> None:
    for name, tensor in likelihood.state_dict().items():
        scale = name in ("temperature", "variance_scale")  # what predictions divide by, or multiply variances with
        if not bool(torch.isfinite(tensor).all()) or (scale and not bool((tensor > 0).all())):
            raise FileError(
                f"{folder} has a likelihood whose {name} is {tensor.tolist()}, which cannot be. Calibrate and save the "
                "posterior again."
            )


def _plain(name: str) -> str:
    return name.removeprefix("network.")
