"""Members that learn: each recipe, from one network to one posterior that predicts, calibrates and is saved."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bayesify import (
    ABNN,
    IBNN,
    MAP,
    SGLD,
    BayesAdapter,
    DeepEnsemble,
    MCDropout,
    calibrate,
    convert,
    ensemble,
    fit,
    fit_members,
    load,
    predict,
    sample_bank,
    save,
)
from bayesify.laws import Draw, Key

X = torch.randn(48, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].argmax(1)
FEW = {"epochs": 2, "lr": 0.05}


def network():
    made = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
    ).double()
    made.train()(X)
    return made.eval()


def loader():
    return DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True)


def fitted(method, plain, **options):
    posterior = convert(plain, method, **options)
    fit(posterior, loader(), progress=False, accuracy_tolerance=1.0)
    return posterior.eval()


def sampled(plain):
    chain = fitted(SGLD.cyclical(2, epochs=2), plain)
    return ensemble([convert(plain, MAP()), chain]).eval()


# What a user writes, and how many members, with temperatures of their own, it gives.
RECIPES = {
    "restarts": (lambda plain: fitted(DeepEnsemble.restarts(2, **FEW), plain), 3),
    "heads": (lambda plain: fitted(DeepEnsemble.heads(2, **FEW), plain, include=["3", "4", "6"]), 3),
    "cyclical": (sampled, 3),
    "iBNN": (lambda plain: fitted(IBNN.retrained(3, **FEW), plain), 3),
    "ABNN": (lambda plain: fitted(ABNN.retrained(3, **FEW), plain), 3),
    "BayesAdapter": (
        lambda plain: fit_members(plain, BayesAdapter.retrained(**FEW), loader(), members=2, progress=False), 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_one_posterior_with_a_temperature_for_each_member(recipe, tmp_path):
    plain = network()
    before = copy.deepcopy(plain.state_dict())
    make, parts = RECIPES[recipe]
    posterior = make(plain)
    assert all(torch.equal(value, before[name]) for name, value in plain.state_dict().items())
    calibrate(posterior, loader(), temperatures="each", pooling="log-probs")
    assert posterior.likelihood.temperature.shape == (parts,)
    prediction = predict(posterior, X)
    assert prediction.epistemic.min() >= 0
    assert prediction.epistemic.max() > 1e-6  # members differ
    save(posterior, tmp_path)
    again = predict(load(tmp_path, plain), X)
    assert torch.equal(again.probs, prediction.probs)
    assert torch.equal(again.epistemic, prediction.epistemic)


def test_the_kept_network_is_a_member_as_it_is():
    plain = network()
    posterior = fitted(DeepEnsemble.restarts(2, **FEW), plain)
    outputs = [posterior.evaluate(X, [Key(0, index, (index,))])[0] for index in range(3)]
    assert torch.equal(outputs[0], plain(X))
    assert not torch.allclose(outputs[1], outputs[0])
    assert not torch.allclose(outputs[2], outputs[1])
    average = torch.stack([each.softmax(-1) for each in outputs]).mean(0)
    assert torch.allclose(predict(posterior, X).probs, average, atol=1e-12)


def test_a_restart_is_plain_training_from_the_network():
    plain = network()
    together = fitted(DeepEnsemble.restarts(1, **FEW), plain)
    settings = {"weight_decay": 5e-4, "schedule": "cosine", **FEW}
    alone = fitted(MAP(**settings), plain)
    own = together.law.part(1).own.as_dict()
    state = {**dict(alone.network.named_parameters()), **dict(alone.network.named_buffers())}
    assert own.keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in own.items())


def test_members_with_a_shared_trunk_train_as_they_would_alone():
    """One stage for all, in which the trunk runs once, takes the steps that a member takes with the trunk frozen."""
    plain, batches = network(), [(X[start : start + 16], Y[start : start + 16]) for start in (0, 16, 32)]
    posterior = convert(plain, DeepEnsemble.heads(2, start="network", **FEW), include=["3", "4", "6"])
    fit(posterior, batches, num_data=48, progress=False, accuracy_tolerance=1.0)
    alone = copy.deepcopy(plain)
    own = [*alone[3].parameters(), *alone[4].parameters(), *alone[6].parameters()]
    optimizer = torch.optim.SGD(own, lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    alone[4].train()
    for step, (x, y) in enumerate(batches * 2):
        optimizer.param_groups[0]["lr"] = 0.05 * 0.5 * (1 + math.cos(math.pi * step / 6))
        optimizer.zero_grad()
        nn.functional.cross_entropy(alone(x), y).backward()
        optimizer.step()
    expected = {**dict(alone.named_parameters()), **dict(alone.named_buffers())}
    for index in (1, 2):
        tensors = posterior.law.part(index).own.as_dict()
        assert sorted(tensors) == sorted(name for name in expected if name.partition(".")[0] in "346")
        for name, tensor in tensors.items():
            assert torch.allclose(tensor, expected[name], rtol=1e-9, atol=1e-12), name
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, posterior.network.state_dict()[name]), name  # the trunk, and the kept network


class Counted(nn.Linear):
    """A linear layer that counts its calls."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def test_the_trunk_runs_once_in_a_training_step_and_in_a_prediction():
    plain = nn.Sequential(Counted(4, 8), nn.ReLU(), Counted(8, 3)).double()
    posterior = convert(plain, DeepEnsemble.heads(3, **FEW), include="2")
    trunk, head = posterior.network[0], posterior.network[2]
    for run, heads in ((lambda: posterior.loss((X, Y), num_data=48), 3), (lambda: predict(posterior, X), 4)):
        run()
        trunk.calls = head.calls = 0
        run()
        assert (trunk.calls, head.calls) == (1, heads)
    assert not trunk.weight.requires_grad


