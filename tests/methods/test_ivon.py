"""IVON against a naive loop of the paper's equations, and against a posterior that is known exactly."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import IVON, Gaussian, convert, fit
from bayesify.methods.ivon import VariationalNewton

N = 40


def _network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def _batches(number: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(5, 3, generator=generator, dtype=torch.float64), torch.randint(2, (5,), generator=generator))
        for _ in range(number)
    ]


def _naive(method: IVON, network: nn.Module, groups: list[list[tuple[Tensor, Tensor]]]) -> tuple[dict, dict]:
    """Algorithm 1, entry by entry; a step has the batches of a group. Returns the means and sigmas by name."""
    ess = (N if method.ess is None else method.ess) / method.temperature
    delta, b1, b2 = method.weight_decay, method.beta1, method.beta2
    h0 = 1 / (ess * method.start_std**2) - delta
    names = [name for name, _ in network.named_parameters()]
    m = {name: p.detach().clone() for name, p in network.named_parameters()}
    h = {name: torch.full_like(p, h0) for name, p in m.items()}
    g = {name: torch.zeros_like(p) for name, p in m.items()}
    for t, group in enumerate(groups, 1):
        ghat = {name: torch.zeros_like(p) for name, p in m.items()}
        hhat = {name: torch.zeros_like(p) for name, p in m.items()}
        draws = len(group) * method.mc_samples
        for x, y in group:
            for _ in range(method.mc_samples):
                sigma = {name: (ess * (h[name] + delta)) ** -0.5 for name in names}
                theta = {name: m[name] + sigma[name] * torch.randn_like(m[name]) for name in names}
                leaves = {name: tensor.clone().requires_grad_() for name, tensor in theta.items()}
                loss = nn.functional.cross_entropy(torch.func.functional_call(network, leaves, (x,)), y)
                for name, gradient in zip(names, torch.autograd.grad(loss, list(leaves.values())), strict=True):
                    ghat[name] += gradient / draws
                    hhat[name] += gradient * (theta[name] - m[name]) / sigma[name] ** 2 / draws
        for name in names:
            for i in range(m[name].numel()):
                mi, hi, gi = (tensor[name].view(-1) for tensor in (m, h, g))
                new, old = hhat[name].view(-1)[i].item(), hi[i].item()
                gi[i] = b1 * gi[i] + (1 - b1) * ghat[name].view(-1)[i]
                hi[i] = b2 * old + (1 - b2) * new + 0.5 * (1 - b2) ** 2 * (old - new) ** 2 / (old + delta)
                step = (gi[i].item() / (1 - b1**t) + delta * mi[i].item()) / (hi[i].item() + delta)
                if method.clip_radius is not None:
                    step = min(max(step, -method.clip_radius), method.clip_radius)
                mi[i] -= method.lr * (h0 + delta) * step
    return m, {name: (ess * (h[name] + delta)) ** -0.5 for name in names}


CONFIGURATIONS = [
    IVON(start_std=0.1, lr=0.3, beta2=0.9),
    IVON(start_std=0.1, lr=0.3, beta2=0.9, mc_samples=3, weight_decay=0.05),
    IVON(start_std=0.05, lr=0.3, beta1=0.5, beta2=0.8, ess=77.0, temperature=0.3, clip_radius=0.02),
]


@pytest.mark.parametrize("method", CONFIGURATIONS, ids=["plain", "draws", "cold and clipped"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_are_those_of_a_naive_loop(method: IVON, accumulate: int):
    network, batches = _network(), _batches(6)
    posterior = convert(network, method)
    (stage,) = method.stages(posterior)
    optimizer = method.make_optimizer(stage.groups)
    method.prepare_optimizer(posterior, optimizer, N)
    groups = [batches[i : i + accumulate] for i in range(0, len(batches), accumulate)]
    torch.manual_seed(3)
    for group in groups:
        optimizer.zero_grad()
        for batch in group:
            (posterior.loss(batch, num_data=N).total / accumulate).backward()
        optimizer.step()
    plain = _network()
    torch.manual_seed(3)
    means, stds = _naive(method, plain, groups)
    for name, mean in means.items():
        torch.testing.assert_close(posterior.network.get_parameter(name).detach(), mean, rtol=1e-10, atol=1e-12)
        assert not torch.allclose(mean, network.get_parameter(name), atol=1e-4)
        log_std = posterior.law.log_std.as_dict()[name].detach()
        torch.testing.assert_close(log_std.exp(), stds[name], rtol=1e-10, atol=0)
        assert (log_std - math.log(method.start_std)).abs().min() > 1e-5


def test_a_fit_is_decided_by_its_seed_and_follows_its_schedule():
    """The first step has the whole rate, whatever the schedule; those after it do not."""
    found = {}
    for schedule, seed, accumulate in [("constant", 0, 4), ("cosine", 0, 4), ("constant", 1, 4), ("cosine", 0, 1)]:
        posterior = convert(_network(), IVON(start_std=0.1, lr=0.3, beta2=0.9, schedule=schedule, epochs=1))
        options = {"accumulate": accumulate, "seed": seed, "progress": False, "accuracy_tolerance": 1.0}
        fit(posterior, _batches(4), num_data=N, **options)
        found[schedule, seed, accumulate] = torch.cat([p.detach().flatten() for p in posterior.parameters()])
    assert torch.equal(found["constant", 0, 4], found["cosine", 0, 4])
    assert not torch.isclose(found["constant", 0, 4], found["constant", 1, 4]).any()
    assert not torch.isclose(found["constant", 0, 4], found["cosine", 0, 1]).any()


@pytest.mark.slow
def test_linear_regressions_have_their_analytic_mean_field_posteriors():
    """For y = x w + e the best diagonal Gaussian has the exact mean, and the variances 1 / diag(precision).

    The same 3 weights are learned K = 200 times beside each other, so that averages over them have little noise. The
    precision of a weight differs from the exact one by (1 - beta2)^(1/2) or so, 7 %, its average over K by .5 %, and
    the quadratic term makes it (1 - beta2)/2 Var(hhat)/(h + delta)^2 too large, .25 % times a few.
    """
    torch.manual_seed(0)
    copies, noise_std, delta = 200, 0.5, 0.02
    x = torch.randn(N, 3, dtype=torch.float64) @ torch.tensor([[1.0, 0.6, 0], [0, 0.8, 0], [0, 0, 2]]).double()
    y = x @ torch.randn(3, copies).double() + noise_std * torch.randn(N, copies, dtype=torch.float64)
    precision = x.T @ x / noise_std**2 + N * delta * torch.eye(3, dtype=torch.float64)
    mean = torch.linalg.solve(precision, x.T @ y / noise_std**2).T
    std = precision.diagonal().rsqrt()
    # The loss is a mean over the copies too: N times their number makes it that of all data.
    ess = N * copies
    method = IVON(ess=ess, start_std=0.2, weight_decay=delta / copies, lr=12.0, beta2=0.995, schedule="cosine")
    posterior = convert(nn.Linear(3, copies, bias=False).double(), method, likelihood=Gaussian(noise_std))
    fit(posterior, [(x, y)], epochs=1500, num_data=N, progress=False)
    away = (posterior.network.weight.detach() - mean) / std
    found = (-2 * posterior.law.log_std.as_dict()["weight"].detach()).exp() * std**2
    assert away.abs().max() < 0.3
    assert away.std() < 0.05
    assert ((found.mean(0) - 1).abs() < 0.03).all()
    assert (precision.inverse().diagonal() > 1.2 * std**2).any()  # and not the marginals', which are wider


@pytest.mark.parametrize(("settings", "ess"), [({"temperature": 0.25}, 4 * N), ({"ess": 7.0}, 7), ({}, N)])
@pytest.mark.slow
def test_variances_go_to_one_over_the_curvature_and_the_sample_size(settings: dict, ess: float):
    """With a loss of curvature c in each weight sigma^2 goes to 1/(lambda (c + delta)), on average."""
    curvature = 1 / 500  # the loss is a mean over outputs
    method = IVON(**settings, start_std=0.7 * (ess / 500) ** -0.5, weight_decay=0.5 / 500, lr=1e-9, beta2=0.98)
    network = nn.Linear(1, 500, bias=False).double()
    posterior = convert(network, method, likelihood=Gaussian(1.0))
    x = torch.ones(N, 1, dtype=torch.float64)
    fit(posterior, [(x, network(x).detach())], epochs=250, num_data=N, progress=False)
    precision = (-2 * posterior.law.log_std.as_dict()["weight"].detach()).exp()
    assert float(precision.mean()) == pytest.approx(ess * (curvature + method.weight_decay), rel=0.05)


def test_what_is_not_random_is_trained_without_noise():
    method = IVON(start_std=0.1, lr=0.1, beta2=0.9, epochs=2)
    posterior = convert(_network(), method, include="2", likelihood="classification")
    before = posterior.network.get_parameter("0.weight").detach().clone()
    fit(posterior, _batches(3), num_data=N, progress=False, accuracy_tolerance=1.0)
    assert list(posterior.law.names) == ["2.weight", "2.bias"]
    assert not torch.equal(posterior.network.get_parameter("0.weight"), before)


def test_parameters_of_others_move_by_their_average_gradient():
    weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = VariationalNewton(
        [{"params": [weight], "random": False}], lr=0.1, start_std=0.1, weight_decay=0.5, betas=(0.9, 0.99)
    )
    average, expected = 0.0, 1.0
    for t in range(1, 4):
        optimizer.zero_grad()
        (weight**2).sum().backward()
        average = 0.9 * average + 0.1 * 2 * expected
        expected -= 0.1 * average / (1 - 0.9**t)
        optimizer.step()
        torch.testing.assert_close(weight.detach(), torch.full((2,), expected, dtype=torch.float64), rtol=1e-12, atol=0)


def test_padding_is_a_constant():
    network = nn.Sequential(nn.Embedding(4, 3, padding_idx=1), nn.Flatten(), nn.Linear(6, 2))
    posterior = convert(network, IVON.example())
    tokens = torch.tensor([[0, 1], [2, 3], [1, 2], [3, 1]])
    fit(posterior, [(tokens, torch.tensor([0, 1, 0, 1]))], epochs=3, num_data=4, progress=False, accuracy_tolerance=1.0)
    log_std = posterior.law.log_std.as_dict()["0.weight"]
    assert (log_std[1] == -math.inf).all()
    assert log_std[[0, 2, 3]].isfinite().all()
    assert (posterior.network[0].weight[1] == 0).all()


def _loader() -> DataLoader:
    x, y = (torch.cat(parts) for parts in zip(*_batches(4), strict=True))
    return DataLoader(TensorDataset(x, y), batch_size=5, shuffle=True)


class StoppedError(Exception):
    """Stands for whatever ends a run."""


def test_a_run_that_was_stopped_goes_on_exactly(tmp_path, monkeypatch):
    method = IVON(start_std=0.1, lr=0.3, beta2=0.9, mc_samples=2, epochs=3, schedule="cosine")
    options = {"progress": False, "accuracy_tolerance": 1.0, "checkpoint_steps": 1}
    whole = convert(_network(), method)
    fit(whole, _loader(), **options)
    step, count = VariationalNewton.step, iter(range(100))

    def stops(self, closure=None):
        if next(count) == 6:
            raise StoppedError
        return step(self, closure)

    posterior = convert(_network(), method)
    monkeypatch.setattr(VariationalNewton, "step", stops)
    with pytest.raises(StoppedError):
        fit(posterior, _loader(), checkpoint=tmp_path, **options)
    monkeypatch.undo()
    again = convert(_network(), method)
    history = fit(again, _loader(), checkpoint=tmp_path, **options)
    assert history.resumed_from == ("ivon", 1)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_what_was_saved_is_the_same_and_learns_on(tmp_path):
    method = IVON(start_std=0.1, lr=0.3, beta2=0.9, epochs=2)
    posterior = convert(_network(), method)
    fit(posterior, _loader(), progress=False, accuracy_tolerance=1.0)
    bayesify.save(posterior, tmp_path)
    loaded = bayesify.load(tmp_path, _network())
    assert loaded.method == method
    x = _batches(1)[0][0]
    for how in ("sampling", "streamlined", "linearised", "mean"):
        one, other = (bayesify.predict(each.eval(), x, how=how) for each in (posterior, loaded))
        assert torch.equal(one.log_probs, other.log_probs), how
    for each in (posterior, loaded):  # sigma is all that is known of the curvature
        fit(each, _loader(), seed=4, progress=False, accuracy_tolerance=1.0)
    for name, tensor in posterior.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_members_of_an_ensemble():
    posteriors = []
    for seed in (0, 1):
        posterior = convert(_network(), IVON(start_std=0.1, lr=0.3, beta2=0.9, epochs=2))
        fit(posterior, _loader(), seed=seed, progress=False, accuracy_tolerance=1.0)
        posteriors.append(posterior.eval())
    x = _batches(1)[0][0]
    both = bayesify.predict(bayesify.ensemble(posteriors), x, how="streamlined")
    each = torch.stack([bayesify.predict(one, x, how="streamlined").probs for one in posteriors])
    torch.testing.assert_close(both.probs, each.mean(0), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start_std": -1.0}, "start_std"),
        ({"ess": 0.0}, "ess must be positive"),
        ({"temperature": math.inf}, "temperature must be positive"),
        ({"weight_decay": 0.0}, "weight_decay must be positive"),
        ({"clip_radius": 0.0}, "clip_radius must be positive"),
        ({"beta1": 1.0}, "beta1 must be"),
        ({"beta2": -0.1}, "beta2 must be"),
        ({"mc_samples": 0}, "mc_samples must be"),
        ({"statistics": "kept"}, "statistics must be"),
    ],
)
def test_bad_settings_get_a_sentence(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        IVON(**settings)


def test_what_it_cannot_learn_with_gets_a_sentence():
    posterior = convert(_network(), IVON())
    with pytest.raises(ValueError, match="IVON is an optimiser itself, and Adam cannot"):
        fit(posterior, _loader(), optimizer=torch.optim.Adam, progress=False)
    with pytest.raises(ValueError, match="learns from noise"):
        fit(convert(_network(), IVON(start_std=0.0)), _loader(), progress=False)
    optimizer = posterior.method.make_optimizer(posterior.method.stages(posterior)[0].groups)
    posterior.loss(_batches(1)[0], num_data=N).total.backward()
    with pytest.raises(ValueError, match="Take the optimiser from a learner"):
        optimizer.step()
    posterior.method.prepare_optimizer(posterior, optimizer, N)
    optimizer.zero_grad()
    with posterior.mean():
        posterior.loss(_batches(1)[0], num_data=N).total.backward()
    with pytest.raises(ValueError, match="a pass without noise"):
        optimizer.step()
