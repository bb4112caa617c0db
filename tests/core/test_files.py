"""Files that are never half-written and never executed."""

import json
import os
import stat

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given

from bayesify._core.files import (
    FileError,
    fingerprint,
    open_tensors,
    pack,
    read_json,
    read_tensors,
    remove_temporaries,
    unpack,
    write_atomically,
    write_tensors,
)


def test_a_file_is_written_and_replaced(tmp_path):
    path = tmp_path / "folder" / "file"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(path.parent) == ["file"]


def test_others_may_read_it_as_any_other_file(tmp_path):
    write_atomically(tmp_path / "ours", b"")
    (tmp_path / "plain").write_bytes(b"")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("ours", "plain")}
    assert len(modes) == 1


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
@pytest.mark.parametrize("function", ["replace", "fsync"])
def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch, function, error):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fail(*_):
        raise error

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(type(error)):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def test_tensors_come_back_bit_for_bit(tmp_path):
    tensors = {str(dtype): (10 * torch.randn(3, 4)).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 3), "transposed": torch.randn(3, 4).T}
    tensors |= {"nan": torch.tensor([torch.nan, torch.inf, -0.0])}
    tensors |= {"view": tensors["transposed"][1:]}  # shares memory
    write_tensors(tmp_path / "t", tensors, {"epoch": 3, "note": "ü"})
    found, metadata = read_tensors(tmp_path / "t")
    assert metadata == {"epoch": 3, "note": "ü"}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert fingerprint(found[name]) == fingerprint(tensor), name


def test_no_tensors_are_a_file_too(tmp_path):
    write_tensors(tmp_path / "t", {})
    assert read_tensors(tmp_path / "t") == ({}, {})


def test_fingerprints_tell_values_shapes_and_types_apart():
    x = torch.arange(6.0)
    others = [x.reshape(2, 3), x.double(), x + 1e-6, x.flip(0), torch.zeros(0), torch.zeros(0, 2), torch.zeros(())]
    marks = [fingerprint(t) for t in [x, *others]]
    assert len(set(marks)) == len(marks)
    assert fingerprint(torch.arange(12.0)[::2]) == fingerprint(torch.arange(12.0)[::2].clone())


@pytest.mark.parametrize("keep", [0, 4, 40, -1])
def test_truncated_tensors_say_so(tmp_path, keep):
    path = tmp_path / "t.safetensors"
    write_tensors(path, {"a": torch.randn(100)})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(FileError, match=r"t\.safetensors is damaged .* copy it again"):
        read_tensors(path)


def test_tensors_with_a_damaged_header_say_so(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "t", {"json": "{not json"})
    with pytest.raises(FileError, match="damaged"):
        read_tensors(tmp_path / "t")


def damaged(content, place, bit):
    return content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]


def test_every_flipped_bit_of_a_file_of_tensors_is_refused_or_harmless(tmp_path):
    path, tensors = tmp_path / "t", {"a": torch.randn(3), "b": torch.arange(3), "c": torch.ones(2, 1) > 0}
    write_tensors(path, tensors, {"epoch": 3, "nll": torch.nan, "pairs": {1: 2}})
    content, refused = path.read_bytes(), 0
    for place in range(len(content)):
        path.write_bytes(damaged(content, place, place % 8))
        try:
            found, metadata = read_tensors(path, sealed=True)
        except FileError:
            refused += 1
            continue
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
        assert str(metadata) == "{'epoch': 3, 'nll': nan, 'pairs': {'1': 2}}"
    assert refused > 0.9 * len(content)  # a space of the header's may become a tab


