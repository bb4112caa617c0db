"""The noise of minibatches' gradients: what is measured, what is said about it, and what takes it off.

The model is linear regression, whose posterior is known: 400 rows, 4 weights, batches of 50, noise .5, prior 1. Many
chains, each with minibatches of its own, are the rows of one parameter. Statistical tests are of thousands of nearly
independent numbers, and what they reject is several times their standard error.
"""

import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import SGLD, Gaussian
from bayesify.methods.gradient_noise import EVERY, RARELY, GradientNoise, cancelled_share
from bayesify.methods.langevin import Langevin

N, B, NOISE = 400, 50, 0.5
CHAINS = 500
_random = torch.Generator().manual_seed(0)
X = torch.randn(N, 4, dtype=torch.float64, generator=_random)
Y = X @ torch.randn(4, dtype=torch.float64, generator=_random)
Y = Y + NOISE * torch.randn(N, dtype=torch.float64, generator=_random)
PRECISION = X.T @ X / NOISE**2 + torch.eye(4, dtype=torch.float64)
MEAN = torch.linalg.solve(PRECISION, X.T @ Y / NOISE**2)
EXACT = torch.linalg.inv(PRECISION)


class Chains:
    """Many chains as the rows of one parameter, each with its own order of the data."""

    def __init__(self, method: SGLD, *, batch: int = B, replacement: bool = False, adapt: int = 0) -> None:
        self.weights = nn.Parameter(MEAN.repeat(CHAINS, 1))
        self.batch, self.replacement = batch, replacement
        self.random = torch.Generator().manual_seed(1)
        torch.manual_seed(2)
        group = {"params": [self.weights], "num_data": torch.tensor(N)}
        made = method.make_optimizer([group])
        assert isinstance(made, Langevin)
        self.optimizer = made
        made.param_groups[0].update(adapt_steps=adapt, measure_after=max(1, adapt))
        self.meter = made.meter = GradientNoise(torch.tensor([-1.0]))
        made.plan_look()
        self.expected: list[float] = []
        self.steps = 0

    def rows(self) -> Tensor:
        if self.replacement:
            return torch.randint(N, (CHAINS, self.batch), generator=self.random)
        place = self.steps * self.batch % N
        if place == 0:
            self.order = torch.rand(CHAINS, N, generator=self.random).argsort(1)
        return self.order[:, place : place + self.batch]

    def step(self, *, parts: int = 1) -> None:
        """Take a step of all chains, by so many minibatches that are accumulated."""
        if self.meter.due and self.steps:
            self.expected.append(self.exact_share())
        self.optimizer.zero_grad()
        for rows in self.rows().chunk(parts, 1):
            x, y = X[rows], Y[rows]
            losses = 0.5 / NOISE**2 * ((x @ self.weights[..., None])[..., 0] - y) ** 2  # (chains, rows)
            self.meter.look(lambda some, losses=losses: losses[:, some].mean(1).sum(), rows.shape[1], [self.weights])
            torch.autograd.backward(losses.mean(1).sum() / parts)
        self.optimizer.step()
        self.steps += 1

    def exact_share(self) -> float:
        """Return the share at the present states, from the variance of all examples' gradients."""
        group = self.optimizer.param_groups[0]
        w = self.weights.detach()
        each = X * (w @ X.T - Y)[..., None] / NOISE**2  # (chains, N, 4)
        ratio = group["lr"] * N * each.var(1) / self.batch * (1 - self.batch / N) / 4
        if group["kind"] == "sghmc":
            ratio = ratio / group["friction"]
        if group["kind"] == "psgld":
            ratio = ratio / (1e-5 + self.optimizer.state[self.weights]["square"].sqrt())
        return float(ratio.mean())

    def ratio(self, burn_in: int, samples: int, every: int) -> float:
        """Return the standard deviation of samples as a multiple of the exact posterior's."""
        kept = []
        for step in range(burn_in + samples * every):
            self.step()
            if step >= burn_in and step % every == 0:
                kept.append(self.weights.detach().clone())
        return float((torch.stack(kept) - MEAN).square().mean((0, 1)).div(EXACT.diagonal()).sqrt().mean())


def discretised(lr: float) -> float:
    """Return the same of steps without gradient noise: S = A^-1 (I - lr/4 A/n)^-1."""
    stationary = EXACT @ torch.linalg.inv(torch.eye(4, dtype=torch.float64) - lr / (4 * N) * PRECISION)
    return float((stationary.diagonal() / EXACT.diagonal()).sqrt().mean())


