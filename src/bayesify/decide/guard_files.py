"""Save and load guards: one folder with the posterior's, JSON and safetensors, in which a whole guard always is.

    my-guard/
      guard.json                       format, settings, rules, the names of the two below, a digest
      guard-<seal>.safetensors         calibration scores, and what scores need
      posterior-<digest>/              the posterior, as `bayesify.save` writes it

`guard.json` is replaced last and in one step; what the version before named is removed at the next save.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from bayesify._core.files import (
    FileError,
    digest,
    fingerprint,
    read_json,
    read_tensors,
    seal,
    write_atomically,
    write_tensors,
)
from bayesify._core.values import fits
from bayesify.decide.abstainer import Abstainer
from bayesify.decide.detector import Detector
from bayesify.decide.examined import Settings
from bayesify.decide.prediction_intervals import PredictionIntervals
from bayesify.decide.scores import Score
from bayesify.decide.sets import PredictionSets
from bayesify.prediction import Linearised, Mean, Predictor, Sampling, Streamlined
from bayesify.storage import load, save

if TYPE_CHECKING:
    from bayesify.decide.guard import Guard

__all__ = ["load_guard", "save_guard"]

FORMAT = 1
NAME = "guard.json"
_TENSORS = re.compile(r"guard-[0-9a-f]{16}\.safetensors")
_POSTERIOR = re.compile(r"posterior-[0-9a-f]{16}")
_TYPES: dict[str, Any] = {
    "format": int,
    "posterior": str,
    "tensors": str,
    "previous": list[str],
    "settings": dict,
    "score": dict,
    "uncertainty": str,
    "id_acceptance": float,
    "abstainer": dict | None,
    "sets": dict,
    "numbers": dict[str, float],
    "class_names": list[str] | None,
    "tolerance": float | None,
    "max_width": float | None,
    "digest": str,
}
_PREDICTORS: dict[str, type[Predictor]] = {kind.name: kind for kind in (Sampling, Streamlined, Linearised, Mean)}


def save_guard(guard: Guard, path: str | Path) -> None:
    """Save a guard as a folder; a reader finds the old guard or the new one, whole."""
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise FileError(f"{folder} is a file, and a guard is saved as a folder. Give another path.")
    folder.mkdir(parents=True, exist_ok=True)
    before = _before(folder)
    posterior = _save_posterior(guard, folder)
    tensors: dict[str, Tensor] = {"detector.calibration": guard.detector.calibration}
    score = guard.score.to_dict(tensors)
    marks = {name: fingerprint(tensor) for name, tensor in tensors.items()}
    file = f"guard-{seal(tensors, marks)}.safetensors"
    write_tensors(folder / file, tensors, marks=marks)
    predictor = guard.settings.predictor
    previous = [str(before[key]) for key in ("posterior", "tensors") if key in before]
    values = {
        "format": FORMAT,
        "posterior": posterior,
        "tensors": file,
        "previous": previous,
        "settings": {
            "predictor": {"name": predictor.name, **asdict(predictor)},  # type: ignore[call-overload]
            "num_draws": guard.settings.num_draws,
            "seed": guard.settings.seed,
        },
        "score": score,
        "uncertainty": guard.uncertainty,
        "id_acceptance": guard.detector.id_acceptance,
        "abstainer": None if guard.abstainer is None else guard.abstainer.to_dict(),
        "sets": guard.sets.to_dict(),
        "numbers": {name: float(value) for name, value in guard.numbers.items()},
        "class_names": None if guard.class_names is None else list(guard.class_names),
        "tolerance": None if guard.tolerance is None else float(guard.tolerance),
        "max_width": None if guard.max_width is None else float(guard.max_width),
    }
    write_atomically(folder / NAME, json.dumps({**values, "digest": digest(values)}, indent=2).encode())
    _clean(folder, {posterior, file, *previous})


def load_guard(path: str | Path, network: nn.Module, *, probe: bool = True) -> Guard:
    """Load a guard onto its network; everything in the folder is checked, and another network is refused."""
    from bayesify.decide.guard import Guard

    folder = Path(path)
    values = _read(folder)
    tensors, _ = read_tensors(
        folder / values["tensors"], sealed=values["tensors"].removeprefix("guard-").removesuffix(".safetensors")
    )
    posterior = load(folder / values["posterior"], network, probe=probe)
    if digest(read_json(folder / values["posterior"] / "config.json"))[:16] != values["posterior"][-16:]:
        raise FileError(f"{folder / values['posterior']} is not the posterior that the guard was saved with. {_AGAIN}")
    try:
        sets: PredictionSets | PredictionIntervals
        if values["sets"].get("kind") == "PredictionSets":
            sets = PredictionSets.from_dict(values["sets"])
        else:
            sets = PredictionIntervals.from_dict(values["sets"])
        return Guard(
            posterior=posterior,
            settings=_settings(values["settings"]),
            score=Score.from_dict(values["score"], tensors),
            uncertainty=values["uncertainty"],
            detector=Detector.fit(tensors["detector.calibration"], id_acceptance=values["id_acceptance"]),
            abstainer=None if values["abstainer"] is None else Abstainer.from_dict(values["abstainer"]),
            sets=sets,
            numbers=values["numbers"],
            class_names=None if values["class_names"] is None else tuple(values["class_names"]),
            tolerance=values["tolerance"],
            max_width=values["max_width"],
        )
    except (KeyError, TypeError) as error:
        raise FileError(f"{folder / NAME} lacks something or has a wrong value ({error}). {_AGAIN}") from error


_AGAIN = "Copy the folder again, or save the guard again."


def _settings(values: dict[str, Any]) -> Settings:
    described = dict(values["predictor"])
    kind = _PREDICTORS[described.pop("name")]
    known = {one.name for one in fields(kind)}  # type: ignore[arg-type]
    if described.keys() - known:
        raise TypeError(f"the predictor has no {sorted(described.keys() - known)}")
    return Settings(kind(**described), values["num_draws"], values["seed"])


def _read(folder: Path) -> dict[str, Any]:
    path = folder / NAME
    if not path.is_file():
        raise FileError(f"There is no file {path}. A saved guard is a folder with {NAME} in it: guard.save(folder).")
    values = read_json(path)
    if values.get("format") != FORMAT:
        raise FileError(
            f"{folder} has format {values.get('format')!r}, and this bayesify reads format {FORMAT}. Upgrade bayesify, "
            "or save the guard again with this version."
        )
    wrong = sorted(key for key, kind in _TYPES.items() if key not in values or not fits(values[key], kind))
    if wrong or values.keys() != _TYPES.keys():
        raise FileError(f"{path} lacks or has wrong {wrong or sorted(values.keys() - _TYPES.keys())}. {_AGAIN}")
    own = {key: value for key, value in values.items() if key != "digest"}
    if digest(own) != values["digest"]:
        raise FileError(f"{path} was changed or damaged: its digest is another one. {_AGAIN}")
    if not _TENSORS.fullmatch(values["tensors"]) or not _POSTERIOR.fullmatch(values["posterior"]):
        raise FileError(f"{path} names files that are not in its folder. {_AGAIN}")
    return values


def _save_posterior(guard: Guard, folder: Path) -> str:
    """Save the posterior under a name that says what is in it, and return the name."""
    temporary = folder / f".posterior.{secrets.token_hex(4)}"
    try:
        save(guard.posterior, temporary)
        name = f"posterior-{digest(read_json(temporary / 'config.json'))[:16]}"
        if (folder / name).exists():
            shutil.rmtree(temporary)
        else:
            temporary.rename(folder / name)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return name


def _before(folder: Path) -> dict[str, Any]:
    """Return the configuration that is there; refuse a folder with somebody else's."""
    if not (folder / NAME).exists():
        return {}
    try:
        return _read(folder)
    except FileError as error:
        raise FileError(
            f"{folder / NAME} is damaged or not a guard's, and is left as it is: nothing was saved. Give another "
            "folder, or move that file away."
        ) from error


def _clean(folder: Path, kept: set[str]) -> None:
    """Remove versions before the previous one."""
    for path in folder.iterdir():
        if path.name in kept:
            continue
        with contextlib.suppress(OSError):
            if _TENSORS.fullmatch(path.name):
                path.unlink()
            elif _POSTERIOR.fullmatch(path.name) and path.is_dir():
                shutil.rmtree(path)
