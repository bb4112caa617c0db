"""Damaged checkpoints: every one is refused with a sentence, and none is gone on with."""

import copy
import functools
import json
import os
import pickle
import re
import stat
import struct
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import MAP
from bayesify._core.files import pack, read_tensors, write_tensors
from bayesify.fitting.checkpoint import Checkpoint, Saved

FILES = ("checkpoint.safetensors", "best-0.safetensors")


def _fit(folder: Path, **options: Any) -> bayesify.Posterior:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    data = TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
    posterior = bayesify.convert(network, MAP(lr=0.1, optimizer="adam"))
    bayesify.fit(
        posterior, DataLoader(data, 4, shuffle=True), val_loader=DataLoader(data, 4), epochs=2, patience=2,
        checkpoint=folder, progress=False, accuracy_tolerance=1.0, **options,
    )  # fmt: skip
    return posterior


class StopError(Exception):
    pass


@functools.cache
def _contents() -> dict[str, bytes]:
    """Return the files of a run that was broken off in its second epoch."""

    class Stopping(torch.optim.Adam):
        steps = 0

        def step(self, closure: Any = None) -> None:
            Stopping.steps += 1
            if Stopping.steps == 4:
                raise StopError
            super().step(closure)

    with tempfile.TemporaryDirectory() as name:
        with pytest.raises(StopError):
            _fit(Path(name), checkpoint_steps=1, optimizer=functools.partial(Stopping, lr=0.1))
        return {file: (Path(name) / file).read_bytes() for file in FILES}


def _read(folder: Path) -> tuple[Saved, dict[str, Tensor]]:
    """Read all that a run reads when it goes on."""
    checkpoint = Checkpoint(folder)
    saved = checkpoint.read()
    assert saved is not None
    checkpoint.settings = _settings()
    checkpoint.check(saved)
    return saved, checkpoint.read_best(0)


@functools.cache
def _settings() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / FILES[0]).write_bytes(_contents()[FILES[0]])
        saved = Checkpoint(name).read()
    assert saved is not None
    return saved.settings


@functools.cache
def _whole() -> str:
    with tempfile.TemporaryDirectory() as name:
        _put(Path(name))
        return _text(_read(Path(name)))


def _text(found: tuple[Saved, dict[str, Tensor]]) -> str:
    """Write all that was read as text, numbers to the last bit."""
    saved, best = found
    tensors: dict[str, Tensor] = {}
    progress, history = vars(saved.progress), saved.history.to_dict()
    tree = pack([saved.settings, saved.tensors, progress, history, saved.parts, best], tensors, "all")
    return json.dumps([tree, {name: (str(t.dtype), t.tolist()) for name, t in tensors.items()}])


def _put(folder: Path, **changed: bytes) -> None:
    for file, content in _contents().items():
        (folder / file).write_bytes(changed.get(file.split(".")[0].replace("-", "_"), content))


def _assert_clear(error: BaseException) -> None:
    """The error is a sentence of this package: its innermost frame is a `raise` there, and it says what to do."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    assert isinstance(error, ValueError), repr(error)
    assert Path(frame.filename).is_relative_to(Path(bayesify.__file__).parent), frame
    assert re.search(r"safetensors.*(again|anew|[dD]elete|Put)", str(error), re.DOTALL), error


def _outcome(folder: Path) -> str:
    try:
        found = _text(_read(folder))
    except Exception as error:
        _assert_clear(error)
        return "refused"
    return "unchanged" if found == _whole() else "silently another"


def test_what_is_whole_is_read(tmp_path: Path):
    _put(tmp_path)
    assert _outcome(tmp_path) == "unchanged"


# -- kinds of damage, one by one -----------------------------------------------------------------------------------


def _header(content: bytes) -> tuple[dict[str, Any], bytes]:
    size = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def _joined(header: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def _edit_header(edit: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def damage(content: bytes) -> bytes:
        header, data = _header(content)
        edit(header)
        return _joined(header, data)

    return damage


def _edit_sealed(edit: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    """Edit the header's text, its fingerprints or its seal."""

    def inner(header: dict[str, Any]) -> None:
        sealed = json.loads(header["__metadata__"]["sealed"])
        assert sealed.keys() == {"json", "marks", "seal"}
        edit(sealed)
        header["__metadata__"]["sealed"] = json.dumps(sealed)

    return _edit_header(inner)