def method(**settings) -> SGLD:
    return SGLD(prior_std=1.0, **settings)


@pytest.mark.parametrize(
    "settings", [{"lr": 0.2}, {"lr": 0.01}, {"kind": "sghmc", "lr": 0.05, "friction": 0.3}, {"kind": "psgld"}]
)
@pytest.mark.slow
def test_the_measured_share_is_that_of_the_examples_gradients(settings: dict):
    chains = Chains(method(**settings), adapt=10)
    for _ in range(4 * RARELY):
        chains.step()
    assert len(chains.expected) == 4
    # 4 looks at 2,000 numbers, each with the relative variance 2: a standard error of .016.
    assert chains.meter.shares.item() == pytest.approx(sum(chains.expected) / 4, rel=0.08)


def test_what_is_measured_at_the_default_step_is_more_than_the_injected_noise():
    chains = Chains(method())
    for _ in range(2 * RARELY):
        chains.step()
    assert 1.1 < chains.meter.shares.item() < 1.6


def test_accumulated_minibatches_have_the_noise_of_the_whole():
    whole, parts = Chains(method(lr=0.05)), Chains(method(lr=0.05))
    for _ in range(3 * RARELY):
        whole.step()
        parts.step(parts=2)
    torch.testing.assert_close(whole.weights, parts.weights, rtol=1e-9, atol=1e-9)
    assert parts.meter.shares.item() == pytest.approx(whole.meter.shares.item(), rel=0.1)


@pytest.mark.slow
def test_full_batches_have_no_noise_however_the_chain_moves():
    chains = Chains(method(lr=0.2), batch=N)
    for _ in range(2 * RARELY):
        chains.step()
    assert chains.meter.shares.item() == 0


def test_moves_of_the_mean_gradient_are_no_noise():
    """Examples that are all the same: the gradient differs from step to step, but never between examples."""
    weights = nn.Parameter(torch.full((3,), 50.0, dtype=torch.float64))
    optimizer = Langevin([{"params": [weights]}], torch.tensor(1000), lr=0.3)
    meter = optimizer.meter = GradientNoise(torch.tensor([-1.0]))
    optimizer.plan_look()
    for _ in range(2 * RARELY + 1):
        optimizer.zero_grad()
        losses = weights.square().sum().expand(9) / 2
        meter.look(lambda some, losses=losses: losses[some].mean(), 9, [weights])
        torch.autograd.backward(losses.mean())
        optimizer.step()
    assert 0 <= meter.shares.item() < 1e-20


@pytest.mark.parametrize(
    ("lr", "correction", "replacement", "low", "high"),
    [
        (0.2, None, False, 1.3, 1.6),  # beyond the steps' own coarseness
        (0.2, "shuffled", False, 0.98, 1.15),
        (0.05, None, False, 1.025, 1.06),
        (0.05, "shuffled", False, 0.985, 1.015),
        (0.05, None, True, 1.15, 1.22),
        (0.05, "independent", True, 0.985, 1.02),
        (0.01, None, False, 0.985, 1.015),
    ],
)
@pytest.mark.slow
def test_standard_deviations_with_and_without_the_correction(lr, correction, replacement, low, high):
    chains = Chains(method(lr=lr, correction=correction), replacement=replacement)
    relaxed = math.ceil(1 / lr)  # two relaxation times, 2 / (lr 4)
    found = chains.ratio(burn_in=max(4 * relaxed, 8 * EVERY), samples=6 if lr < 0.05 else 12, every=relaxed)
    assert low < found / discretised(lr) < high


@pytest.mark.slow
def test_psgld_at_its_default_step_samples_a_known_posterior():
    """In steps of .2, the default of sgld, standard deviations are 3.1 times too large."""
    chains = Chains(method(kind="psgld"), adapt=60)
    assert 0.97 < chains.ratio(burn_in=260, samples=4, every=60) < 1.05


