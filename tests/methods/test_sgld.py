"""SGLD as a method: the exact posterior of a linear model, when samples are kept, killed runs, several chains."""

import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import SGLD, Gaussian
from bayesify.methods.sgld import sample_steps


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sgld", "sghmc"])
def test_bayesian_linear_regression(kind: str):
    """The bank's moments against the exact posterior's.

    False alarms: the mean's chi^2 and the squares' chi^2 are each rejected beyond the 1 - 1e-6 quantile.
    """
    from scipy import stats

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, 3, dtype=torch.float64, generator=generator)
    y = x @ torch.tensor([[1.0], [-0.5], [0.2]], dtype=torch.float64) + 0.5
    noise_std, prior_std, n = 0.5, 1.0, 20
    design = torch.cat([x, torch.ones(n, 1, dtype=torch.float64)], 1)
    precision = design.T @ design / noise_std**2 + torch.eye(4, dtype=torch.float64) / prior_std**2
    mean = torch.linalg.solve(precision, design.T @ y / noise_std**2)[:, 0]
    lr, friction, thin, kept = (0.02, 0.2, 25, 200) if kind == "sghmc" else (0.07, 1.0, 40, 200)
    # The chain is linear, so its stationary covariance and its autocorrelation are known exactly.
    eye, h = torch.eye(4, dtype=torch.float64), lr / 2 * precision / n
    F = torch.cat([torch.cat([eye - h, (1 - friction) * eye], 1), torch.cat([-h, (1 - friction) * eye], 1)])
    Q = (friction * lr / n * eye).repeat(2, 2)
    joint = torch.linalg.solve(torch.eye(64, dtype=torch.float64) - torch.kron(F, F), Q.flatten()).view(8, 8)
    stationary = joint[:4, :4]
    exact = torch.linalg.inv(precision)
    assert (stationary - exact).norm() < 0.1 * exact.norm()
    power = torch.linalg.matrix_power(F, thin)
    assert torch.linalg.eigvals(power).abs().max() < 0.3, "samples are to be nearly independent"
    sums, term = joint.clone(), joint
    for _ in range(50):
        term = power @ term
        sums += term + term.T
    method = SGLD(
        kind=kind, lr=lr, prior_std=prior_std, friction=friction, samples_per_chain=kept, thin=thin, burn_in=0.1,
        epochs=kept * 10 // 9 + 1,
    )  # fmt: skip
    posterior = bayesify.convert(nn.Linear(3, 1).double(), method, likelihood=Gaussian(noise_std=noise_std))
    bayesify.fit(posterior, [(x, y)] * thin, num_data=n, progress=False)
    draws = posterior.law.samples
    assert len(posterior.law) == kept
    error = draws.mean(0) - mean
    assert error @ torch.linalg.solve(sums[:4, :4] / kept, error) < stats.chi2(4).ppf(1 - 1e-6)
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(stationary), (draws - mean).T, upper=False)
    # Correlated squares have fewer degrees of freedom: (1 + rho^2)/(1 - rho^2) of them, rho the largest correlation.
    rho = torch.linalg.eigvals(power).abs().max().item()
    factor = (1 + rho**2) / (1 - rho**2)
    found = white.square().mean().item() - 1
    assert abs(found) < stats.norm.isf(5e-7) * math.sqrt(2 * factor / (4 * kept))


# -- when samples are kept ----------------------------------------------------------------------------------------


def test_samples_at_equal_distances_end_with_the_last_step():
    steps = sorted(sample_steps(SGLD(samples_per_chain=7, burn_in=0.25), 1000))
    assert len(steps) == 7
    assert steps[-1] == 1000
    assert steps[0] > 250
    assert set(torch.tensor(steps).diff().tolist()) <= {107, 108}


def test_fewer_steps_than_samples_keep_all():
    assert sorted(sample_steps(SGLD(samples_per_chain=50, burn_in=0.5), 10)) == [6, 7, 8, 9, 10]


def test_polynomial_steps_are_sampled_at_equal_langevin_time():
    method = SGLD(schedule="polynomial", samples_per_chain=10, burn_in=0.2, decay_steps=20)
    sizes = [method.step_size(step, 1000) for step in range(1000)]
    assert sizes[20] == pytest.approx(2**-0.55)
    steps = sorted(sample_steps(method, 1000))
    times = [sum(sizes[:step]) for step in steps]
    gaps = torch.tensor(times).diff()
    assert (gaps.max() - gaps.min()) <= 2 * max(sizes[200:])
    assert steps[-1] - steps[-2] > steps[1] - steps[0]


