"""Loops of one's own: the loss as a module, and what methods learn beside it."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import ABNN, IBNN, IVON, SGLD, SWAG, BayesAdapter, DeepEnsemble, Laplace, Learner, MCDropout, Objective
from tests.conformance.cases import CASES, EXAMPLES, Case, loader

EXAMPLE = EXAMPLES["mlp"]
EPOCHS = 3


def train(posterior, data, *, stages=True, epochs=EPOCHS):
    """Train as a user would, with a learner."""
    objective = Objective(posterior, num_data=len(data.dataset))
    learner = Learner(objective, epochs=epochs, steps_per_epoch=len(data))
    posterior.train()
    for stage in range(len(learner.stages)) if stages else [None]:
        optimizer = learner.optimizer(stage)
        for _ in range(epochs):
            for batch in data:
                objective(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                learner.after_step()
    learner.finish(data)
    return objective


def quiet(method):
    """Return a method whose training has no fresh noise, so that `fit` and a loop see the same numbers."""
    return {
        "map": bayesify.MAP(lr=0.1, schedule="cosine"),
        "swag": SWAG(rank=2, num_bn_draws=2, snapshots_per_epoch=2, lr=0.1),
        "deep-ensemble": DeepEnsemble(members=2, lr=0.1),
        "laplace": Laplace(structure="kronecker"),
        "abnn": ABNN(members=2, alpha=0.0, lr=0.1),
    }[method]


def plain(network):
    """Return a network without dropout, which would draw in training."""
    return nn.Sequential(*(nn.Identity() if "Dropout" in type(m).__name__ else m for m in network))


@pytest.mark.parametrize("method", ["map", "swag", "deep-ensemble", "laplace", "abnn"])
def test_a_loop_of_ones_own_ends_where_fit_does(method):
    data = loader(EXAMPLE, 12, shuffle=False)
    network = plain(EXAMPLE.network())
    one, other = (bayesify.convert(network, quiet(method)) for _ in range(2))
    bayesify.fit(one, data, epochs=EPOCHS, progress=False, accuracy_tolerance=1.0)
    before = copy.deepcopy(other.state_dict())
    train(other, data)
    assert any(not torch.equal(t, before[name]) for name, t in other.state_dict().items())
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_samples_of_a_chain_are_taken_where_fit_takes_them(monkeypatch):
    monkeypatch.setattr(torch, "randint", lambda *_: torch.tensor(5))  # the sampler's seed
    data = loader(EXAMPLE, 12, shuffle=False)
    method = SGLD(samples_per_chain=4, lr=0.5, weight_decay=0.0, burn_in=0.3, schedule="polynomial", decay_steps=2)
    one, other = (bayesify.convert(plain(EXAMPLE.network()), method) for _ in range(2))
    bayesify.fit(one, data, epochs=EPOCHS, progress=False, accuracy_tolerance=1.0)
    train(other, data)
    assert len(one.law) == 4
    assert torch.equal(one.law.samples, other.law.samples)


@pytest.mark.parametrize(
    "method", [DeepEnsemble(members=3, lr=0.1), ABNN(members=3, alpha=0.0, lr=0.1)], ids=["de", "abnn"]
)
def test_members_that_train_together_go_where_they_go_alone(method):
    data = loader(EXAMPLE, 12, shuffle=False)
    alone, together = (bayesify.convert(plain(EXAMPLE.network()), method) for _ in range(2))
    train(alone, data)
    objective = train(together, data, stages=False)
    for (name, one), other in zip(alone.named_parameters(), together.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12, msg=name)
    batch = next(iter(data))
    with torch.no_grad():
        mean = torch.stack([alone_loss(together, batch, index) for index in range(3)]).mean()
        torch.testing.assert_close(objective(batch), 3 * mean)
        torch.testing.assert_close(objective.terms.total, mean)


def alone_loss(posterior, batch, index):
    with posterior.member(index):
        return posterior.loss(batch, num_data=12).total


def test_a_divergence_grows_over_the_loop():
    method = IBNN(components=2, weights="joint", anneal=0.5, beta=2.0)
    posterior = bayesify.convert(plain(EXAMPLE.network()), method)
    data = loader(EXAMPLE, 12)
    learner = Learner(Objective(posterior, num_data=12), epochs=4, steps_per_epoch=len(data))
    optimizer = learner.optimizer()
    found = [posterior.learning.kl_weight.item()]
    for _ in range(12):
        optimizer.step()
        learner.after_step()
        found.append(posterior.learning.kl_weight.item())
    assert found == pytest.approx([2 * min(1, step / 6) for step in range(13)])


# -- the objective ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_objective_is_the_loss_with_the_posteriors_tensors(case: Case):
    posterior = bayesify.convert(EXAMPLE.network(), case.noisy)
    batch = next(iter(loader(EXAMPLE)))
    torch.manual_seed(7)
    expected = posterior.loss(batch, num_data=12)
    objective = Objective(posterior, num_data=12)
    torch.manual_seed(7)
    total = objective(batch)
    assert torch.equal(total, expected.total)
    assert objective.terms == {name: value.detach() for name, value in expected.items()}
    assert not any(value.requires_grad for value in objective.terms.values())
    assert set(objective.parameters()) == set(posterior.parameters())
    assert set(objective.state_dict()) == {f"posterior.{name}" for name in posterior.state_dict()}


def test_ood_inputs_go_through_the_objective():
    posterior = bayesify.convert(nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 3)), MCDropout())
    objective = Objective(posterior, num_data=6, regularizer=bayesify.OODRegularizer(weight=3.0))
    batch, ood = (torch.randn(6, 4), torch.arange(6) % 3), torch.randn(4, 4)
    torch.manual_seed(0)
    total = objective(batch, ood)
    torch.manual_seed(0)
    terms = posterior.loss(batch, num_data=6, ood=ood, regularizer=bayesify.OODRegularizer(weight=3.0))
    assert total == terms.total
    assert list(objective.terms) == ["nll", "uncertainty"]


# -- what was forgotten ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        SWAG(rank=2),
        SGLD(samples_per_chain=2),
        Laplace(),
        IVON(),
        IBNN(),
        BayesAdapter(prior_gradient="built-in"),
        bayesify.APD(hidden=(4,), samples_per_chain=4),
    ],
    ids=lambda method: method.name,
)
def test_a_loop_that_forgets_the_learner_is_told_at_the_first_prediction(method):
    posterior = bayesify.convert(nn.Linear(4, 3), method)
    inputs = torch.randn(4, 4)
    Objective(posterior, num_data=4)((inputs, torch.arange(4) % 3)).backward()
    for call in (
        lambda: bayesify.predict(posterior, inputs),
        lambda: bayesify.calibrate(posterior, [(inputs, torch.arange(4) % 3)]),
        lambda: bayesify.predict(copy.deepcopy(posterior), inputs),
    ):
        with pytest.raises(ValueError, match=r"learner.after_step\(\) after each step, and learner.finish"):
            call()
    assert "learner.finish" in posterior.learned
    if posterior.has_mean() is True:  # of which nobody expects an uncertainty
        assert bayesify.predict(posterior, inputs, how="mean").probs.isfinite().all()


@pytest.mark.parametrize(
    "method", [MCDropout(p=0.2, insert_before="all"), BayesAdapter(), IBNN(anneal=0.0)], ids=lambda m: m.name
)
def test_where_the_loss_is_all_there_is_nothing_to_forget(method):
    posterior = bayesify.convert(nn.Linear(4, 3), method)
    inputs = torch.randn(4, 4)
    Objective(posterior, num_data=4)((inputs, torch.arange(4) % 3)).backward()
    assert posterior.learned is True
    assert bayesify.predict(posterior, inputs).epistemic.min() > 0


def test_a_loss_that_nobody_trains_on_begins_nothing():
    posterior = bayesify.convert(nn.Linear(4, 3), Laplace())
    with torch.no_grad():
        Objective(posterior, num_data=4)((torch.randn(4, 4), torch.arange(4) % 3))
    with pytest.warns(UserWarning, match="no uncertainty yet"):
        bayesify.predict(posterior, torch.randn(2, 4))


def test_the_pass_over_the_data_is_all_that_laplace_needs():
    data = loader(EXAMPLE)
    one, other = (bayesify.convert(EXAMPLE.network(), Laplace()) for _ in range(2))
    bayesify.fit(one, data, progress=False)
    objective = Objective(other, num_data=12)
    objective(next(iter(data))).backward()
    other.train()
    Learner(objective).finish(data)
    assert other.training
    torch.testing.assert_close(one.law.covariance(), other.law.covariance())


def small():
    data = DataLoader(TensorDataset(torch.randn(12, 4), torch.arange(12) % 3), batch_size=4)
    return bayesify.convert(nn.Linear(4, 3), SWAG(rank=2)), data


def test_a_learner_that_never_saw_a_step_finishes_nothing():
    posterior, data = small()
    objective = Objective(posterior, num_data=12)
    learner = Learner(objective, epochs=1, steps_per_epoch=3)
    objective(next(iter(data))).backward()
    with pytest.raises(ValueError, match="learns from more than a loss"):
        learner.finish(data)
    with pytest.raises(ValueError, match="No stage has begun"):
        learner.after_step()


def test_a_loop_that_ends_early_is_told_what_is_missing():
    posterior, data = small()
    learner = Learner(Objective(posterior, num_data=12), epochs=2, steps_per_epoch=3)
    optimizer = learner.optimizer()
    optimizer.step()
    learner.after_step()
    with pytest.warns(UserWarning, match="ended after 1 of the 6 steps"):
        learner.finish(data)


def test_what_cannot_be_is_said():
    posterior, _ = small()
    objective = Objective(posterior, num_data=12)
    with pytest.raises(ValueError, match="steps_per_epoch=len"):
        Learner(objective, epochs=2).optimizer()
    with pytest.raises(TypeError, match="convert"):
        Objective(nn.Linear(4, 3), num_data=12)
    posterior.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train in swag"):
        Learner(objective, epochs=2, steps_per_epoch=3).optimizer()
    chains = bayesify.convert(nn.Linear(4, 3), SGLD(chains=2))
    learner = Learner(Objective(chains, num_data=12), epochs=2, steps_per_epoch=3)
    with pytest.raises(ValueError, match=r"learner.optimizer\(0\), and so on to 1"):
        learner.optimizer()


def test_an_optimiser_of_ones_own():
    posterior, _ = small()
    learner = Learner(Objective(posterior, num_data=12), epochs=2, steps_per_epoch=3)
    optimizer = learner.optimizer(make=lambda groups: torch.optim.Adam(groups, lr=0.3))
    assert isinstance(optimizer, torch.optim.Adam)
    ivon = Objective(bayesify.convert(nn.Linear(4, 3), IVON()), num_data=12)
    with pytest.raises(ValueError, match="IVON is an optimiser itself"):
        Learner(ivon, epochs=1, steps_per_epoch=1).optimizer(make=torch.optim.Adam)


def test_a_loop_goes_on_from_its_state():
    """A run in two halves, of which the second starts from what the first wrote down, is the run in one."""
    data = loader(EXAMPLE, 12, shuffle=False)
    method = SWAG(rank=2, num_bn_draws=2, schedule="cosine", snapshots_per_epoch=3, lr=0.1)
    network = plain(EXAMPLE.network())
    whole, first = (bayesify.convert(network, method) for _ in range(2))
    train(whole, data, epochs=2)

    def half(posterior, state):
        objective = Objective(posterior, num_data=12)
        learner = Learner(objective, epochs=2, steps_per_epoch=3)
        optimizer = learner.optimizer()
        if state is not None:
            posterior.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
            learner.load_state_dict(state[2])
        posterior.train()
        for batch in data:
            objective(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            learner.after_step()
        return learner, [copy.deepcopy(x.state_dict()) for x in (posterior, optimizer, learner)]

    _, state = half(first, None)
    second = bayesify.convert(network, method)
    learner, _ = half(second, state)
    learner.finish(data)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
    with pytest.raises(ValueError, match=r"begin it with learner.optimizer\(1\)"):
        learner.load_state_dict({**state[2], "stage": 1})


def test_an_unfinished_posterior_cannot_be_saved_as_if_it_were_finished(tmp_path):
    """A folder does not remember that its loop had not ended, so that it would predict when it is loaded."""
    data = loader(EXAMPLE, 12)
    posterior = bayesify.convert(EXAMPLE.network(), SWAG(rank=2))
    Objective(posterior, num_data=12)(next(iter(data))).backward()
    with pytest.raises(ValueError, match=r"was not finished.*Learner"):
        bayesify.save(posterior, tmp_path / "posterior")
    assert not (tmp_path / "posterior").exists()


@pytest.mark.parametrize("wrong", [0, -1, None, "12", 2.5])
def test_a_wrong_number_of_examples_is_said_at_once(wrong):
    with pytest.raises(ValueError, match="num_data is the number of training examples, a whole number"):
        Objective(bayesify.convert(nn.Linear(2, 2), BayesAdapter()), num_data=wrong)