def test_exchanged_tensors_and_files_are_refused(tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    tensors = {"a": torch.zeros(3), "b": torch.ones(3)}
    write_tensors(tmp_path / "t", tensors)
    with safe_open(tmp_path / "t", framework="pt") as file:
        header = file.metadata()
    save_file({"a": tensors["b"], "b": tensors["a"]}, tmp_path / "exchanged", header)
    with pytest.raises(FileError, match="the values of 'a' were changed or damaged"):
        read_tensors(tmp_path / "exchanged")
    found, _, marks = open_tensors(tmp_path / "exchanged")  # values are not looked at
    assert (found["a"].tolist(), marks.keys()) == ([1, 1, 1], {"a", "b"})
    save_file(tensors, tmp_path / "unsealed")
    assert read_tensors(tmp_path / "unsealed")[0].keys() == {"a", "b"}  # somebody else's file
    for sealed in (True, "0123456789abcdef"):
        with pytest.raises(FileError, match=r"unsealed is not what was written: its header"):
            read_tensors(tmp_path / "unsealed", sealed=sealed)
    assert read_tensors(tmp_path / "t", sealed=json.loads(header["sealed"])["seal"])[0].keys() == {"a", "b"}
    with pytest.raises(FileError, match="or it is another file"):
        read_tensors(tmp_path / "t", sealed="0123456789abcdef")


def test_only_our_own_old_temporary_files_are_removed(tmp_path):
    names = [".t.bin.0123abcd", ".t.bin.0123abcg", ".t.bin.0123abcd1", "t.bin.0123abcd", ".u.bin.0123abcd", "t.bin"]
    for name in names:
        (tmp_path / name).write_bytes(b"")
    remove_temporaries(tmp_path, r"t\.bin")
    assert set(os.listdir(tmp_path)) == set(names)  # somebody may be writing it now
    remove_temporaries(tmp_path, r"t\.bin", older=0)
    assert set(os.listdir(tmp_path)) == set(names[1:])


def test_a_write_flushes_the_file_and_then_its_folder(tmp_path, monkeypatch):
    flushed, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (flushed.append(stat.S_ISDIR(os.fstat(file).st_mode)), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda *paths: (flushed.append("replace"), replace(*paths)))
    write_atomically(tmp_path / "folder" / "file", b"")
    assert flushed == [True, False, "replace", True]


def test_missing_files_say_so(tmp_path):
    with pytest.raises(FileError, match=r"There is no file .*nothing"):
        read_tensors(tmp_path / "nothing")
    with pytest.raises(FileError, match=r"There is no file .*folder with config\.json"):
        read_json(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"a": ', "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[1, 2]", "holds a list"),
        (b"", "not valid"),
        (b'{"a": 1, "a": 2}', "a key is there twice"),
        (b'{"a": NaN}', "NaN is no setting"),
        (b'{"a": %s1}' % (b"[" * 100_000), "nested too deeply"),
        (b'{"a": 1%s}' % (b"0" * 5000), "not valid JSON"),
    ],
)
def test_wrong_json_says_so(tmp_path, content, sentence):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(FileError, match=sentence):
        read_json(tmp_path / "config.json")


# -- pack and unpack ------------------------------------------------------------------------------------------

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    hnp.arrays(
        st.sampled_from([np.float64, np.float32, np.int64, np.uint8, np.uint32, np.bool_]), hnp.array_shapes(min_dims=0)
    ),
    st.lists(st.integers(-9, 9)).map(lambda v: torch.tensor(v, dtype=torch.int64)),
    st.floats(width=32, allow_nan=False).map(torch.tensor),
)
# Few keys, so that names such as a.b, and b inside a, or 1 and "1", meet.
KEYS = st.one_of(st.integers(0, 2), st.sampled_from(["a", "b", "a.b", "0", "tensor", "pairs", "a_"]), st.none())
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)


def same(left, right):
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            same(a, b)
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert left.tobytes() == right.tobytes()
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    else:
        assert left == right


@example({1: torch.zeros(1), "1": torch.ones(1)})
@example({"a.b": torch.zeros(1), "a": {"b": torch.ones(1), "b_": torch.ones(2)}})
@given(TREES)
@pytest.mark.slow
def test_unpack_undoes_pack_through_json(tree):
    tensors = {}
    text = json.dumps(pack(tree, tensors, "state"))
    same(unpack(json.loads(text), tensors), tree)


def test_an_optimizer_goes_through_a_file(tmp_path):
    parameter = torch.nn.Parameter(torch.randn(3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.sum().backward()
    optimizer.step()
    tensors = {}
    packed = pack(optimizer.state_dict(), tensors, "optimizer")
    write_tensors(tmp_path / "t", tensors, {"tree": packed})
    found, metadata = read_tensors(tmp_path / "t")
    same(unpack(metadata["tree"], found), optimizer.state_dict())


@pytest.mark.parametrize(("tree", "kind"), [({"a": {1, 2}}, "set"), ([lambda: 0], "function"), ({(1, 2): 0}, "tuple")])
def test_what_json_cannot_hold_is_refused(tree, kind):
    with pytest.raises(TypeError, match=f"{kind} cannot be written"):
        pack(tree, {}, "state")
