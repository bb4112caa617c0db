from __future__ import annotations

import gzip

import numpy as np
import pytest
import torch

from experiments.data import read_idx, read_idx_split
from tests.experiments.data.makers import IDX_CODES, idx_bytes, write

PIXELS = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)


@pytest.mark.parametrize("dtype", IDX_CODES)
@pytest.mark.parametrize("name", ["a", "a.gz"])
def test_every_type_is_read_back(tmp_path, dtype, name):
    values = (np.arange(6).reshape(2, 3) * 21 - 50 * (dtype != "uint8")).astype(dtype)
    read = read_idx(write(tmp_path / name, idx_bytes(values)))
    assert read.dtype == getattr(torch, dtype)
    assert read.tolist() == values.tolist()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not an idx file: it starts with nothing"),
        (b"\x89PNG1234", "not an idx file: it starts with 89504e47"),
        (b"\0\0\x07\x01", "not an idx file"),
        (b"\0\0\x08\x00", "header ends too early"),
        (b"\0\0\x08\x03\0\0\0\1", "header ends too early"),
        (idx_bytes(PIXELS)[:-1], r"truncated: its header promises \(2, 3, 4\) .* 40 bytes.* 39"),
        (idx_bytes(PIXELS) + b"1", "too long"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "truncated"),
    ],
)
def test_a_broken_file_is_named_and_described(tmp_path, content, says):
    with pytest.raises(ValueError, match=says) as caught:
        read_idx(write(tmp_path / "broken", content))
    assert "broken" in str(caught.value)


def test_a_truncated_gzip_file_is_refused(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(idx_bytes(PIXELS))[:-9])
    with pytest.raises(ValueError, match=r"incomplete gzip file.*fetch it again"):
        read_idx(path)


def test_images_and_labels_make_a_split(tmp_path):
    images = write(tmp_path / "images", idx_bytes(PIXELS))
    labels = write(tmp_path / "labels", idx_bytes(np.array([7, 3], dtype=np.uint8)))
    split = read_idx_split(images, labels)
    assert split.inputs.shape == (2, 1, 3, 4)
    assert split.inputs[1, 0].tolist() == PIXELS[1].tolist()
    assert split.targets.dtype == torch.int64
    assert split.targets.tolist() == [7, 3]
    with pytest.raises(ValueError, match="swapped"):
        read_idx_split(labels, images)
    short = write(tmp_path / "short", idx_bytes(np.array([7], dtype=np.uint8)))
    with pytest.raises(ValueError, match="2 inputs but 1 targets"):
        read_idx_split(images, short)
