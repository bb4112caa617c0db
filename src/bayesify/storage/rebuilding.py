"""From a configuration to the posterior that it describes, before its tensors are filled in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bayesify._core.deprecation import with_new_keys
from bayesify._core.files import FileError
from bayesify._core.values import fits, misfits
from bayesify.conversion import build
from bayesify.laws import Law, MemberLaw, Posterior, law_class
from bayesify.laws.members import rebase
from bayesify.likelihoods import likelihood_from_dict
from bayesify.methods import list_methods, method_from_dict
from bayesify.prediction import Views
from bayesify.selection import Conversion, ConversionRow, Selection, select_parameters
from bayesify.storage.sizes import fitted_to
from bayesify.storage.tensors import tensors_of
from bayesify.storage.versions import CONFIG

__all__ = ["make_room", "rebuild"]


def rebuild(config: dict[str, Any], tensors: Mapping[str, Tensor], network: nn.Module, folder: Path) -> Posterior:
    """Build the posterior that a configuration describes, if the tensors there are can belong to it."""
    where = str(folder / CONFIG)
    maker, conversion = _maker(config["method"], where), _read_conversion(config["conversion"], folder)
    plain = tensors_of(network)
    own = {name: plain[source] for name, source in config["network"].items() if source in plain}
    shapes = {name: tuple(tensor.shape) for name, tensor in {**tensors, **own}.items()}
    noise, held = config["likelihood"].get("num_outputs"), shapes.get("likelihood.log_noise")
    if config["likelihood"].get("noise_std") == "per-output" and (noise,) != held:
        raise FileError(f"{where} asks for the noise of {noise} outputs, and there is that of {held}. Save it again.")
    classes, held = config["likelihood"].get("num_classes"), shapes.get("likelihood.log_gaps", ())
    if config["likelihood"].get("kind") == "ordinal" and (classes,) != tuple(size + 2 for size in held):
        raise FileError(f"{where} asks for {classes} classes in order, and thresholds are {held}. Save it again.")
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
    if config.get("views") is not None:
        try:
            posterior.views = Views(*config["views"])
        except ValueError as error:
            raise FileError(f"{where} has views that cannot be: {error} Save it again.") from error
    return posterior


def make_room(posterior: Posterior, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Give tensors whose shape learning or calibration decides the shapes that a file has them in."""
    posterior.law.make_room(tensors)
    likelihood, prefix = posterior.likelihood, "likelihood."
    likelihood.make_room({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
    temperature, parts = getattr(likelihood, "temperature", None), posterior.law.num_parts
    if temperature is not None and temperature.ndim and len(temperature) != parts:
        raise FileError(
            f"{folder} has {len(temperature)} temperatures, and {posterior.law.described()} has {parts} part(s). "
            "Calibrate and save the posterior again."
        )


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
    wrong = [key for key, type_ in kind.settings.items() if key not in values or not fits(values[key], type_)]
    if wrong:
        raise FileError(f"{where} has settings of {name!r} that are missing or cannot be: {wrong}. Save it again.")
    return _Made(kind, {key: values[key] for key in kind.settings}, where)


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