@pytest.mark.parametrize("relaxations", [0.02, 0.2, 1.0, 5.0])
def test_how_much_of_the_noise_of_an_epoch_cancels(relaxations: float):
    """The stationary variance of w <- (1 - a) w + e, where the e of each m steps are exchangeable with the sum zero."""
    m = 400
    a = relaxations / m
    decay = (1 - a) ** torch.arange(m - 1, -1, -1, dtype=torch.float64)
    covariance = torch.eye(m, dtype=torch.float64) - 1 / m
    whole = decay @ covariance @ decay / (1 - (1 - a) ** (2 * m))  # at the ends of epochs
    phases = [whole]
    for steps in range(1, m):
        part = (1 - a) ** torch.arange(steps - 1, -1, -1, dtype=torch.float64)
        phases.append(whole * (1 - a) ** (2 * steps) + part @ covariance[:steps, :steps] @ part)
    exact = torch.stack(phases).mean() * (1 - (1 - a) ** 2)  # of what independent steps would give
    share = torch.tensor([relaxations / 2], dtype=torch.float64)
    assert (cancelled_share(share, 1.0, 1.0) / share).item() == pytest.approx(exact.item(), rel=0.03)


# -- runs ---------------------------------------------------------------------------------------------------------


def fitted(epochs: int = 40, batch: int = B, **settings) -> tuple[bayesify.Posterior, list[str]]:
    """Return a posterior after `fit`, and what was said about gradients."""
    network = nn.Linear(4, 1, bias=False).double()
    with torch.no_grad():
        network.weight.copy_(MEAN)
    posterior = bayesify.convert(network, method(epochs=epochs, **settings), likelihood=Gaussian(noise_std=NOISE))
    loader = DataLoader(TensorDataset(X, Y[:, None]), batch_size=batch, shuffle=True)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        bayesify.fit(posterior, loader, progress=False)
    return posterior, [str(one.message) for one in found if "gradients" in str(one.message)]


@pytest.mark.slow
def test_fit_warns_of_gradient_noise_with_its_figure_and_the_step_that_would_do():
    posterior, (words,) = fitted(samples_per_chain=8)
    share = posterior.law.gradient_noise.item()
    assert 0.7 < share < 2.2  # ten looks at four numbers
    assert f"has {share:.2g} times the variance" in words
    advised = float(words.partition("lr=")[2].split()[0])
    assert 0.085 < advised / 0.2 * share <= 0.1
    assert "correction='shuffled'" in words


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.01},
        {"batch": N, "epochs": 150},
        {"lr": 0.05, "correction": "shuffled"},
        {"kind": "psgld"},
        {"epochs": 10},  # a trial
    ],
)
@pytest.mark.slow
def test_fit_says_nothing_where_there_is_nothing_to_say(settings: dict):
    posterior, words = fitted(samples_per_chain=8, **settings)
    assert not words
    if settings.get("batch") == N:
        assert posterior.law.gradient_noise.item() == 0


@pytest.mark.slow
def test_noise_that_cannot_be_taken_off_is_said():
    _, (words,) = fitted(samples_per_chain=8, correction="shuffled", lr=0.3)
    assert "cannot be taken off" in words


