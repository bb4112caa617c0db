"""Members: each is its own network, and the mixture is even."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayesify import DeepEnsemble, MCDropout, convert, ensemble, predict
from bayesify.laws import Key
from tests.laws.networks import mlp

X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()


def test_a_members_pass_is_that_networks():
    networks = [network() for _ in range(3)]
    for each in networks:
        each.train()(torch.randn(20, 4, dtype=torch.float64))  # statistics of its own
        each.eval()
    posterior = ensemble(networks)
    for index, each in enumerate(networks):
        with posterior.member(index):
            assert torch.equal(posterior(X), each(X))
            with posterior.mean():
                assert torch.equal(posterior(X), each(X))
        with posterior.drawn(Key(0, 9, (index,))):
            assert torch.equal(posterior(X), each(X))
    outs = {posterior(X).sum().item() for _ in range(60)}
    assert outs == {each(X).sum().item() for each in networks}  # missing one: 3 (2/3)^60 < 1e-10


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_keys_of_plain_members_are_each_taken_once(count):
    posterior = convert(network(), DeepEnsemble(members=4))
    members = [key.path[0] for key in posterior.keys(count, seed=3)]
    assert len(members) == len(set(members)) == min(count, 4)


@pytest.mark.parametrize("count", [1, 3, 4, 7, 30])
def test_keys_of_random_members_are_balanced(count):
    posterior, _ = noisy_members(4)
    keys = posterior.keys(count, seed=1)
    counts = Counter(key.path[0] for key in keys)
    assert len(keys) == len(set(keys)) == count
    assert max(counts.values()) - min(counts.get(m, 0) for m in range(4)) <= 1
    assert len({key.index for key in keys}) == count  # no two draws share their masks
    orders = {tuple(key.path[0] for key in posterior.keys(1, seed)) for seed in range(50)}
    assert len(orders) == 4  # the seed decides who gets one more; missing one: 4 (3/4)^50 < 1e-5


def test_training_a_member_changes_no_other():
    posterior = convert(network().train(), DeepEnsemble(members=3, start="network"))
    before = {name: tensor.clone() for name, tensor in posterior.state_dict().items()}
    with posterior.member(1):
        optimizer = torch.optim.SGD(posterior.parameters(), lr=0.1)
        posterior.loss((X, torch.arange(6) % 3), num_data=6).total.backward()
        optimizer.step()
    changed = {name for name, tensor in posterior.state_dict().items() if not torch.equal(tensor, before[name])}
    assert {name.split(".")[2] for name in changed} == {"1"}
    same = {name for name in before if name.startswith("law.parts.1.")} - changed
    assert same <= {"law.parts.1.own.0.bias"}  # before a batch norm, which takes it off: its gradient is rounding


def test_the_loss_without_a_member_is_the_mean_over_members():
    posterior = convert(network().eval(), DeepEnsemble(members=3))
    targets = torch.arange(6) % 3
    losses = []
    for index in range(3):
        with posterior.member(index):
            losses.append(F.cross_entropy(posterior(X), targets))
    total = posterior.loss((X, targets), num_data=6).total
    torch.testing.assert_close(total, torch.stack(losses).mean())


def test_there_is_no_mean_network():
    posterior = convert(network().eval(), DeepEnsemble(members=2))
    with pytest.raises(ValueError, match=r"no mean network.*how='sampling'"), posterior.mean():
        pass
    with pytest.raises(ValueError, match="no mean network"):
        predict(posterior, X, how="mean", seed=0)
    with pytest.raises(IndexError, match="no member 2: there are 2"), posterior.member(2):
        pass


def test_start():
    plain = network()
    weight = plain[0].weight
    same = convert(plain, DeepEnsemble(members=2, start="network"))
    near = convert(plain, DeepEnsemble(members=2, start="perturbed", perturb_std=0.1))
    reset = convert(plain, DeepEnsemble(members=2, start="reset"))
    again = convert(plain, DeepEnsemble(members=2, start="reset"))
    weights = [[p.law.member_tensors(m)["0.weight"] for m in range(2)] for p in (same, near, reset, again)]
    assert all(torch.equal(w, weight) for w in weights[0])
    relative = (torch.stack(weights[1]) - weight).std() / weight.square().mean().sqrt()
    assert 0.07 < relative < 0.13  # 64 normals of .1: 3.4 standard errors
    for each in weights[1:]:
        assert not torch.equal(each[0], each[1])
    assert torch.equal(weights[2][0], weights[3][0])  # the seed decides
    assert weights[2][0].abs().max() <= 0.5  # uniform on +-1/sqrt(4), as nn.Linear begins


def noisy_members(number):
    generator = torch.Generator().manual_seed(0)
    members = [convert(mlp(), MCDropout()) for _ in range(number)]
    with torch.no_grad():
        for member in members:
            member.default_draws = 3
            for name, p in member.network.named_parameters():
                if name.startswith(("3.", "6.")):
                    p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return ensemble(members), members


@pytest.mark.parametrize("chunk_size", [1, 4, None])
def test_members_of_a_noisy_posterior(chunk_size):
    posterior, members = noisy_members(3)
    assert posterior.default_draws == 9
    prediction = predict(posterior, X, seed=2, num_draws=8, chunk_size=chunk_size, keep_samples=True)
    naive = []
    for key in posterior.keys(8, 2):
        with members[key.path[0]].drawn(key.inner()) as alone:
            naive.append(alone(X).softmax(-1))
    torch.testing.assert_close(prediction.samples, torch.stack(naive), rtol=1e-12, atol=1e-12)
    with posterior.member(1), posterior.mean(), members[1].mean() as alone:
        torch.testing.assert_close(posterior(X), alone(X))


def test_networks_of_two_architectures_are_refused():
    with pytest.raises(ValueError, match=r"Network 1 differs from the first in \['weight'\]"):
        ensemble([nn.Linear(2, 3), nn.Linear(4, 3)])
    with pytest.raises(ValueError, match="at least one network"):
        ensemble([])


def test_a_module_without_reset_says_what_to_do():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

    with pytest.raises(ValueError, match=r"'\(network\)' \(Bare\) has parameters but no reset_parameters"):
        convert(Bare(), DeepEnsemble())
