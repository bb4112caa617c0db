"""ABNN's members in one pass: the moments of a naive loop over members, to first order."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

from bayesify import ABNN, Categorical, DeepEnsemble, Streamlined, check, convert, predict
from bayesify.prediction.one_pass import one_pass_of
from tests.prediction.linearised.networks import randn

MATCHED = Streamlined(members="matched", sketch=0)
NORMS = ("1", "4")


def make_network(classes=2):
    torch.manual_seed(0)
    return (
        nn.Sequential(
            *(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.GroupNorm(1, 5), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, classes)),
        )
        .double()
        .eval()
    )


def make_members(apart, alpha=0.02, members=3, classes=2):
    """Return a posterior whose members' scales and shifts are so far apart."""
    posterior = convert(make_network(classes), ABNN(members=members, alpha=alpha))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for index in range(members):
            for name, tensor in posterior.law.member_tensors(index).items():
                assert name.partition(".")[0] in NORMS
                tensor += apart * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    return posterior


def naive(posterior, inputs, alpha, members):
    """Return mean and covariance of the outputs to first order, from dense derivatives."""
    network = posterior.network
    each = [dict(posterior.law.member_tensors(index)) for index in range(members)]
    mean = {name: sum(one[name].detach() for one in each) / members for name in each[0]}
    noise = {f"{norm}.weight": torch.zeros_like(mean[f"{norm}.weight"]) for norm in NORMS}

    def outputs(tensors, eps):
        noisy = {name: tensors[name] * (1 + alpha * e) for name, e in eps.items()}
        return functional_call(network, {**tensors, **noisy}, (inputs,))

    moved, drawn = jacrev(outputs, argnums=(0, 1))(mean, noise)
    columns = [sum((moved[name] * (one[name] - mean[name])).sum(-1) for name in mean) for one in each]
    covariance = sum(column[:, :, None] * column[:, None] for column in columns) / members
    covariance = covariance + sum(torch.einsum("bcp,bdp->bcd", one, one) for one in drawn.values())
    return outputs(mean, noise), covariance


def test_one_pass_has_the_moments_of_a_loop_over_members():
    posterior, x = make_members(0.05), randn(6, 2, 7, 7)
    outputs, covariance = naive(posterior, x, 0.02, 3)
    difference = torch.tensor([1.0, -1.0], dtype=torch.float64)
    expected = torch.einsum("c,bcd,d->b", difference, covariance, difference)
    one = one_pass_of(posterior, MATCHED, x)
    assert not one.looped  # over examples, which costs as much as all members
    with torch.no_grad():
        (found,) = one.moments(x)
    torch.testing.assert_close(found.mean, outputs.detach(), rtol=1e-10, atol=1e-12)
    own = torch.einsum("c,bcd,d->b", difference, found.covariance, difference)
    torch.testing.assert_close(own.detach(), expected.detach(), rtol=1e-9, atol=1e-14)
    assert len(one_pass_of(posterior, Streamlined(sketch=0), x).moments(x)) == 3


def test_members_that_are_one_have_their_noise_alone():
    posterior, x = make_members(0.0), randn(4, 2, 7, 7)
    one, each = (predict(posterior, x, how=how) for how in (MATCHED, Streamlined(sketch=0)))
    torch.testing.assert_close(one.logits_variance, each.logits_variance, rtol=1e-9, atol=1e-14)
    torch.testing.assert_close(one.probs, each.probs, rtol=1e-9, atol=1e-12)


def test_near_members_are_as_draws_say():
    posterior, generator = make_members(0.05, classes=4), torch.Generator().manual_seed(0)
    x = torch.randn(120, 2, 7, 7, dtype=torch.float64, generator=generator)
    how = Streamlined(members="matched", directions=3)
    found = check(posterior, [x], how=how, num_draws=300)
    assert 0.8 < found.variance_ratio < 1.25
    assert found.rank_correlation > 0.9
    assert 0.8 < found.median_epistemic_ratio < 1.25
    assert found.advice.startswith("Trust")
    assert "with 3 directions that all weights share" in found.predictor


def test_members_that_are_too_far_apart_are_told():
    posterior, x = make_members(3.0, classes=4), randn(30, 2, 7, 7)
    found = check(posterior, [x], how=Streamlined(members="matched"), num_draws=30)
    assert not found.advice.startswith("Trust")
    assert "Members may be too far apart for one Gaussian" in found.advice


def test_refusals():
    x = randn(2, 2, 7, 7)
    ensemble = convert(make_network(), DeepEnsemble(members=2, start="perturbed", perturb_std=0.1))
    with pytest.raises(ValueError, match=r"differ in '0\.weight', which is no scale or shift"):
        predict(ensemble, x, how=MATCHED)
    with pytest.raises(ValueError, match="Weights move together here"):
        predict(make_members(0.05), x, how=Streamlined(engine="moments", members="matched"))
    with pytest.raises(ValueError, match="members must be one of"):
        Streamlined(members="some")
    likelihood = Categorical()
    likelihood.temperature = torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64)
    tempered = make_members(0.05)
    tempered.likelihood = likelihood
    with pytest.raises(ValueError, match="temperatures of their own"):
        predict(tempered, x, how=MATCHED)