def test_a_loop_of_ones_own_measures_too():
    posterior = bayesify.convert(nn.Linear(4, 1, bias=False).double(), method(), likelihood=Gaussian(noise_std=NOISE))
    (stage,) = posterior.method.stages(posterior)
    optimizer = posterior.method.make_optimizer(stage.groups)
    posterior.method.prepare_optimizer(posterior, optimizer, N)
    for step in range(6 * RARELY + 1):
        optimizer.zero_grad()
        rows = torch.arange(B) + step % (N // B) * B
        with stage.context():
            torch.autograd.backward(posterior.loss((X[rows], Y[rows, None]), num_data=N).total)
        optimizer.step()
    assert 0.4 < posterior.law.gradient_noise.item() < 3


@pytest.mark.filterwarnings("ignore:The burn-in")
def test_apd_warns_too():
    network = nn.Linear(4, 1, bias=False).double()
    apd = bayesify.APD(prior_std=1.0, epochs=16, chains=2, samples_per_chain=4, hidden=(4,), latent=2, steps=2)
    posterior = bayesify.convert(network, apd, likelihood=Gaussian(noise_std=NOISE))
    loader = DataLoader(TensorDataset(X, Y[:, None]), batch_size=B, shuffle=True)
    with pytest.warns(UserWarning, match="noise of the minibatches' gradients"):
        bayesify.fit(posterior, loader, progress=False)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.slow
def test_chains_have_shares_of_their_own(together: bool):
    posterior, (_,) = fitted(samples_per_chain=8, chains=2, together=together)
    one, two = posterior.law.gradient_noise.tolist()
    assert one != two
    assert 0.5 < one < 2.5
    assert 0.5 < two < 2.5
    assert bayesify.join_banks([posterior, posterior]).law.gradient_noise.tolist() == [one, two] * 2


@pytest.mark.slow
def test_diagnose_shows_the_share():
    pytest.importorskip("arviz")
    posterior, _ = fitted(samples_per_chain=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = bayesify.diagnose(posterior, X[:2])
        assert torch.equal(found.gradient_noise, posterior.law.gradient_noise.double())
        assert f"gradient noise: {posterior.law.gradient_noise.item():.2g} of" in str(found)
        posterior.law.gradient_noise.fill_(-1)
        assert "not measured" in str(bayesify.diagnose(posterior, X[:2]))


def test_states_of_before_the_measurement_load():
    posterior = bayesify.convert(nn.Linear(4, 1), SGLD(samples_per_chain=4), likelihood="regression")
    state = posterior.state_dict()
    del state["law.gradient_noise"]
    again = bayesify.convert(nn.Linear(4, 1), SGLD(samples_per_chain=4), likelihood="regression")
    again.load_state_dict(state)
    assert again.law.noise_shares().tolist() == [-1]
    again.load_state_dict(posterior.state_dict())
    assert torch.equal(again.law.samples, posterior.law.samples)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.slow
def test_a_killed_run_goes_on_with_its_correction(together: bool, tmp_path: Path):
    settings = {
        "samples_per_chain": 4,
        "epochs": 14,
        "chains": 2,
        "together": together,
        "correction": "shuffled",
        "lr": 0.05,
    }
    whole, _ = fitted(**settings)
    steps = 0

    def kill(*_) -> None:
        nonlocal steps
        steps += 1
        if steps == 77:
            raise KeyboardInterrupt

    def run() -> bayesify.Posterior:
        network = nn.Linear(4, 1, bias=False).double()
        with torch.no_grad():
            network.weight.copy_(MEAN)
        posterior = bayesify.convert(network, method(**settings), likelihood=Gaussian(noise_std=NOISE))
        loader = DataLoader(TensorDataset(X, Y[:, None]), batch_size=B, shuffle=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bayesify.fit(posterior, loader, progress=False, checkpoint=tmp_path, checkpoint_steps=4)
        return posterior

    handle = register_optimizer_step_post_hook(kill)
    try:
        with pytest.raises(KeyboardInterrupt):
            run()
    finally:
        handle.remove()
    again = run()
    assert again.law.gradient_noise.min() > 0
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_the_chain_does_not_depend_on_being_measured(monkeypatch: pytest.MonkeyPatch):
    measured, _ = fitted(samples_per_chain=8, epochs=14)
    monkeypatch.setattr(SGLD, "prepare_optimizer", lambda *_: None)
    plain, words = fitted(samples_per_chain=8, epochs=14)
    assert torch.equal(measured.law.samples, plain.law.samples)
    assert not words


def test_a_network_that_runs_backward_once_is_not_measured():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            ctx.spent = False
            return x.clone()

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:
            if ctx.needs_input_grad[0] and torch._C._autograd._get_current_graph_task_keep_graph():
                raise RuntimeError("the graph cannot be kept")
            return grad

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Once.apply(super().forward(x))

    network = Layer(4, 1).double()
    posterior = bayesify.convert(network, method(epochs=20, samples_per_chain=4), likelihood=Gaussian(noise_std=NOISE))
    loader = DataLoader(TensorDataset(X, Y[:, None]), batch_size=B, shuffle=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bayesify.fit(posterior, loader, progress=False)
    assert posterior.law.gradient_noise.item() == -1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"correction": "yes"}, "correction must be"),
        ({"correction": "shuffled", "kind": "sghmc"}, "not known for 'sghmc'"),
    ],
)
def test_corrections_that_make_no_sense(settings: dict, words: str):
    with pytest.raises(ValueError, match=words):
        SGLD(**settings)


def test_each_kind_has_a_step_of_its_own():
    assert (SGLD().lr, SGLD(kind="sghmc").lr, SGLD(kind="psgld").lr, SGLD(kind="psgld", lr=0.2).lr) == (
        0.2, 0.2, 0.002, 0.2,
    )  # fmt: skip
    assert SGLD(kind="psgld").to_dict()["lr"] == 0.002
