from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from bayesify.data import Split


def test_a_loader_gives_the_same_batches_as_a_tensor_dataset():
    split = Split(torch.randn(7, 2), torch.arange(7))
    ours = list(DataLoader(split, batch_size=3))
    theirs = list(DataLoader(TensorDataset(*split.tensors), batch_size=3))
    assert [y.tolist() for _, y in ours] == [[0, 1, 2], [3, 4, 5], [6]]
    for (x, y), (other_x, other_y) in zip(ours, theirs, strict=True):
        assert torch.equal(x, other_x)
        assert torch.equal(y, other_y)


def test_parts_keep_pairs():
    split = Split(torch.arange(5.0)[:, None], torch.arange(5))
    assert split.part(slice(-2, None)).targets.tolist() == [3, 4]
    assert split.part(torch.tensor([4, 0])).inputs[:, 0].tolist() == [4.0, 0.0]


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="3 inputs but 2 targets"):
        Split(torch.zeros(3, 1), torch.zeros(2))
    with pytest.raises(ValueError, match="first dimension"):
        Split(torch.tensor(1.0), torch.tensor(1.0))
