from __future__ import annotations

import sys

import pytest
import torch

from bayesify.data import load, photo_patches, read_digits

SPLITS = ("train", "val", "test")


def test_the_parts_are_the_whole_set_once_and_stratified():
    from sklearn.datasets import load_digits

    parts = [read_digits(split, seed=1) for split in SPLITS]
    ours = torch.cat([part.inputs.reshape(len(part), 64) * 16 for part in parts])
    theirs = torch.from_numpy(load_digits().data).float()
    assert sorted(ours.tolist()) == sorted(theirs.tolist())
    whole = torch.from_numpy(load_digits().target).bincount()
    for part, share in zip(parts, (0.6, 0.2, 0.2), strict=True):
        counts = torch.bincount(part.targets, minlength=10)
        assert (counts - share * whole).abs().max() <= 1
        assert (part.inputs.min(), part.inputs.max()) == (0, 1)


def test_labels_stay_with_their_images():
    from sklearn.datasets import load_digits

    known = {tuple(x): y for x, y in zip(load_digits().data, load_digits().target, strict=True)}
    part = read_digits("test")
    assert [known[tuple(x.double().flatten().tolist())] for x in part.inputs * 16] == (part.targets.tolist())


def test_the_seed_decides_the_parts():
    assert torch.equal(read_digits("val").inputs, load("digits", "val").inputs)
    assert not torch.equal(read_digits("val").inputs[:50], read_digits("val", seed=1).inputs[:50])
    with pytest.raises(ValueError, match="not 'dev'"):
        read_digits("dev")


def test_patches_show_something_and_depend_on_the_seed_only():
    patches = photo_patches(200, seed=5)
    assert patches.shape == (200, 1, 8, 8)
    assert patches.dtype == torch.float32
    assert patches.min() >= 0
    assert patches.max() <= 1
    assert patches.std((1, 2, 3)).min() >= 0.05
    assert torch.equal(patches[:20], photo_patches(20, seed=5))
    assert not torch.equal(patches[:20], photo_patches(20, seed=6))
    assert len(patches.unique(dim=0)) > 190
    # Neighbouring pixels of photographs are alike, those of noise are not.
    x = patches - patches.mean((2, 3), keepdim=True)
    assert (x[..., 1:] * x[..., :-1]).mean() > 0.4 * x.square().mean()
    assert photo_patches(0, 5).shape == (0, 1, 5, 5)


@pytest.mark.parametrize(("n", "size"), [(-1, 8), (1, 1), (1, 60)])
def test_impossible_patches_are_refused(n, size):
    with pytest.raises(ValueError, match="size from 2 to 53"):
        photo_patches(n, size)


@pytest.mark.parametrize("call", [read_digits, lambda: photo_patches(1)])
def test_without_scikit_learn_the_extra_is_named(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'bayesify\[demo\]'"):
        call()
