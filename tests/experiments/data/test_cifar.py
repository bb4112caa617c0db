from __future__ import annotations

import io
import pickle
import zipfile

import numpy as np
import pytest

from experiments.data import read_cifar10, read_cifar10_archive, read_cifar10_file
from tests.experiments.data.makers import cifar_images, cifar_records, cifar_tar, cifar_zip, write

TRAIN = [f"data_batch_{i}" for i in range(1, 6)]


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("a pickle was run",)


def test_all_layouts_hold_the_same_images(tmp_path):
    batches = {name: cifar_images(3, seed) for seed, name in enumerate([*TRAIN, "test_batch"])}
    members = {f"cifar-10-batches-bin/{name}.bin": cifar_records(*batch) for name, batch in batches.items()}
    cifar_tar(tmp_path / "tar" / "cifar-10-binary.tar.gz", members)
    for name, batch in batches.items():
        cifar_zip(tmp_path / "zip" / f"{name}.zip", *batch)
        write(tmp_path / "flat" / f"{name}.bin", cifar_records(*batch))
        write(tmp_path / "deep" / "cifar-10-batches-bin" / f"{name}.bin", cifar_records(*batch))
    expected = np.concatenate([batches[name][0] for name in TRAIN])
    labels = np.concatenate([batches[name][1] for name in TRAIN])
    for layout in ("tar", "zip", "flat", "deep"):
        train = read_cifar10(tmp_path / layout, "train")
        assert np.array_equal(train.inputs.numpy(), expected), layout
        assert train.targets.tolist() == labels.tolist(), layout
        test = read_cifar10(tmp_path / layout, "test")
        assert np.array_equal(test.inputs.numpy(), batches["test_batch"][0]), layout


def test_the_pickle_version_is_refused_and_not_run(tmp_path):
    bomb = pickle.dumps(Bomb())
    folder = tmp_path / "cifar-10-batches-py"
    batch = write(folder / "test_batch", bomb)
    with pytest.raises(ValueError, match=r"never read: use cifar-10-binary\.tar\.gz"):
        read_cifar10_file(batch)
    with pytest.raises(FileNotFoundError, match=r"put cifar-10-binary\.tar\.gz there"):
        read_cifar10(folder, "test")
    archive = cifar_tar(tmp_path / "python.tar.gz", {"cifar-10-batches-py/test_batch": bomb})
    with pytest.raises(ValueError, match="pickle version, never read: use cifar-10-binary"):
        read_cifar10_archive(archive, "test")


def test_a_pickled_array_in_a_zip_is_refused_and_not_run(tmp_path):
    path = cifar_zip(tmp_path / "test_batch.zip", *cifar_images(2))
    buffer = io.BytesIO()
    np.save(buffer, np.array([Bomb()], dtype=object), allow_pickle=True)
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w") as bomb, zipfile.ZipFile(path) as good:
        bomb.writestr("00000.webp", good.read("00000.webp"))
        bomb.writestr("labels.npy", buffer.getvalue())
    with pytest.raises(ValueError, match=r"bomb\.zip cannot be read.*allow_pickle=False"):
        read_cifar10_file(tmp_path / "bomb.zip")


def test_damaged_batches_are_described(tmp_path):
    images, labels = cifar_images(4)
    whole = cifar_records(images, labels)
    with pytest.raises(ValueError, match="12291 bytes, not a multiple of 3073"):
        read_cifar10_file(write(tmp_path / "short.bin", whole[:-1]))
    with pytest.raises(ValueError, match="0 bytes"):
        read_cifar10_file(write(tmp_path / "empty.bin", b""))
    with pytest.raises(ValueError, match=r"labels outside 0\.\.9"):
        read_cifar10_file(write(tmp_path / "wrong.bin", b"\x0a" + whole[1:]))
    path = cifar_zip(tmp_path / "whole.zip", images, labels)
    with pytest.raises(ValueError, match="cannot be read as CIFAR-10 strips"):
        read_cifar10_file(write(tmp_path / "half.zip", path.read_bytes()[:5000]))
    with pytest.raises(ValueError, match=r"labels outside 0\.\.9"):
        read_cifar10_file(cifar_zip(tmp_path / "names.zip", images, labels.astype(str)))
    with pytest.raises(ValueError, match="4 inputs but 3 targets"):
        read_cifar10_file(cifar_zip(tmp_path / "few.zip", images, labels[:3]))
    odd = np.zeros((2, 3, 33, 32), np.uint8)
    with pytest.raises(ValueError, match=r"odd\.zip cannot be read as CIFAR-10 strips"):
        read_cifar10_file(cifar_zip(tmp_path / "odd.zip", odd, labels[:2]))
    tar = cifar_tar(tmp_path / "t.tar.gz", {"cifar-10-batches-bin/test_batch.bin": whole})
    with pytest.raises(ValueError, match=r"has no cifar-10-batches-bin/data_batch_1\.bin"):
        read_cifar10_archive(tar, "train")
    with pytest.raises(ValueError, match="cannot be read as CIFAR-10"):
        read_cifar10_archive(write(tmp_path / "half.tar", tar.read_bytes()[:9000]), "test")
    for read in (read_cifar10_file, lambda path: read_cifar10_archive(path, "test")):
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "absent.zip")
    with pytest.raises(ValueError, match=r"parts \['train', 'test'\], not 'val'"):
        read_cifar10(tmp_path, "val")
