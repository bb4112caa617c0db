from __future__ import annotations

import pytest
import torch

from bayesify.data import Scale, Split, hold_out, standardise


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
