"""The mixture: assignment of rows, draws of components, exports, the uncertainty's two parts."""

import copy
import math
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus

import bayesify
from bayesify import IBNN
from bayesify.laws import Pass
from bayesify.laws.input_factors.law import inverse_softplus

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.ReLU(),
        nn.Linear(8, 3),
    )
    made = nn.Sequential(*layers).double().eval()
    made[1].running_var.mul_(0.3)
    return made


def posterior(**settings) -> bayesify.Posterior:
    return bayesify.convert(network(), IBNN(**{"components": 3, "start_std": (0.3, 0.1), **settings}))


X = torch.randn(7, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def test_sizes():
    made = posterior()
    assert made.law.component_means.shape == made.law.component_rhos.shape == (3, 2 + 16 + 8)
    assert [(latent.parameter, latent.size) for latent in made.law.latents] == [
        ("0.weight", 2), ("4.weight", 16), ("6.weight", 8),
    ]  # fmt: skip
    assert posterior(bias=True).law.component_means.shape == (3, 2 + 16 + 8 + 3)


def test_inverse_softplus():
    std = torch.tensor([1e-6, 0.05, 1.0, 30.0], dtype=torch.float64)
    torch.testing.assert_close(softplus(inverse_softplus(std)), std, rtol=1e-9, atol=0)
    assert inverse_softplus(torch.zeros(1)) == -math.inf


def test_the_start_has_the_stated_law():
    made = bayesify.convert(nn.Linear(20_000, 1), IBNN(components=4, means_std=0.5, start_std=(0.05, 0.02)))
    means, stds = made.law.component_means.detach(), made.law.component_stds.detach()
    count = means.numel()
    assert abs(means.mean() - 1) < 4.9 * 0.5 / count**0.5
    assert abs(means.std() - 0.5) < 4.9 * 0.5 / (2 * count) ** 0.5
    drawn = (0.05 + 0.02 * torch.randn(10**6, generator=torch.Generator().manual_seed(1))).abs()
    for moment in (lambda t: t.mean(), lambda t: t.square().mean()):
        spread = drawn.std() if moment(drawn) == drawn.mean() else drawn.square().std()
        assert abs(moment(stds) - moment(drawn)) < 4.9 * spread * (1 / count + 1e-6) ** 0.5
    again = bayesify.convert(nn.Linear(20_000, 1), IBNN(components=4, means_std=0.5, seed=1))
    assert not torch.equal(again.law.component_means, made.law.component_means)


@pytest.mark.parametrize("components", [1, 3, 4, 24])
@pytest.mark.parametrize(("rows", "repeats"), [(1, 1), (8, 1), (10, 2), (128, 2), (5, 7)])
def test_rows_are_assigned_evenly(components, rows, repeats):
    made = posterior(components=components)
    counts = Counter(made.law.assign(rows, repeats).tolist())
    every = [counts[k] for k in range(components)]
    assert max(every) - min(every) <= 1
    assert sum(every) == rows * repeats


def test_no_component_is_ahead_where_k_does_not_divide():
    """Over many batches each of 3 components is equally often the one with a row more (binomial, 4.9 sigma)."""
    made = posterior()
    torch.manual_seed(0)
    ahead = Counter(Counter(made.law.assign(10).tolist()).most_common(1)[0][0] for _ in range(3000))
    assert all(abs(ahead[k] - 1000) < 4.9 * (3000 * 2 / 9) ** 0.5 for k in range(3))


@pytest.mark.parametrize("components", [2, 4, 6, 16])
@pytest.mark.parametrize("repeats", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [16, 18, 22, 128])
def test_every_copy_of_a_batch_has_all_components(components, repeats, rows):
    """Else batch normalisation meets a part of the mixture in training, and all of it in prediction."""
    grid = posterior(components=components).law.assign(rows, repeats).view(repeats, rows)
    for one in grid:
        counts = [int((one == k).sum()) for k in range(components)]
        assert min(counts) >= 1
        assert max(counts) - min(counts) <= 1
    for example in grid.T.tolist():
        assert len(set(example)) == min(repeats, components)


def test_copies_have_consecutive_components_or_the_same():
    made = posterior(components=5)
    grid = made.law.assign(6, 2).view(2, 6)
    assert torch.equal((grid[0] + 1) % 5, grid[1])
    assert torch.equal((grid[:, :-1] + 1) % 5, grid[:, 1:])
    same = made.law.assign(6, 2, same=True).view(2, 6)
    assert torch.equal(same[0], same[1])
    assert torch.equal((same[0, :-1] + 1) % 5, same[0, 1:])


@torch.no_grad()
def test_rows_have_the_components_that_they_were_assigned():
    made = posterior(start_std=(0.0, 0.0))
    chosen = torch.tensor([2, 0, 1, 1, 0, 2, 2])
    outputs = made.outputs(X, Pass(part=chosen))
    each = torch.stack([made.law.component(k)(X) for k in range(3)])
    torch.testing.assert_close(outputs, each[chosen, torch.arange(7)], **EXACT)
    with pytest.raises(ValueError, match="3 components were assigned to a batch of 7"):
        made.outputs(X, Pass(part=chosen[:3]))


@torch.no_grad()
def test_fresh_factors_have_the_law_of_the_assigned_component():
    made = posterior()
    rows = torch.arange(3).repeat(20_000)
    drawn = made.law._fresh(rows).view(20_000, 3, -1)
    means, stds = made.law.component_means, made.law.component_stds
    assert ((drawn.mean(0) - means).abs() < 4.9 * stds / 20_000**0.5).all()
    assert ((drawn.std(0) - stds).abs() < 4.9 * stds / 40_000**0.5).all()
    # One component in all layers: given the row, the factors are independent.
    scaled = ((drawn - means) / stds)[:, 0]
    correlation = (scaled.T @ scaled / 20_000).fill_diagonal_(0)
    assert correlation.abs().max() < 4.9 / 20_000**0.5


@torch.no_grad()
def test_draws_are_of_components_and_have_their_law():
    made = posterior()
    keys = made.keys(3000, seed=1)
    assert Counter(key.path[0] for key in keys) == {0: 1000, 1: 1000, 2: 1000}
    means, stds = made.law.component_means, made.law.component_stds
    drawn = torch.stack([made.law.factors(key) for key in keys]).view(3, 1000, -1)
    assert ((drawn.mean(1) - means).abs() < 4.9 * stds / 1000**0.5).all()
    assert ((drawn.std(1) - stds).abs() < 4.9 * stds / 2000**0.5).all()


def test_five_draws_of_each_component_by_default():
    made = posterior(components=4)
    assert made.default_draws == 20
    assert Counter(key.path[0] for key in made.keys(None, seed=0)) == dict.fromkeys(range(4), 5)
    assert sorted(Counter(key.path[0] for key in made.keys(6, seed=0)).values()) == [1, 1, 2, 2]


@torch.no_grad()
def test_components_and_the_mean_are_plain_networks():
    made = posterior()
    for component in range(3):
        plain = made.law.component(component)
        assert type(plain) is nn.Sequential
        assert {type(m) for m in plain.modules()} == {type(m) for m in network().modules()}
        assert plain.state_dict().keys() == network().state_dict().keys()
        expected = copy.deepcopy(network())
        m = made.law.component_means[component]
        expected[0].weight.mul_(m[:2].view(1, 2, 1, 1))
        expected[4].weight.mul_(m[2:18])
        expected[6].weight.mul_(m[18:])
        torch.testing.assert_close(plain(X), expected(X), **EXACT)
        with made.member(component), made.mean():
            torch.testing.assert_close(made(X), plain(X), **EXACT)
    with made.mean():
        torch.testing.assert_close(made(X), made.law.mean_network()(X), **EXACT)
    torch.testing.assert_close(
        made.law.mean_network()(X), made.law.to_network(made.law.component_means.mean(0))(X), **EXACT
    )
    assert not torch.allclose(made.law.mean_network()(X), made.law.component(0)(X))
    plain = made.law.component(0)
    plain[0].weight.zero_()
    assert made.network[0].weight.any(), "an export shares its weights with the posterior"
    for wrong in (-1, 3):
        with pytest.raises(IndexError, match="there are 3"):
            made.law.component(wrong)
        with pytest.raises(IndexError, match="there are 3"), made.member(wrong):
            pass


@torch.no_grad()
def test_fresh_passes_of_one_component():
    made = posterior(start_std=(0.0, 0.0))
    with made.member(2):
        torch.testing.assert_close(made(X), made.law.component(2)(X), **EXACT)
    each = torch.stack([made.law.component(k)(X) for k in range(3)])
    mixed = made(X)
    assert all(any(torch.allclose(mixed[i], each[k, i]) for k in range(3)) for i in range(7))


def test_the_uncertainty_splits_as_in_equations_26_and_27():
    """Total = H(mean p), aleatoric = mean H(p), epistemic = their difference, over the draws of all components."""
    made = posterior()
    prediction = bayesify.predict(made, X, seed=4)
    with torch.no_grad():
        probs = torch.stack(
            [made.law.to_network(made.law.factors(key))(X).softmax(-1) for key in made.keys(None, seed=4)]
        )
    total = -(probs.mean(0) * probs.mean(0).log()).sum(-1)
    aleatoric = -(probs * probs.log()).sum(-1).mean(0)
    torch.testing.assert_close(prediction.total, total, **EXACT)
    torch.testing.assert_close(prediction.aleatoric, aleatoric, **EXACT)
    torch.testing.assert_close(prediction.epistemic, total - aleatoric, rtol=1e-9, atol=1e-12)
    assert (prediction.epistemic > 1e-4).all()


def test_regression_splits_its_variance():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 1)).double()
    made = bayesify.convert(
        plain, IBNN(components=3, start_std=(0.3, 0.1)), likelihood=bayesify.Gaussian(noise_std=0.5)
    )
    x = torch.linspace(-2, 2, 5, dtype=torch.float64)[:, None]
    prediction = bayesify.predict(made, x, seed=0)
    with torch.no_grad():
        means = torch.stack([made.law.to_network(made.law.factors(key))(x) for key in made.keys(None, seed=0)])
    torch.testing.assert_close(prediction.mean, means.mean(0).reshape(prediction.mean.shape), **EXACT)
    epistemic = means.var(0, correction=0).reshape(prediction.epistemic.shape)
    torch.testing.assert_close(prediction.epistemic, epistemic, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(prediction.aleatoric, torch.full_like(prediction.aleatoric, 0.25), **EXACT)


def test_draws_are_rows_of_a_pass_and_keep_no_weights():
    made = posterior()
    assert made.law.together(made.trace(X)) == "rows"
    before = {name: tensor.data_ptr() for name, tensor in made.network.state_dict().items()}
    bayesify.predict(made, X, seed=0)
    assert before == {name: tensor.data_ptr() for name, tensor in made.network.state_dict().items()}


@torch.no_grad()
def test_factors_that_are_kept_are_those_of_the_draws_however_they_change():
    made = posterior()
    law, keys = made.law, tuple(made.keys(6, seed=3))

    def right() -> None:
        for _ in range(2):
            for some in (keys, keys[1:]):
                each = torch.stack([law.to_network(law.factors(key))(X) for key in some])
                torch.testing.assert_close(made.evaluate(X, some), each, **EXACT)

    right()
    law.component_rhos.data[:, :2] = -torch.inf
    right()
    law.component_rhos.data[0, -1] += 1
    right()
    law.component_means.data[1, 0] += 1
    right()
    law.component_means.mul_(2)
    right()
    assert law._kept._found
    assert not copy.deepcopy(made).law._kept._found
