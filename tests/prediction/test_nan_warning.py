"""A network that makes NaN: the prediction stays, and a warning names the module."""

import warnings

import pytest
import torch
from torch import nn

from bayesify import BayesAdapter, DeepEnsemble, Linearised, Streamlined, Views, convert, predict
from bayesify.prediction.streamlined import NoRuleError

HOW = [
    *("sampling", "mean", "streamlined", "linearised", Linearised(sketch=1), Streamlined(covariance="full")),
    *(Streamlined(engine=engine) for engine in ("moments", "principal", "margin")),
    Streamlined(engine="principal", directions=2),
]
X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


class Root(nn.Module):
    """Return the square root, which is NaN for numbers below zero."""

    def forward(self, x):
        return (x + 0.5).sqrt()


class Running(nn.Module):
    """Return the largest entry so far, for which there is no rule."""

    def forward(self, x):
        return torch.cummax(x, -1).values


def posterior(method=None, *, odd=Root, stem=nn.Identity):
    network = nn.Sequential()
    network.add_module("stem", stem())
    network.add_module("block", nn.Sequential(odd(), nn.Linear(4, 8), nn.ReLU()))
    network.add_module("head", nn.Linear(8, 3))
    return convert(network, BayesAdapter.example() if method is None else method)


@pytest.mark.parametrize("views", [None, Views("identity", lambda x: x.flip(-1))], ids=["", "views"])
@pytest.mark.parametrize("method", [None, DeepEnsemble(members=2, start="perturbed")], ids=["adapter", "members"])
@pytest.mark.parametrize("how", HOW, ids=repr)
def test_the_module_that_makes_nan_is_named(how, method, views):
    if how == "mean" and method is not None:
        pytest.skip("members have no mean")
    wrong = int((X < -0.5).any(1).sum())
    assert 0 < wrong < 5
    with pytest.warns(
        UserWarning, match=rf"NaN for {wrong} of 5 inputs that are not.*Module 'block.0' is the first"
    ) as caught:
        found = predict(posterior(method), X, how=how, views=views)
    assert caught[-1].filename == __file__
    assert torch.equal(found.probs.isnan().any(1), (X < -0.5).any(1))


def test_rows_that_are_right_and_inputs_that_are_nan_are_no_reason():
    made = posterior()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predict(made, X.abs())
        predict(made, torch.full((2, 4), torch.nan))


def test_a_member_that_makes_nan_is_named():
    made = posterior(DeepEnsemble(members=3, start="perturbed"), odd=nn.Tanh)
    with torch.no_grad():
        made.law.member_tensors(2)["block.1.weight"].fill_(torch.nan)
    for how in ("sampling", "streamlined"):
        with pytest.warns(UserWarning, match=r"NaN for 5 of 5 .* Module 'block\.1' of member 2 is the first"):
            predict(made, X, how=how)


def test_a_draw_that_makes_nan_is_named():
    made = posterior(odd=nn.Tanh)
    with torch.no_grad():
        made.law.log_std.as_dict()["head.weight"].fill_(200.0)  # whose exponential is infinite
    with pytest.warns(UserWarning, match=r"Module 'head' is the first that makes NaN, in draws alone: the noise"):
        predict(made, X)


@pytest.mark.parametrize("how", HOW, ids=repr)
def test_an_operation_without_a_rule_is_named_or_another_way_is_taken(how):
    made = posterior(odd=Running, stem=lambda: nn.Linear(4, 4))
    forward = isinstance(how, Streamlined) and (how.engine == "moments" or how.covariance != "none")
    if forward:
        with pytest.raises(NoRuleError, match=r"cummax in module 'block\.0' has no rule .* how='streamlined'"):
            predict(made, X, how=how)
        return
    found = predict(made, X, how=how)
    assert bool(torch.isfinite(found.probs).all())
    assert how in ("sampling", "mean") or "backward pass" in found.predictor


@pytest.mark.parametrize("how", HOW, ids=repr)
def test_an_empty_batch_says_so(how):
    with pytest.raises(ValueError, match=r"the inputs are empty\. Check the loader or the tensor"):
        predict(posterior(), X[:0], how=how)
