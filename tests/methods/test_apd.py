"""APD as a method: chains, rounds, what is left after a fit, and killed runs."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import APD, SGLD, Gaussian
from bayesify.methods.apd import _sample_numbers

QUICK = {
    "epochs": 4, "lr": 0.05, "weight_decay": 0.0, "samples_per_chain": 6, "burn_in": 0.25, "latent": 3,
    "hidden": (8, 8),    "steps": 12, "batch": 8, "num_bn_draws": 4,
}  # fmt: skip
OPTIONS = {"progress": False, "accuracy_tolerance": 1}


def problem(batch_norm: bool = False) -> tuple[nn.Module, DataLoader]:
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(5)] if batch_norm else []
    network = nn.Sequential(nn.Linear(3, 5), *norm, nn.Tanh(), nn.Linear(5, 2)).double()
    data = TensorDataset(torch.randn(24, 3, dtype=torch.float64), torch.arange(24) % 2)
    return network, DataLoader(data, batch_size=6, shuffle=True)


def collect(posterior: bayesify.Posterior, times: int) -> None:
    """Move the chains at random, and keep their states."""
    torch.manual_seed(1)
    for _ in range(times):
        with torch.no_grad():
            for parameter in posterior.learning.chains.parameters():
                parameter.add_(torch.randn_like(parameter))
        posterior.learning.collect()


def test_chains_are_those_of_sgld(monkeypatch: pytest.MonkeyPatch):
    """Offline, the samples that the generator learns from are the bank of SGLD with the same settings."""
    network, data = problem()
    shared = {key: QUICK[key] for key in ("epochs", "lr", "weight_decay", "samples_per_chain", "burn_in")}
    bank = bayesify.convert(network, SGLD(chains=2, together=True, start="perturbed", **shared))
    bayesify.fit(bank, data, **OPTIONS)
    seen = {}
    monkeypatch.setattr(
        APD, "_learn_from_all", lambda self, made, progress: seen.update(samples=made.learning.samples.clone())
    )
    posterior = bayesify.convert(network, APD(chains=2, start="perturbed", **QUICK))
    bayesify.fit(posterior, data, **OPTIONS)
    # APD keeps the chains' samples in turns, SGLD each chain's together.
    assert torch.equal(seen["samples"].view(6, 2, -1).transpose(0, 1).reshape(12, -1), bank.law.samples)


@pytest.mark.parametrize("online", [False, True])
@pytest.mark.slow
def test_only_the_generator_is_left(online: bool, tmp_path: Path):
    network, data = problem()
    posterior = bayesify.convert(network, APD(online=online, thin=1, round_samples=3, **QUICK))
    assert any(name.startswith("learning.") for name in posterior.state_dict())
    bayesify.fit(posterior, data, **OPTIONS)
    extra = [
        name for name in posterior.state_dict() if not name.startswith(("network.", "likelihood.", "law.generator."))
    ]
    assert set(extra) == {"law.residual_std"}
    columns = sum(p.numel() for p in network.parameters())
    numbers = (3 + 1) * 8 + (8 + 1) * 8 + (8 + 1) * columns
    assert sum(p.numel() for p in posterior.law.generator.parameters()) == numbers
    bayesify.save(posterior, tmp_path / "apd")
    loaded = bayesify.load(tmp_path / "apd", network)
    x = torch.randn(5, 3, dtype=torch.float64)
    assert torch.equal(bayesify.predict(loaded, x, seed=1).probs, bayesify.predict(posterior, x, seed=1).probs)
    bayesify.fit(posterior, data, seed=1, **OPTIONS)  # begins anew
    assert not torch.equal(bayesify.predict(loaded, x, seed=1).probs, bayesify.predict(posterior, x, seed=1).probs)


def test_samples_are_first_in_first_out():
    network, _ = problem()
    posterior = bayesify.convert(network, APD(online=True, chains=2, **{**QUICK, "samples_per_chain": 2}))
    workshop, seen = posterior.learning, []
    torch.manual_seed(1)
    for count in range(1, 6):
        with torch.no_grad():
            for parameter in workshop.chains.parameters():
                parameter.add_(torch.randn_like(parameter))
        seen += [torch.cat([p.detach().flatten() for p in chain.parameters()]) for chain in workshop.chains]
        workshop.collect()
        assert len(workshop) == min(2 * count, 4)
        kept = {tuple(row.tolist()) for row in workshop.samples[: len(workshop)]}
        assert kept == {tuple(row.tolist()) for row in seen[-4:]}


def test_rounds_share_the_generators_steps(monkeypatch: pytest.MonkeyPatch):
    network, data = problem()
    method = APD(online=True, thin=2, round_samples=2, **{**QUICK, "steps": 11, "burn_in": 0.0})
    taken = []

    def count(self: APD, posterior: bayesify.Posterior, steps: int) -> None:
        taken.append(steps)
        posterior.learning.rounds += 1

    monkeypatch.setattr(APD, "_round", count)
    bayesify.fit(bayesify.convert(network, method), data, **OPTIONS)
    assert _sample_numbers(method, 16) == {2 * number: number for number in range(1, 9)}
    assert taken == [2, 3, 3, 3]


def test_restarted_chains_begin_at_draws_of_the_generator():
    network, _ = problem()
    method = APD(online=True, restart=True, chains=3, **QUICK)
    posterior = bayesify.convert(network, method)
    collect(posterior, 4)
    method._round(posterior, 3)
    method._restart(posterior)
    chains = [posterior.law.codec.join(posterior.learning.tensors(index)) for index in range(3)]
    assert len({tuple(chain.tolist()) for chain in chains}) == 3
    last = posterior.learning.generator[-1]
    for chain in chains:  # in the image of the last layer
        inner = ((chain - posterior.learning.shift) / posterior.learning.scale - last.bias)[:, None].detach()
        solved = torch.linalg.lstsq(last.weight.detach(), inner).solution
        torch.testing.assert_close(last.weight.detach() @ solved, inner, rtol=1e-8, atol=1e-10)


def test_the_online_game_is_standardised_and_folded_back():
    network, _ = problem()
    posterior = bayesify.convert(network, APD(online=True, **QUICK))
    collect(posterior, 5)
    workshop = posterior.learning
    rows = workshop.samples[:5]
    posterior.method._round(posterior, 2)
    ready = workshop.prepare(rows)
    torch.testing.assert_close(ready.mean(0), torch.zeros_like(ready[0]), rtol=0, atol=1e-12)
    assert ready.square().mean() == pytest.approx(1)
    torch.testing.assert_close(torch.pdist(ready) * workshop.scale, torch.pdist(rows))
    keys = posterior.keys(3, seed=0)
    drawn, centre = [posterior.law.sample(key) for key in keys], posterior.law.centre()
    posterior.law.generator.load_state_dict(workshop.generator.state_dict())  # as the game has it
    played = [posterior.law.sample(key) for key in keys]
    for weights, own in zip([*drawn, centre], [*played, posterior.law.centre()], strict=True):
        torch.testing.assert_close(weights, workshop.shift + workshop.scale * own, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize("at", [1, 9, 16])
@pytest.mark.slow
def test_a_killed_run_goes_on(online: bool, at: int, tmp_path: Path):
    network, data = problem(batch_norm=True)
    method = APD(online=online, chains=2, thin=1, round_samples=3, restart=online, start="perturbed", **QUICK)
    whole = bayesify.convert(network, method)
    bayesify.fit(whole, data, **OPTIONS)
    steps = 0

    def kill(optimizer, *_) -> None:
        nonlocal steps
        steps += type(optimizer).__name__ == "Langevin"
        if steps == at:
            raise KeyboardInterrupt

    handle = register_optimizer_step_post_hook(kill)
    try:
        with pytest.raises(KeyboardInterrupt):
            bayesify.fit(bayesify.convert(network, method), data, checkpoint=tmp_path, checkpoint_steps=1, **OPTIONS)
    finally:
        handle.remove()
    again = bayesify.convert(network, method)
    bayesify.fit(again, data, checkpoint=tmp_path, checkpoint_steps=1, **OPTIONS)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


# The data say enough of every weight, so that the prior's relaxation time does not matter.
@pytest.mark.filterwarnings("ignore:The burn-in")
@pytest.mark.parametrize("online", [False, True])
@pytest.mark.slow
def test_the_generator_learns_where_the_posterior_is(online: bool):
    """A linear model: draws are around the exact mean, with a spread of its order; the start was far away."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, 2, generator=generator)
    y = x @ torch.tensor([[1.0], [-1.0]])
    design = torch.cat([x, torch.ones(20, 1)], 1)
    precision = design.T @ design / 0.25 + torch.eye(3)
    exact = torch.linalg.solve(precision, design.T @ y / 0.25)[:, 0]
    torch.manual_seed(0)
    network = nn.Linear(2, 1)
    nn.init.constant_(network.weight, 3.0)
    method = APD(
        online=online, epochs=20, lr=0.05, prior_std=1.0, samples_per_chain=100, burn_in=0.3, thin=2, latent=4,
        hidden=(16,), steps=400, generator_lr=1e-3, batch=32, round_samples=20,
    )  # fmt: skip
    posterior = bayesify.convert(network, method, likelihood=Gaussian(noise_std=0.5))
    bayesify.fit(posterior, [(x, y)] * 20, num_data=20, progress=False)
    draws = torch.stack([posterior.law.sample(key) for key in posterior.keys(500, seed=0)])
    std = torch.linalg.inv(precision).diagonal().sqrt()
    assert ((draws.mean(0) - exact).abs() / std < 2).all()
    ratio = draws.std(0) / std
    assert ((ratio > 0.2) & (ratio < 3)).all(), ratio


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"hidden": ()}, "hidden needs a layer"),
        ({"algorithm": "vae"}, "algorithm must be"),
        ({"restart": True}, "online=True"),
        ({"together": False}, "move together"),
        ({"chains": 0}, "chains must be at least 1"),
    ],
)
def test_settings_that_make_no_sense(settings: dict, words: str):
    with pytest.raises(ValueError, match=words):
        APD(**settings)


@pytest.mark.parametrize("online", [False, True])
def test_one_sample_is_too_few(online: bool):
    network, data = problem()
    posterior = bayesify.convert(network, APD(online=online, **{**QUICK, "samples_per_chain": 1}))
    with pytest.raises(ValueError, match="single sample"):
        bayesify.fit(posterior, data, **OPTIONS)


@pytest.mark.parametrize("online", [False, True])
def test_a_run_that_ends_before_its_first_sample_learns_from_the_chains_ends(online: bool):
    network, data = problem()
    posterior = bayesify.convert(network, APD(online=online, chains=3, start="perturbed", **{**QUICK, "burn_in": 0.99}))
    bayesify.fit(posterior, [next(iter(data))], num_data=24, **{**OPTIONS, "epochs": 1})
    first = torch.cat([p.detach().flatten() for p in network.parameters()])
    draws = torch.stack([posterior.law.sample(key) for key in posterior.keys(3, seed=0)])
    assert not torch.isclose(draws, first).all(1).any()
    assert not torch.isclose(draws[0], draws[1]).all()