def test_a_trunk_that_is_missing_is_asked_for():
    with pytest.raises(ValueError, match=r"include=\[\.\.\.\].*0 \(40\), 1 \(16\)"):
        convert(network(), DeepEnsemble.heads(2))


def test_snapshots_are_the_ends_of_cycles_without_noise():
    """At temperature 0 cyclical SGHMC is SGD with momentum, whose rate begins anew in each cycle."""
    plain = nn.Linear(4, 3).double()
    data = [(X[:16], Y[:16])] * 6
    posterior = convert(plain, SGLD.cyclical(2, temperature=0.0, epochs=1))
    fit(posterior, data, num_data=96, progress=False, accuracy_tolerance=1.0)
    weight, bias = (tensor.detach().clone() for tensor in (plain.weight, plain.bias))
    velocity, samples = [torch.zeros_like(weight), torch.zeros_like(bias)], []
    for step in range(6):
        rate = 0.1 * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * (step % 3) / 3, dtype=torch.float64))).item()
        one, two = weight.clone().requires_grad_(), bias.clone().requires_grad_()
        loss = nn.functional.cross_entropy(X[:16] @ one.T + two, Y[:16])
        for index, (tensor, gradient) in enumerate(
            zip((weight, bias), torch.autograd.grad(loss, (one, two)), strict=True)
        ):
            velocity[index] = 0.9 * velocity[index] - rate * (gradient + 5e-4 * tensor)
            tensor += velocity[index]
        if step % 3 == 2:
            samples.append(torch.cat([weight.flatten(), bias]))
    assert torch.allclose(posterior.law.samples, torch.stack(samples), rtol=1e-10, atol=1e-12)


def test_samples_with_statistics_of_their_own_become_members():
    plain = network()
    chain = fitted(SGLD.cyclical(2, epochs=2), plain)
    mixture = ensemble([chain, convert(plain, MAP())]).eval()
    assert len(mixture.law.parts) == 3
    for index, key in enumerate(chain.keys(2, 0)):
        assert torch.allclose(mixture.evaluate(X, [Key(0, 0, (index,))]), chain.evaluate(X, [key]), atol=1e-12)
    assert torch.equal(mixture.evaluate(X, [Key(0, 0, (2,))])[0], plain(X))
    bank = sample_bank(chain, 1)
    assert len(ensemble([bank, bank]).law.parts) == 2


def test_a_bank_has_the_kept_network_and_the_members():
    plain = network()
    posterior = fitted(DeepEnsemble.restarts(2, **FEW), plain)
    bank = sample_bank(posterior, 3)
    assert torch.allclose(predict(bank, X).probs, predict(posterior, X).probs, atol=1e-12)
    kept = [Draw(posterior, key).network()(X) for key in posterior.keys(3, 0) if key.path == (0,)]
    assert torch.equal(kept[0], plain(X))


def test_members_with_and_without_noise_have_equal_shares():
    plain = nn.Linear(4, 3).double()
    noisy = convert(plain, BayesAdapter(start_std=(0.5, 0.5)))
    keys = ensemble([convert(plain, MAP()), noisy]).keys(8, 0)
    assert [key.path[0] for key in keys] == [0] * 4 + [1] * 4
    assert len({key.index for key in keys[4:]}) == 4


def test_members_that_learn_nothing_are_refused():
    with pytest.raises(ValueError, match=r"learns nothing.*epochs=10"):
        fit_members(network(), MCDropout(p=0.1), loader())
    with pytest.raises(ValueError, match="at least one member"):
        fit_members(network(), BayesAdapter.retrained(), loader(), members=0)
    with pytest.raises(ValueError, match="no sample has been kept"):
        ensemble([convert(network(), SGLD.cyclical(2)), convert(network(), MAP())])


def test_an_interrupted_run_of_members_goes_on(tmp_path):
    plain, method = network(), BayesAdapter.retrained(**FEW)
    options = {"members": 2, "keep_network": False, "progress": False, "accuracy_tolerance": 1.0}
    whole = fit_members(plain, method, loader(), **options)
    fit_members(plain, method, loader(), checkpoint=tmp_path, **{**options, "members": 1})
    again = fit_members(plain, method, loader(), checkpoint=tmp_path, **options)
    state = whole.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())
