from __future__ import annotations

import numpy as np
import pytest
import torch

from bayesify.data import Scale, Split, hold_out, read_uci, standardise

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


def test_the_scale_is_that_of_the_training_part_only():
    x = torch.randn(50, 3, dtype=torch.float64) * torch.tensor([1.0, 20.0, 0.3]) + 5
    x[:, 1] = 0.1  # a constant column, whose computed deviation is not exactly zero
    train, test = Split(x[:40], x[:40, :1] * 2), Split(x[40:] + 100, x[40:, :1])
    done = standardise(train, test)
    scaled, shifted = done.splits
    assert torch.allclose(scaled.inputs.mean(0), torch.zeros(3, dtype=torch.float64), atol=1e-12)
    expected = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    assert torch.allclose(scaled.inputs.std(0, correction=0), expected)
    assert torch.allclose(done.inputs.undo(shifted.inputs), test.inputs)
    assert torch.allclose(shifted.inputs, (test.inputs - x[:40].mean(0)) / done.inputs.std)
    assert torch.allclose(done.targets.std, 2 * x[:40, 0].std(correction=0))
    assert done.inputs.std[1] == 1


def test_a_large_offset_is_no_constant():
    x = torch.tensor([[1.6e9], [1.6e9 + 2]], dtype=torch.float64)
    assert Scale.of(x).apply(x).tolist() == [[-1.0], [1.0]]


def test_an_empty_training_part_is_refused():
    with pytest.raises(ValueError, match="training part is empty"):
        standardise(Split(torch.zeros(0, 2), torch.zeros(0, 1)))


def test_hold_out_cuts_pairs_without_overlap():
    split = Split(torch.arange(100.0)[:, None], torch.arange(100))
    rest, held = hold_out(split, 0.25, seed=3)
    assert (len(rest), len(held)) == (75, 25)
    assert sorted([*rest.targets.tolist(), *held.targets.tolist()]) == list(range(100))
    assert torch.equal(held.inputs[:, 0], held.targets.float())
    assert torch.equal(held.targets, hold_out(split, 0.25, seed=3)[1].targets)
    assert not torch.equal(held.targets, hold_out(split, 0.25, seed=4)[1].targets)
    for fraction in (0.0, 1.0, 0.001):
        with pytest.raises(ValueError, match="both parts need at least one"):
            hold_out(split, fraction, seed=0)
