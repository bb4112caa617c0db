"""How iBNN learns: the loss of a batch, what is in which group, schedules, what a short run does."""

import copy
import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import IBNN
from bayesify.cli import demo
from bayesify.laws.input_factors.kl import average_kl, mean_kl

EXACT = {"rtol": 1e-12, "atol": 1e-12}
METHOD = IBNN(components=3, start_std=(0.2, 0.1), anneal=0.0)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()


def batch(rows: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(rows) % 3


def groups_of(posterior) -> dict[str, dict]:
    (stage,) = posterior.method.stages(posterior)
    return {group["name"]: group for group in stage.groups}


# -- the loss -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("repeats", "assign"), [(1, "consecutive"), (2, "consecutive"), (2, "same"), (5, "consecutive")]
)
def test_the_loss_is_the_mean_over_copies_each_with_its_own_factors(repeats, assign, monkeypatch):
    """Against a loop: every row of the repeated batch through its own network, statistics of the whole batch."""
    method = dataclasses.replace(METHOD, repeats=repeats, assign=assign)
    posterior = bayesify.convert(network().eval(), method)
    components, drawn = [], []
    original = posterior.law._fresh

    def fresh(assigned):
        components.append(assigned)
        drawn.append(original(assigned))
        return drawn[-1]

    monkeypatch.setattr(posterior.law, "_fresh", fresh)
    x, labels = batch()
    terms = posterior.loss((x, labels), num_data=100)
    assert [len(factors) for factors in drawn] == [len(x)] * repeats
    losses = []
    for copy_index in range(repeats):
        for example in range(len(x)):
            factors = drawn[copy_index][example].detach()
            logits = posterior.law.to_network(factors)(x[example : example + 1])
            losses.append(nn.functional.cross_entropy(logits, labels[example : example + 1]))
    torch.testing.assert_close(terms["nll"], torch.stack(losses).mean(), **EXACT)
    if repeats > 1:
        assert torch.equal(components[0], components[1]) == (assign == "same")


@pytest.mark.parametrize(("kind", "function"), [("mean", mean_kl), ("average", average_kl)])
def test_the_divergence_is_divided_by_the_number_of_data(kind, function):
    posterior = bayesify.convert(network(), dataclasses.replace(METHOD, kl=kind, beta=0.7, prior_std=0.4))
    expected = 0.7 * function(posterior.law.component_means, posterior.law.component_stds, 0.4) / 123
    torch.testing.assert_close(posterior.loss(batch(), num_data=123)["kl"], expected, **EXACT)
    torch.testing.assert_close(posterior.loss(batch(3), num_data=123)["kl"], expected, **EXACT)


def test_ood_inputs_add_a_term_and_change_no_statistics():
    posterior = bayesify.convert(network(), METHOD).train()
    alone = copy.deepcopy(posterior)
    torch.manual_seed(2)
    terms = posterior.loss(batch(), num_data=100, ood=5 + batch(6)[0])
    torch.manual_seed(2)
    expected = alone.loss(batch(), num_data=100)
    assert 0 < terms.pop("uncertainty") < 0.5
    torch.testing.assert_close(dict(terms), dict(expected), rtol=0, atol=0)
    for name, buffer in posterior.network.named_buffers():
        torch.testing.assert_close(buffer, alone.network.get_buffer(name), rtol=0, atol=0)


@pytest.mark.slow
def test_the_estimated_divergence_agrees_with_its_bounds():
    posterior = bayesify.convert(network(), dataclasses.replace(METHOD, kl="mc"))
    draws = torch.stack([posterior.loss(batch(), num_data=1)["kl"].detach() for _ in range(400)])
    bound = average_kl(posterior.law.component_means, posterior.law.component_stds, 0.1).detach()
    error = 4.9 * draws.std() / 20
    assert bound - math.log(3) - error <= draws.mean() <= bound + error
    assert draws.std() > 0


