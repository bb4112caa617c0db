"""A network that makes NaN: the prediction stays, and a warning names the module."""

import warnings

import pytest
import torch
from torch import nn

from bayesify import BayesAdapter, Streamlined, convert, predict

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


class Root(nn.Module):
    """Return the square root, which is NaN for numbers below zero."""

    def forward(self, x):
        return (x + 0.5).sqrt()


def posterior():
    network = nn.Sequential()
    network.add_module("stem", nn.Identity())
    network.add_module("block", nn.Sequential(Root(), nn.Linear(4, 8), nn.ReLU()))
    network.add_module("head", nn.Linear(8, 3))
    return convert(network, BayesAdapter.example())


@pytest.mark.parametrize("how", ["sampling", "mean", "streamlined", Streamlined(engine="moments"), "linearised"])
def test_the_module_that_makes_nan_is_named(how):
    wrong = int((X < -0.5).any(1).sum())
    assert 0 < wrong < 5
    with pytest.warns(
        UserWarning, match=rf"NaN for {wrong} of 5 inputs that are not.*Module 'block.0' is the first"
    ) as caught:
        found = predict(posterior(), X, how=how)
    assert caught[-1].filename == __file__
    assert torch.equal(found.probs.isnan().any(1), (X < -0.5).any(1))


def test_rows_that_are_right_and_inputs_that_are_nan_are_no_reason():
    made = posterior()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predict(made, X.abs())
        predict(made, torch.full((2, 4), torch.nan))


def test_an_empty_batch_says_so():
    for how in ("sampling", "mean", "streamlined", "linearised"):
        with pytest.raises(ValueError, match=r"the inputs are empty\. Check the loader or the tensor"):
            predict(posterior(), X[:0], how=how)