def _edit_values(edit: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    """Edit the plain values in the header, as somebody with an editor would."""

    def inner(sealed: dict[str, Any]) -> None:
        values = json.loads(sealed["json"])
        edit(values)
        sealed["json"] = json.dumps(values)

    return _edit_sealed(inner)


def _sealed(edit: Callable[[dict[str, Tensor], dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    """Write other things with a seal of their own, as another program might."""

    def damage(content: bytes) -> bytes:
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "file.safetensors"
            path.write_bytes(content)
            tensors, values = read_tensors(path)
            tensors = {key: tensor.clone() for key, tensor in tensors.items()}
            edit(tensors, values)
            write_tensors(path, tensors, values)
            return path.read_bytes()

    return damage


def _name(header: dict[str, Any], number: int = 0) -> str:
    return [name for name, entry in header.items() if entry.get("shape") == [4]][number]


def _exchange(header: dict[str, Any]) -> None:
    a, b = _name(header), _name(header, 1)
    header[a], header[b] = header[b], header[a]


def _step(values: dict[str, Any]) -> list[Any]:
    (progress,) = (value for key, value in values["tree"]["pairs"] if key == "progress")
    (pair,) = (pair for pair in progress["pairs"] if pair[0] == "step")
    return pair


def _flip(place: int, bit: int = 0) -> Callable[[bytes], bytes]:
    return lambda content: content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 or len(content) :]


def _forget(key: str) -> Callable[[dict[str, Tensor], dict[str, Any]], Any]:
    def edit(tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        values["tree"]["pairs"] = [pair for pair in values["tree"]["pairs"] if pair[0] != key]

    return edit


KINDS: dict[str, Callable[[bytes], bytes]] = {
    **{
        f"cut to {n}": functools.partial(lambda n, content: content[:n], n) for n in (0, 1, 7, 8, 9, 100, 1000, -1, -64)
    },
    "cut in half": lambda content: content[: len(content) // 2],
    "a byte more": lambda content: content + b"\0",
    "twice": lambda content: content * 2,
    "zeros": lambda content: b"\0" * len(content),
    "text": lambda content: b"this is not a file of tensors" * 50,
    "a pickle": lambda content: pickle.dumps({"weights": [1.0]}),
    "JSON": lambda content: b"{}",
    "the middle zeroed": lambda content: content[:-400] + b"\0" * 200 + content[-200:],
    "the end zeroed": lambda content: content[:-64] + b"\0" * 64,
    **{f"bit {bit} of the length": _flip(0, bit) for bit in range(8)},
    "a length of 2^63": lambda content: struct.pack("<Q", 2**63) + content[8:],
    "a header of nothing": lambda content: struct.pack("<Q", 0) + content[8:],
    "the first bit of the numbers": lambda content: _flip(8 + struct.unpack("<Q", content[:8])[0])(content),
    "the last bit of the numbers": _flip(-1, 7),
    "no plain values": _edit_header(lambda header: header.pop("__metadata__")),
    "empty plain values": _edit_header(lambda header: header.update(__metadata__={})),
    "no seal": _edit_sealed(lambda sealed: sealed.pop("seal")),
    "another seal": _edit_sealed(lambda sealed: sealed.update(seal="0" * 16)),
    "no fingerprints": _edit_sealed(lambda sealed: sealed.pop("marks")),
    "fingerprints of nothing": _edit_sealed(lambda sealed: sealed.update(marks={})),
    "fingerprints that are a list": _edit_sealed(lambda sealed: sealed.update(marks=[])),
    "other fingerprints": _edit_sealed(lambda sealed: sealed.update(marks=dict.fromkeys(sealed["marks"], "0" * 16))),
    "values that are a list": _edit_sealed(lambda sealed: sealed.update(json="[]")),
    "values that are a number": _edit_sealed(lambda sealed: sealed.update(json=1)),
    "values nested deeply": _edit_sealed(lambda sealed: sealed.update(json="[" * 10**5)),
    "values cut short": _edit_sealed(lambda sealed: sealed.update(json='{"format": 2')),
    "a header cut short": _edit_header(lambda header: header["__metadata__"].update(sealed='{"json": ')),
    "a header of a list": _edit_header(lambda header: header["__metadata__"].update(sealed="[]")),
    "a tensor less": _edit_header(lambda header: header.pop(_name(header))),
    "a tensor renamed": _edit_header(lambda header: header.update(other=header.pop(_name(header)))),
    "two tensors exchanged": _edit_header(_exchange),
    "another type": _edit_header(lambda header: header[_name(header)].update(dtype="I32")),
    "another shape": _edit_header(lambda header: header[_name(header)].update(shape=[2, 2])),
    "a shape too large": _edit_header(lambda header: header[_name(header)].update(shape=[2**40])),
    "overlapping tensors": _edit_header(
        lambda header: header[_name(header)].update(data_offsets=header[_name(header, 1)]["data_offsets"])
    ),
}
CHECKPOINT_KINDS: dict[str, Callable[[bytes], bytes]] = {
    "another format": _edit_values(lambda values: values.update(format=3)),
    "the old format": _edit_values(lambda values: values.update(format=1)),
    "other settings": _edit_values(lambda values: values["settings"].update(seed=1)),
    "other weights at the start": _edit_values(
        lambda values: values["settings"]["start"]["tensors"]["network.0.bias"].reverse()
    ),
    "a step further": _edit_values(lambda values: _step(values).__setitem__(1, 2)),
    "finished": _edit_values(lambda values: values["tree"]["pairs"].append(["done", True])),
    "no tree": _edit_values(lambda values: values.pop("tree")),
    "sealed, of a newer format": _sealed(lambda tensors, values: values.update(format=99)),
    "sealed, with no values": _sealed(lambda tensors, values: values.clear()),
    "sealed, with no tree": _sealed(lambda tensors, values: values.pop("tree")),
    "sealed, with a tree of text": _sealed(lambda tensors, values: values.update(tree="text")),
    "sealed, with a branch of two": _sealed(lambda tensors, values: values.update(tree={"pairs": [], "tensor": "a"})),
    "sealed, with no settings": _sealed(lambda tensors, values: values.pop("settings")),
    "sealed, with a lost tensor": _sealed(
        lambda tensors, values: [tensors.pop(name) for name in list(tensors) if name.startswith("run.")]
    ),
    **{f"sealed, without {key}": _sealed(_forget(key)) for key in ("progress", "history", "random", "probe", "scaler")},
}


@pytest.mark.parametrize("kind", [*KINDS, *CHECKPOINT_KINDS])
def test_a_damaged_checkpoint_is_refused_with_a_sentence(kind: str, tmp_path: Path):
    _put(tmp_path, checkpoint=({**KINDS, **CHECKPOINT_KINDS})[kind](_contents()[FILES[0]]))
    assert _outcome(tmp_path) == "refused"


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_best_weights_are_refused_with_a_sentence(kind: str, tmp_path: Path):
    _put(tmp_path, best_0=KINDS[kind](_contents()[FILES[1]]))
    assert _outcome(tmp_path) == "refused"


def test_files_that_are_missing_or_no_files(tmp_path: Path):
    _put(tmp_path)
    (tmp_path / FILES[1]).unlink()
    assert _outcome(tmp_path) == "refused"
    (tmp_path / FILES[1]).mkdir()
    assert _outcome(tmp_path) == "refused"
    (tmp_path / FILES[0]).unlink()
    assert Checkpoint(tmp_path).read() is None
    (tmp_path / FILES[0]).mkdir()
    assert _outcome(tmp_path) == "refused"


def test_the_best_weights_of_another_run(tmp_path: Path):
    other = _sealed(lambda tensors, values: values.update(run="0" * 16))
    _put(tmp_path, best_0=other(_contents()[FILES[1]]))
    assert _outcome(tmp_path) == "refused"


@pytest.mark.parametrize("kind", ["cut in half", "the last bit of the numbers", "a step further", "old format"])
def test_fit_refuses_and_changes_nothing(kind: str, tmp_path: Path):
    kinds = {**KINDS, **CHECKPOINT_KINDS, "old format": lambda content: _unsealed(content)}
    _fit(tmp_path)
    path = tmp_path / FILES[0]
    damaged = kinds[kind](path.read_bytes())
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match="delete") as caught:
        _fit(tmp_path)
    _assert_clear(caught.value)
    assert path.read_bytes() == damaged


def _unsealed(content: bytes) -> bytes:
    """Return a file as versions before the seal wrote it."""

    def edit(header: dict[str, Any]) -> None:
        header["__metadata__"] = {"json": json.dumps({"format": 1, "settings": {}, "tree": {"pairs": []}})}

    return _edit_header(edit)(content)


def test_a_file_of_the_old_format_is_named_as_such(tmp_path: Path):
    _put(tmp_path, checkpoint=_unsealed(_contents()[FILES[0]]))
    with pytest.raises(ValueError, match="has format 1, and this bayesify reads format 2"):
        Checkpoint(tmp_path).read()


# -- and at random ---------------------------------------------------------------------------------------------------

PLACE = st.floats(0, 1, exclude_max=True)


@pytest.mark.slow
@settings(max_examples=700)
@given(
    file=st.sampled_from(FILES),
    kind=st.sampled_from(("flip", "flip in header", "cut", "insert", "remove", "zero", "move", "overwrite")),
    place=PLACE,
    other=PLACE,
    size=st.integers(1, 64),
    bit=st.integers(0, 7),
    noise=st.binary(min_size=64, max_size=64),
)
def test_no_damage_is_silent_or_obscure(
    file: str, kind: str, place: float, other: float, size: int, bit: int, noise: bytes
):
    content = _contents()[file]
    at = int(place * len(content))
    if kind == "flip in header":
        at = int(place * (8 + struct.unpack("<Q", content[:8])[0]))
    damaged = {
        "flip": _flip(at, bit),
        "flip in header": _flip(at, bit),
        "cut": lambda content: content[:at],
        "insert": lambda content: content[:at] + noise[:size] + content[at:],
        "remove": lambda content: content[:at] + content[at + size :],
        "zero": lambda content: content[:at] + bytes(len(content[at : at + size])) + content[at + size :],
        "move": lambda content: _moved(content, at, int(other * len(content)), size),
        "overwrite": lambda content: (content[:at] + noise[:size] + content[at + size :])[: len(content)],
    }[kind](content)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _put(folder, **{file.split(".")[0].replace("-", "_"): damaged})
        outcome = _outcome(folder)
    assert outcome == "refused" or (outcome == "unchanged" and kind != "cut")


def _moved(content: bytes, at: int, to: int, size: int) -> bytes:
    part = content[at : at + size]
    rest = content[:at] + content[at + size :]
    return rest[:to] + part + rest[to:]


def test_temporary_files_of_killed_runs_are_removed(tmp_path: Path):
    old, young, foreign = (tmp_path / name for name in (
        ".checkpoint.safetensors.0123abcd", ".best-0.safetensors.0123abce", ".mine.0123abcd",
    ))  # fmt: skip
    for path in (old, young, foreign):
        path.write_bytes(b"half")
    for path in (old, foreign):
        os.utime(path, (time.time() - 3600,) * 2)
    _fit(tmp_path)
    assert not old.exists()
    assert young.exists()  # another process may be writing it
    assert foreign.exists()


def test_files_and_folders_are_flushed_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    flushed: list[str] = []
    plain = os.fsync

    def fsync(handle: int) -> None:
        flushed.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        plain(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    Checkpoint(tmp_path).save_best(_posterior(), 0)
    assert flushed == ["file", "folder"]


def _posterior() -> bayesify.Posterior:
    return copy.deepcopy(bayesify.convert(nn.Linear(2, 2), MAP()))