def test_beta_grows_by_steps_and_is_kept():
    method = dataclasses.replace(METHOD, anneal=0.5, beta=2.0, epochs=4, slow_lr=0.0, latent_lr=0.0)
    posterior = bayesify.convert(network(), method)
    assert posterior.learning.kl_weight == 0
    seen = []
    original = IBNN.terms

    def terms(self, posterior, *args):
        seen.append(float(posterior.learning.kl_weight))
        return original(self, posterior, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IBNN, "terms", terms)
        bayesify.fit(posterior, [batch()] * 3, num_data=10, progress=False, accuracy_tolerance=1)
    expected = [2 * min(1, step / 6) for step in range(12)]
    assert seen == pytest.approx(expected)
    assert posterior.state_dict()["learning.kl_weight"] == 2


# -- groups -------------------------------------------------------------------------------------------------------


def test_groups_have_their_own_rates_and_decay_is_for_weights_alone():
    for components in (1, 4, 16):
        method = IBNN(components=components, latent_lr=0.1, weight_decay=0.5, weights="joint", lr=0.03)
        posterior = bayesify.convert(network(), method, likelihood="classification")
        groups = groups_of(posterior)
        assert groups["latents"]["lr"] == pytest.approx(0.1 * components)
        assert {id(p) for p in groups["latents"]["params"]} == {
            id(posterior.law.component_means), id(posterior.law.component_rhos),
        }  # fmt: skip
        optimizer = method.make_optimizer(list(groups.values()))
        decays = {group["name"]: group["weight_decay"] for group in optimizer.param_groups}
        assert decays == {"weights": 0.5, "latents": 0.0}
        assert groups["weights"]["lr"] == 0.03
    adam = bayesify.convert(network(), IBNN(components=4, latent_lr=0.1, optimizer="adam"))
    assert groups_of(adam)["latents"]["lr"] == 0.1
    slow = bayesify.convert(network(), IBNN(slow_lr=1e-5))
    assert groups_of(slow)["weights"]["lr"] == 1e-5
    gaussian = bayesify.convert(nn.Linear(2, 1), IBNN(weights="frozen"), likelihood="regression")
    assert groups_of(gaussian).keys() == {"latents", "likelihood"}
    assert groups_of(gaussian)["likelihood"]["weight_decay"] == 0


def test_the_rate_scales_with_k_as_the_gradient_falls():
    """K times the rate makes up for gradients of one row in K: the first step of equal components is the same."""
    steps = []
    for components in (1, 5):
        method = IBNN(components=components, means_std=0.0, start_std=(0.0, 0.0), repeats=1, anneal=0.0, beta=0.0)
        posterior = bayesify.convert(nn.Sequential(nn.Linear(3, 2, bias=False)).double(), method)
        with torch.no_grad():
            posterior.network[0].weight.copy_(torch.arange(6.0).view(2, 3))
        row = torch.ones(1, 3, dtype=torch.float64).expand(10, 3)
        posterior.loss((row, torch.zeros(10).long()), num_data=10).total.backward()
        lr = groups_of(posterior)["latents"]["lr"]
        steps.append(lr * posterior.law.component_means.grad)
    torch.testing.assert_close(steps[1], steps[0].expand(5, 3), **EXACT)


@pytest.mark.parametrize("weights", ["frozen", "slow", "joint"])
def test_what_learns(weights):
    posterior = bayesify.convert(network(), IBNN(components=2, weights=weights, lr=0.1, epochs=1, weight_decay=0.1))
    before = copy.deepcopy(posterior.state_dict())
    bayesify.fit(posterior, [batch()] * 3, num_data=10, progress=False, accuracy_tolerance=1)
    moved = {
        name: float((tensor - before[name]).abs().max())
        for name, tensor in posterior.state_dict().items()
        if tensor.is_floating_point() and "running" not in name
    }
    assert moved["law.component_means"] > 0
    assert moved["law.component_rhos"] > 0
    largest = max(value for name, value in moved.items() if name.startswith("network"))
    if weights == "frozen":
        assert largest == 0
    elif weights == "slow":
        assert 0 < largest < 0.01
    else:
        assert largest > 0.01