def test_cycles():
    method = SGLD(schedule="cyclical", cycles=4, exploration=0.75, samples_per_chain=8, burn_in=0.0)
    assert method.step_size(0, 100) == method.step_size(25, 100) == 1.0
    assert method.step_size(12, 100) == pytest.approx(0.5 * (1 + math.cos(math.pi * 12 / 25)))
    steps = sorted(sample_steps(method, 100))
    assert all((step - 1) % 25 >= 0.75 * 25 for step in steps)
    assert {(step - 1) // 25 for step in steps} == {0, 1, 2, 3}


# -- runs ---------------------------------------------------------------------------------------------------------


def loader(batch_norm: bool = False) -> tuple[nn.Module, DataLoader]:
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(5)] if batch_norm else []
    network = nn.Sequential(nn.Linear(3, 5), *norm, nn.Tanh(), nn.Linear(5, 2)).double()
    data = TensorDataset(torch.randn(24, 3, dtype=torch.float64), torch.arange(24) % 2)
    return network, DataLoader(data, batch_size=6, shuffle=True)


QUICK = {"epochs": 5, "weight_decay": 0.0, "samples_per_chain": 6, "burn_in": 0.2}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sgld", "sghmc", "psgld"])
@pytest.mark.parametrize("at", [1, 7, 20, 21, 33])
def test_a_killed_run_loses_no_sample(kind: str, at: int, tmp_path: Path):
    network, data = loader(batch_norm=True)
    method = SGLD(kind=kind, chains=2, start="perturbed", schedule="polynomial", lr=0.01, **QUICK)
    options = {"progress": False, "accuracy_tolerance": 1}
    whole = bayesify.convert(network, method)
    bayesify.fit(whole, data, **options)
    steps = 0

    def kill(*_) -> None:
        nonlocal steps
        steps += 1
        if steps == at:
            raise KeyboardInterrupt

    handle = register_optimizer_step_post_hook(kill)
    try:
        with pytest.raises(KeyboardInterrupt):
            bayesify.fit(bayesify.convert(network, method), data, checkpoint=tmp_path, checkpoint_steps=1, **options)
    finally:
        handle.remove()
    again = bayesify.convert(network, method)
    bayesify.fit(again, data, checkpoint=tmp_path, checkpoint_steps=1, **options)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert whole.law.counts.tolist() == [6, 6]


@pytest.mark.parametrize("kind", ["sgld", "sghmc", "psgld"])
def test_chains_that_move_together_are_chains(kind: str):
    """Each chain against a loop by hand over the same minibatches with the same noise."""
    network, _ = loader()
    torch.manual_seed(4)
    batches = [(torch.randn(6, 3, dtype=torch.float64), torch.arange(6) % 2) for _ in range(5)]
    method = SGLD(
        kind=kind,
        chains=3,
        together=True,
        start="perturbed",
        samples_per_chain=5,
        burn_in=0.0,
        thin=1,
        lr=0.1,
        epochs=1,
    )
    posterior = bayesify.convert(network, method)
    vectorised = posterior.learning.all_outputs(posterior, batches[0][0])
    for index in range(3):
        with posterior.member(index):
            torch.testing.assert_close(
                vectorised[index], posterior.method.outputs(posterior, batches[0][0]), rtol=1e-12, atol=1e-12
            )
    starts = [{name: p.detach().clone() for name, p in posterior.learning.tensors(c).items()} for c in range(3)]
    seeds = []

    def sampler(groups):
        seeds.append(torch.get_rng_state())
        return method.make_optimizer(groups)

    bayesify.fit(
        posterior, batches, num_data=24, seed=3, optimizer=sampler, progress=False, accuracy_tolerance=1
    )  # fmt: skip
    # The same noise: a sampler over the three chains' parameters with the gradients of three separate losses.
    chains = [[nn.Parameter(p) for p in start.values()] for start in starts]
    with torch.random.fork_rng():
        torch.set_rng_state(seeds[0])
        own = method.make_optimizer([{"params": [p for c in chains for p in c], "num_data": torch.tensor(24)}])
    method.make_schedule(own, 5)
    for x, y in batches:
        for chain in chains:
            output = torch.func.functional_call(network, dict(zip(starts[0], chain, strict=True)), (x,))
            torch.autograd.backward(nn.functional.cross_entropy(output, y))
        own.step()
        own.zero_grad(set_to_none=True)
    for index, chain in enumerate(chains):
        flat = torch.cat([p.detach().flatten() for p in chain])
        torch.testing.assert_close(posterior.law.by_chain()[index, -1], flat, rtol=1e-10, atol=1e-12)


