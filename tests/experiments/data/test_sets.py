from __future__ import annotations

import hashlib
import io
import json
import re

import numpy as np
import pytest
import torch

from experiments.data import _table, load, sets
from experiments.data.files import File
from tests.experiments.data.makers import (
    cifar_images,
    cifar_records,
    cifar_tar,
    cifar_zip,
    idx_bytes,
    sha256,
    write,
)


def put(root, file: File, content: bytes, *, suffix: str = "") -> File:
    """Write a tiny stand-in and return its description."""
    write(root / (file.path + suffix), content)
    return File(file.path, sha256(content), file.url, file.gz)


def put_idx(root, key, n, monkeypatch):
    images = np.arange(n * 4, dtype=np.uint8).reshape(n, 2, 2)
    labels = np.arange(n, dtype=np.uint8)
    first, second = _table.IDX[key]
    made = (
        put(root, first, idx_bytes(images), suffix=".gz"),
        put(root, second, idx_bytes(labels)),
    )
    monkeypatch.setitem(_table.IDX, key, made)


def test_mnist_validates_on_the_last_training_images(tmp_path, monkeypatch):
    monkeypatch.setattr(sets, "VAL_MNIST", 3)
    put_idx(tmp_path, ("mnist", "train"), 10, monkeypatch)
    put_idx(tmp_path, ("mnist", "test"), 4, monkeypatch)
    assert load("mnist", "train", root=tmp_path).targets.tolist() == [0, 1, 2, 3, 4, 5, 6]
    val = load("mnist", "val", root=tmp_path)
    assert val.targets.tolist() == [7, 8, 9]
    assert torch.equal(val.inputs[0, 0], torch.tensor([[28.0, 29.0], [30.0, 31.0]]) / 255)
    assert load("mnist", "test", root=tmp_path).targets.tolist() == [0, 1, 2, 3]


def test_a_missing_set_is_downloaded_by_its_table(tmp_path, monkeypatch):
    put_idx(tmp_path / "far", ("notmnist", "test"), 4, monkeypatch)
    opened = []

    def opener(url: str) -> io.BytesIO:
        opened.append(url)
        name = "notmnist/" + url.rpartition("/")[2]
        near = tmp_path / "far" / name
        content = near if near.exists() else near.with_suffix("")
        packed = write(tmp_path / "packed.gz", content.read_bytes())
        return io.BytesIO((near if near.exists() else packed).read_bytes())

    split = load("notmnist", "test", root=tmp_path / "root", opener=opener)
    assert split.targets.tolist() == [0, 1, 2, 3]
    commit = "17823f4d4a3acd8317c07866702d2eb2ac79c7a0"
    assert [url.partition(commit)[2] for url in opened] == [
        "/t10k-images-idx3-ubyte.gz",
        "/t10k-labels-idx1-ubyte.gz",
    ]


@pytest.mark.parametrize("layout", ["zip", "tar", "bin"])
def test_cifar10_validates_on_the_first_test_images(tmp_path, monkeypatch, layout):
    monkeypatch.setattr(sets, "VAL_CIFAR10", 2)
    monkeypatch.setattr(sets, "CIFAR10_BATCH", 5)
    images, labels = cifar_images(5)
    folder = tmp_path / "cifar10"
    if layout == "zip":
        path = cifar_zip(folder / "test_batch.zip", images, labels)
        made = File("cifar10/test_batch.zip", sha256(path.read_bytes()))
        monkeypatch.setitem(_table.CIFAR10_ZIPS, "test_batch", made)
    elif layout == "tar":
        records = {"cifar-10-batches-bin/test_batch.bin": cifar_records(images, labels)}
        path = cifar_tar(folder / "cifar-10-binary.tar.gz", records)
        digest = "md5:" + hashlib.md5(path.read_bytes()).hexdigest()
        monkeypatch.setattr(sets, "CIFAR10", File("cifar10/cifar-10-binary.tar.gz", digest))
    else:
        write(folder / "test_batch.bin", cifar_records(images, labels))
    everything = load("cifar10", "all-test", root=tmp_path)
    assert torch.equal(everything.inputs, torch.from_numpy(images).float() / 255)
    assert load("cifar10", "val", root=tmp_path).targets.tolist() == labels[:2].tolist()
    test = load("cifar10", "test", root=tmp_path)
    assert torch.equal(test.inputs, everything.inputs[2:])
    if layout == "bin":
        write(folder / "test_batch.bin", cifar_records(images[:4], labels[:4]))
        with pytest.raises(ValueError, match="4 images of the test part instead of 5"):
            load("cifar10", "val", root=tmp_path)
    else:
        path.write_bytes(path.read_bytes() + b"!")
        with pytest.raises(ValueError, match="damaged or another version"):
            load("cifar10", "val", root=tmp_path)