def test_the_papers_schedule_is_the_default():
    method = IBNN(components=2, weights="joint", lr=0.05, latent_lr=0.15)
    posterior = bayesify.convert(network(), method)
    optimizer = method.make_optimizer(method.stages(posterior)[0].groups)
    schedule = method.make_schedule(optimizer, 100)
    rates = []
    for _ in range(101):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    weights, latents = zip(*rates, strict=True)
    assert weights[:51] == pytest.approx([0.05] * 51)
    assert weights[70] == pytest.approx(0.05 * (1 - 0.99 / 2))
    assert weights[90:] == pytest.approx([0.0005] * 11)
    assert latents == pytest.approx([0.3] * 101)
    scratch = IBNN.from_scratch()
    assert (scratch.components * scratch.latent_lr, scratch.lr, scratch.epochs) == pytest.approx((1.2, 0.05, 300))
    assert IBNN.from_scratch(4, epochs=5).epochs == 5


# -- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"components": 0}, "components"),
        ({"repeats": 0}, "repeats"),
        ({"draws_per_component": 0}, "draws_per_component"),
        ({"means_std": -1.0}, "means_std"),
        ({"start_std": (-0.1, 0.0)}, "start_std"),
        ({"prior_std": 0.0}, "prior_std"),
        ({"beta": -1.0}, "beta"),
        ({"anneal": 1.5}, "anneal"),
        ({"kl": "exact"}, "kl must be one of"),
        ({"weights": "all"}, "weights must be one of"),
        ({"assign": "even"}, "assign must be one of"),
    ],
)
def test_wrong_settings_are_named(settings, word):
    with pytest.raises(ValueError, match=word):
        IBNN(**settings)


def test_the_table_says_why():
    made = bayesify.convert(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.LSTM(2, 2)), IBNN(), include="0")
    reasons = {row.name: (row.converted, row.reason) for row in made.conversion.rows}
    assert reasons["0"] == (True, "inputs with 4 components")
    assert not reasons["1"][0]
    assert not reasons["2"][0]
    weighted = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), nn.Linear(2, 2))
    assert bayesify.convert(weighted, IBNN()).conversion.converted == ("1",)


# -- what comes out -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_fitted_mixture_fits_and_is_unsure_away_from_data():
    """y = x^3 on [-1, 1]: the fit is good there, and the spread of functions larger outside than inside."""
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 30)[:, None]
    y = x**3 + 0.05 * torch.randn(30, 1)
    plain = nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    method = IBNN.from_scratch(4, epochs=150, lr=0.02, latent_lr=0.002, means_std=0.5, weight_decay=0.0)
    posterior = bayesify.convert(plain, method, likelihood=bayesify.Gaussian(noise_std=0.05))
    loader = DataLoader(TensorDataset(x, y), 30)
    bayesify.fit(posterior, loader, progress=False, clip_norm=1.0)
    inside = bayesify.predict(posterior, x, seed=0)
    outside = bayesify.predict(posterior, torch.tensor([[-3.0], [3.0]]), seed=0)
    assert (inside.mean.reshape(-1) - x[:, 0] ** 3).square().mean().sqrt() < 0.15
    assert outside.epistemic.min() > 4 * inside.epistemic.mean()


@pytest.mark.slow
def test_the_default_start_does_not_wreck_a_network_with_batch_normalisation():
    """Before any step: draws of the default start keep the accuracy, draws of the paper's start do not."""
    data = demo.read_data(seed=0, num_train=200, num_val=359)
    plain, _, _ = demo.train_network(data.train, seed=0, quick=False)
    test = DataLoader(data.test, 500)

    def accuracy(posterior) -> float:
        prediction = bayesify.predict(posterior, test, seed=0, num_draws=4, keep_samples=True)
        return float((prediction.samples.argmax(-1) == data.test.targets).double().mean())

    found = {std: accuracy(bayesify.convert(plain, IBNN(means_std=std))) for std in (0.0, IBNN().means_std, 0.75)}
    assert found[IBNN().means_std] > found[0.0] - 0.03
    assert found[0.75] < found[0.0] - 0.1