def test_chains_with_batch_normalisation_move_together_one_pass_each():
    network, data = loader(batch_norm=True)
    posterior = bayesify.convert(network, SGLD(chains=2, together=True, start="perturbed", **QUICK))
    bayesify.fit(posterior, data, val_loader=data, progress=False, accuracy_tolerance=1)
    assert posterior.law.counts.tolist() == [6, 6]
    assert not torch.isclose(*posterior.law.by_chain()[:, -1]).any()


def test_the_seed_of_fit_decides_the_noise():
    network, data = loader()
    banks = []
    for seed in (0, 0, 1):
        posterior = bayesify.convert(network, SGLD(chains=2, **QUICK))
        bayesify.fit(posterior, data, seed=seed, progress=False, accuracy_tolerance=1)
        banks.append(posterior.law.samples.clone())
    assert torch.equal(banks[0], banks[1])
    assert not torch.isclose(banks[0], banks[2]).any()
    # Chains that begin at the same place have noise of their own.
    assert not torch.isclose(banks[0][:6], banks[0][6:]).any()


def test_chains_begin_where_they_are_told():
    network, _ = loader()
    flat = torch.cat([p.detach().flatten() for p in network.parameters()])
    same = bayesify.convert(network, SGLD(chains=2))
    assert all(torch.equal(same.law.codec.join(same.learning.tensors(index)), flat) for index in range(2))
    reset = bayesify.convert(network, SGLD(chains=2, start="reset"))
    one, two = (reset.law.codec.join(reset.learning.tensors(index)) for index in range(2))
    assert not torch.isclose(one, two).any()
    assert not torch.isclose(one, flat).any()


def test_frozen_parameters_are_left_out():
    network, data = loader(batch_norm=True)
    network[0].weight.requires_grad_(False)
    posterior = bayesify.convert(network, SGLD(**QUICK), exclude="3")
    assert posterior.law.codec.names == ["0.bias", "1.weight", "1.bias"]
    before = {name: p.clone() for name, p in posterior.network.named_parameters()}
    bayesify.fit(posterior, data, progress=False, accuracy_tolerance=1)
    assert all(torch.equal(p, before[name]) for name, p in posterior.network.named_parameters())
    assert posterior.law.samples.shape == (6, 15)


def test_cold_chains_descend():
    network, data = loader()
    method = SGLD(temperature=0.0, lr=0.5, **QUICK)
    posterior = bayesify.convert(network, method)
    history = bayesify.fit(posterior, data, progress=False, accuracy_tolerance=1)
    assert history.epochs[-1].terms["nll"] < history.epochs[0].terms["nll"]


def test_a_short_burn_in_is_warned_of():
    network, data = loader()
    method = SGLD(epochs=25, lr=0.05, weight_decay=1e-3, samples_per_chain=2)
    with pytest.warns(UserWarning, match="40,000 steps"):
        bayesify.fit(bayesify.convert(network, method), data, progress=False, accuracy_tolerance=1)


def test_a_burn_in_as_long_as_the_relaxation_time_is_not_warned_of():
    method = SGLD(lr=0.05, weight_decay=1e-3, burn_in=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        method.check_steps(50_000, 80_000)  # 2 / (.05 .001) = 40,000, which is half of them
    with pytest.warns(UserWarning, match="The burn-in of 39,999 steps"):
        method.check_steps(50_000, 79_998)


def test_steps_that_overshoot_under_the_prior_are_refused():
    method = SGLD(lr=0.1, prior_std=0.03)  # weight decay 1 / (20 .0009) = 55.6, times half of lr is 2.78
    with pytest.raises(ValueError, match=r"by 1 - lr weight_decay / 2 = -1\.78 .* below 4 / weight_decay = 0\.072"):
        method.check_steps(20, 100)
    method.check_steps(40, 100)


def test_a_second_fit_replaces_the_samples():
    network, data = loader()
    posterior = bayesify.convert(network, SGLD(**QUICK))
    for seed in (0, 1):
        bayesify.fit(posterior, data, seed=seed, progress=False, accuracy_tolerance=1)
        assert len(posterior.law) == 6


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"samples_per_chain": 0}, "samples_per_chain must be at least 1"),
        ({"burn_in": 1.0}, "burn_in is a share"),
        ({"thin": 0}, "thin is a number of steps"),
        ({"friction": 0.0}, "friction above 0"),
        ({"prior_std": 0.0}, "prior_std must be above 0"),
        ({"storage": "int8"}, "storage must be one of"),
        ({"schedule": "cosine"}, "schedule must be"),
    ],
)
def test_settings_that_make_no_sense(settings: dict, words: str):
    with pytest.raises(ValueError, match=words):
        SGLD(**settings)