def test_uci_gives_the_fold_in_float32(tmp_path, monkeypatch):
    buffer = io.BytesIO()
    test_idx = np.array([[0], [2]])
    np.savez(buffer, x=np.arange(6.0).reshape(3, 2), y=np.arange(3.0), test_idx=test_idx)
    monkeypatch.setitem(_table.UCI, "yacht", put(tmp_path, _table.UCI["yacht"], buffer.getvalue()))
    test = load("uci/yacht", "test", root=tmp_path, fold=1)
    assert test.inputs.dtype == test.targets.dtype == torch.float32
    assert (test.inputs.tolist(), test.targets.tolist()) == ([[4.0, 5.0]], [[2.0]])
    assert load("uci/yacht", root=tmp_path).targets.tolist() == [[1.0], [2.0]]
    with pytest.raises(ValueError, match=r"splits \['train', 'test'\], not 'val'; cut .*hold_out"):
        load("uci/yacht", "val", root=tmp_path)


def test_texts_and_omniglot(tmp_path, monkeypatch):
    sst2 = put(tmp_path, _table.SST2["val"], b"good\t1\n", suffix=".gz")
    monkeypatch.setitem(_table.SST2, "val", sst2)
    assert list(load("sst2", "val", root=tmp_path)) == [("good", 1)]
    parts = {"train": [["t", "pay"]], "oos_val": [["o", "oos"]]}
    clinc = put(tmp_path, _table.CLINC150, json.dumps(parts).encode())
    monkeypatch.setattr(sets, "CLINC150", clinc)
    assert list(load("clinc150", "oos-val", root=tmp_path)) == [("o", -1)]
    buffer = io.BytesIO()
    np.savez(buffer, x=np.full((2, 28, 28), 255, np.uint8), y=np.array([4, 1], np.int32))
    monkeypatch.setattr(sets, "OMNIGLOT", put(tmp_path, _table.OMNIGLOT, buffer.getvalue()))
    omniglot = load("omniglot", "test", root=tmp_path)
    assert torch.equal(omniglot.inputs, torch.ones(2, 1, 28, 28))
    assert omniglot.targets.tolist() == [4, 1]


def test_wrong_names_splits_and_folds_are_described(tmp_path):
    with pytest.raises(ValueError, match="no set 'minst'; the sets are mnist, "):
        load("minst")
    with pytest.raises(ValueError, match=r"notmnist has the splits \['test'\], not 'train'"):
        load("notmnist", "train")
    with pytest.raises(ValueError, match="fold is for the UCI sets only"):
        load("digits", fold=1)
    for name in ("omniglot", "uci/energy"):
        with pytest.raises(FileNotFoundError, match=r"put it at .*npz, content sha256:"):
            load(name, "test", root=tmp_path)


def test_the_table_is_well_formed():
    files = [file for pair in _table.IDX.values() for file in pair]
    files += [_table.OMNIGLOT, _table.CIFAR10, _table.CLINC150]
    files += [*_table.CIFAR10_ZIPS.values(), *_table.UCI.values(), *_table.SST2.values()]
    assert len({file.path for file in files}) == len({file.digest for file in files}) == len(files)
    for file in files:
        assert re.fullmatch(r"sha256:[0-9a-f]{64}|md5:[0-9a-f]{32}", file.digest)
        assert not file.path.startswith("/")
