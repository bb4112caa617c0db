from __future__ import annotations

import numpy as np
import pytest
import torch

from experiments.data import read_uci

X = np.arange(20.0).reshape(10, 2)
Y = np.arange(10.0) * 3
TEST = np.array([[8, 1], [0, 5]], dtype=np.int32)


def save(path, **changes):
    np.savez(path, **{"x": X, "y": Y, "test_idx": TEST, **changes})
    return path


def test_the_training_part_is_what_the_split_leaves(tmp_path):
    train, test = read_uci(save(tmp_path / "a.npz"), 0)
    assert test.targets[:, 0].tolist() == [24.0, 3.0]
    assert test.inputs.tolist() == [[16.0, 17.0], [2.0, 3.0]]
    assert train.targets[:, 0].tolist() == [0.0, 6.0, 9.0, 12.0, 15.0, 18.0, 21.0, 27.0]
    assert train.inputs.dtype == torch.float64
    assert read_uci(tmp_path / "a.npz", 1)[1].targets[:, 0].tolist() == [0.0, 15.0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"y": Y[:-1]}, r"expected \(n, d\), \(n,\)"),
        ({"test_idx": TEST.astype(float)}, "integers"),
        ({"test_idx": np.array([[3, 10]])}, "outside the 10 rows"),
        ({"test_idx": np.array([[3, -1]])}, "outside the 10 rows"),
        ({"test_idx": np.array([[3, 3]])}, "repeats a row"),
        ({"test_idx": np.arange(10)[None]}, "nothing to train on"),
        ({"x": np.where(X == 4, np.nan, X)}, "not finite"),
        ({"y": np.array([{}] * 10, dtype=object)}, "allow_pickle=False"),
    ],
)
def test_a_wrong_table_is_described(tmp_path, changes, says):
    with pytest.raises(ValueError, match=says):
        read_uci(save(tmp_path / "a.npz", **changes))


def test_a_wrong_file_or_fold_is_described(tmp_path):
    with pytest.raises(ValueError, match=r"splits 0\.\.1, not 2"):
        read_uci(save(tmp_path / "a.npz"), 2)
    np.savez(tmp_path / "b.npz", x=X)
    with pytest.raises(ValueError, match=r"no array 'y', only \['x'\]"):
        read_uci(tmp_path / "b.npz")
    with (tmp_path / "d.npz").open("wb") as file:
        np.save(file, X)
    with pytest.raises(ValueError, match="it holds a single array"):
        read_uci(tmp_path / "d.npz")
    with pytest.raises(FileNotFoundError):
        read_uci(tmp_path / "absent.npz")
    (tmp_path / "c.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:300])
    with pytest.raises(ValueError, match="cannot be read as an npz file"):
        read_uci(tmp_path / "c.npz")
