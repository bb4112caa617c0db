"""BayesAdapter: the objective, its two forms, what it refuses, and a posterior with a known answer."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import BayesAdapter, Gaussian

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def _data(rows: int = 24) -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(rows, 3, dtype=torch.float64), torch.arange(rows) % 2)


# -- the objective --------------------------------------------------------------------------------------------------


def test_the_loss_is_the_mean_nll_and_the_kl_over_n():
    posterior = bayesify.convert(_network(), BayesAdapter(start_std=(0.1, 0.2), prior_std=0.5, temperature=0.3))
    x, y = _data()[:]
    with posterior.drawn(posterior.keys(1, 0)[0]):
        terms = posterior.loss((x, y), num_data=100)
        assert_close(terms["nll"], nn.functional.cross_entropy(posterior(x), y), **EXACT)
    assert_close(terms["kl"], 0.3 * posterior.law.kl(0.5) / 100, **EXACT)
    assert_close(terms.total, terms["nll"] + terms["kl"], **EXACT)


@pytest.mark.parametrize("prior", ["zero", "pretrained"])
def test_autograd_of_the_kl_is_the_built_in_decay(prior: str):
    n, decay = 50, 0.02
    posterior = bayesify.convert(_network(), BayesAdapter(start_std=(0.1, 0.2), weight_decay=decay, prior=prior))
    with torch.no_grad():
        for p in posterior.network.parameters():
            p.add_(torch.randn_like(p))
    (posterior.law.kl(posterior.method.std_of_prior(n)) / n).backward()
    for name, mean in posterior.network.named_parameters():
        log_std = posterior.law.log_std.get_parameter(name)
        centre = posterior.law.prior_mean.as_dict()[name] if prior == "pretrained" else 0.0
        assert_close(mean.grad, decay * (mean - centre).detach(), **EXACT)
        assert_close(log_std.grad, (decay * (2 * log_std).exp() - 1 / n).detach(), **EXACT)


@pytest.mark.parametrize("noise", ["auto", "shared"])
def test_frozen_statistics_train_what_predicts(noise: str):
    x = _data()[:][0]
    network = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)).double()
    network(3 * x + 1)  # statistics unlike those of x
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    for statistics in ("frozen", "updated"):
        method = BayesAdapter(start_std=(0.0, 0.0), statistics=statistics, estimator=noise)
        posterior = bayesify.convert(network, method).train()
        same = torch.allclose(posterior(x), network.eval()(x), rtol=1e-12)
        kept = all(torch.equal(posterior.network.get_buffer(name), value) for name, value in before.items())
        assert same == kept == (statistics == "frozen")
        assert posterior.network[1].training
    with pytest.raises(ValueError, match="'updated' or 'frozen'"):
        BayesAdapter(statistics="none")


@pytest.mark.parametrize("prior", ["zero", "pretrained"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.slow
def test_both_forms_take_the_same_steps_of_sgd(prior: str, accumulate: int):
    states = []
    for form in ("autograd", "built-in"):
        method = BayesAdapter(
            start_std=(0.1, 0.2),
            weight_decay=0.05,
            prior=prior,
            prior_gradient=form,
            lr=0.05,
            epochs=3,
            temperature=0.7,
        )
        posterior = bayesify.convert(_network(), method)
        loader = DataLoader(_data(), batch_size=6, shuffle=True)
        bayesify.fit(posterior, loader, progress=False, accuracy_tolerance=1, accumulate=accumulate)
        states.append(posterior.state_dict())
    begun = bayesify.convert(_network(), method).state_dict()
    for name, tensor in states[0].items():
        assert_close(tensor, states[1][name], **EXACT)
        if name.startswith(("network", "log_std")):
            assert not torch.isclose(tensor, begun[name], rtol=1e-6).all(), name


def test_a_hand_written_loop_with_the_built_in_form():
    losses = []
    for form in ("autograd", "built-in"):
        posterior = bayesify.convert(_network(), BayesAdapter(start_std=(0.1, 0.2), prior_gradient=form))
        optimizer = torch.optim.SGD(posterior.parameters(), lr=0.1)
        posterior.method.prepare_optimizer(posterior, optimizer, 24)
        torch.manual_seed(5)
        for _ in range(3):
            optimizer.zero_grad()
            posterior.loss(_data()[:], num_data=24).total.backward()
            optimizer.step()
        losses.append(torch.cat([p.flatten() for p in posterior.parameters()]))
    assert_close(*losses, **EXACT)


def test_the_priors_width():
    # The paper's three settings (appendix B) have these variances.
    for decay, n, variance in ((2e-4, 50_000, 0.1), (1e-4, 1_281_167, 0.0078), (5e-4, 490_000, 0.0041)):
        assert_close(BayesAdapter(weight_decay=decay).std_of_prior(n) ** 2, variance, rtol=0.01, atol=0)
    assert BayesAdapter(prior_std=0.3).std_of_prior(7) == 0.3


# -- the optimiser --------------------------------------------------------------------------------------------------


def test_weight_decay_in_the_optimizer_is_refused():
    posterior = bayesify.convert(_network(), BayesAdapter())
    loader = DataLoader(_data(), batch_size=6)
    with pytest.raises(ValueError, match=r"weight_decay=0\.01, and the prior"):
        bayesify.fit(posterior, loader, epochs=1, progress=False, optimizer=torch.optim.AdamW)
    bayesify.fit(posterior, loader, epochs=1, progress=False, accuracy_tolerance=1, optimizer=torch.optim.Adam)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_groups_and_the_schedule_of_appendix_b(optimizer: str):
    method = BayesAdapter(lr=1e-3, log_std_lr=0.1, optimizer=optimizer)
    posterior = bayesify.convert(_network(), method)
    (stage,) = method.stages(posterior)
    made = method.make_optimizer(stage.groups)
    assert [sum(p.numel() for p in group["params"]) for group in made.param_groups] == [32, 32]
    assert all(not group["weight_decay"] for group in made.param_groups)
    schedule = method.make_schedule(made, 40)
    rates = []
    for _ in range(40):
        rates.append([group["lr"] for group in made.param_groups])
        made.step()
        schedule.step()
    assert {rate[0] for rate in rates} == {1e-3}
    expected = [0.1] * 10 + [0.02] * 10 + [0.004] * 10 + [0.0008] * 10
    assert_close([rate[1] for rate in rates], expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "held"])
def test_the_means_take_every_schedule_that_methods_have(schedule: str):
    method = BayesAdapter(lr=0.5, schedule=schedule, log_std_schedule="constant", log_std_lr=0.1)
    made = method.make_optimizer(method.stages(bayesify.convert(_network(), method))[0].groups)
    rates = method.make_schedule(made, 10)
    for _ in range(9):
        made.step()
        rates.step()
    factor = {"constant": 1.0, "cosine": (1 + math.cos(0.9 * math.pi)) / 2, "held": 0.01}[schedule]
    assert [group["lr"] for group in made.param_groups] == pytest.approx([0.5 * factor, 0.1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start_std": (0.2, 0.1)}, "start_std"),
        ({"start_std": (0.0, 0.1)}, "start_std"),
        ({"estimator": "loud"}, "estimator must be one of"),
        ({"weight_decay": 0.0}, "needs a width"),
        ({"prior_std": -1.0}, "prior_std must be positive"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_bad_settings_get_a_sentence(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        BayesAdapter(**settings)


def test_padding_is_a_constant():
    posterior = bayesify.convert(nn.Embedding(5, 3, padding_idx=2), BayesAdapter(start_std=(0.1, 0.2)))
    ids = torch.tensor([[2, 1]])
    for output in (posterior(ids), posterior.draw(0)(ids)):
        assert torch.equal(output[0, 0], posterior.network.weight[2])
        assert not torch.isclose(output[0, 1], posterior.network.weight[1]).any()
    posterior.law.kl(1.0).backward()
    assert not posterior.network.weight.grad[2].any()


def test_the_built_in_form_leaves_constants_alone():
    gradients = []
    for form in ("autograd", "built-in"):
        method = BayesAdapter(start_std=(0.1, 0.2), prior_gradient=form)
        posterior = bayesify.convert(nn.Embedding(5, 3, padding_idx=2).double(), method)
        with torch.no_grad():
            posterior.network.weight.copy_(torch.arange(15.0).view(5, 3))
        if form == "autograd":
            (posterior.law.kl(method.std_of_prior(30)) / 30).backward()
        else:
            method.add_prior_gradient(posterior, 30)
        gradients.append([p.grad for p in (posterior.network.weight, posterior.law.log_std.get_parameter("weight"))])
    assert_close(*gradients, **EXACT)
    assert not gradients[1][0][2].any()
    assert gradients[1][0][1].all()


# -- a known answer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", ["local", "exemplar", "flipout"])
@pytest.mark.slow
def test_bayesian_linear_regression_has_the_analytic_mean_field_posterior(noise: str):
    """For y = x w + e the best diagonal Gaussian has the exact mean, and the variances 1 / diag(precision)."""
    torch.manual_seed(0)
    n, noise_std, prior_std = 40, 0.5, 1.5
    x = torch.randn(n, 3, dtype=torch.float64) @ torch.tensor([[1.0, 0.6, 0], [0, 1, 0.3], [0, 0, 1]]).double()
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]).double() + noise_std * torch.randn(n, 1, dtype=torch.float64)
    precision = x.T @ x / noise_std**2 + torch.eye(3) / prior_std**2
    mean = torch.linalg.solve(precision, x.T @ y / noise_std**2)
    std = precision.diagonal().rsqrt()
    method = BayesAdapter(
        estimator=noise, start_std=(0.02, 0.02), prior_std=prior_std, lr=0.02, log_std_lr=0.1, epochs=300,
        schedule="cosine", log_std_schedule="cosine",
    )  # fmt: skip
    network = nn.Linear(3, 1, bias=False).double()
    posterior = bayesify.convert(network, method, likelihood=Gaussian(noise_std=noise_std))
    bayesify.fit(posterior, [(x, y)] * 4, num_data=n, progress=False)
    found = posterior.law.log_std.get_parameter("weight").exp()[0]
    # The schedule ends at zero, so what is left is the noise of the last steps: a few hundredths of a deviation.
    assert ((posterior.network.weight[0] - mean[:, 0]).abs() < 0.1 * std).all()
    assert ((found / std).log().abs() < 0.05).all()
    draws = torch.stack([posterior.law.drawn(key)["weight"][0] for key in posterior.keys(2000, seed=0)])
    assert_close(draws.std(0), found, rtol=4.9 / math.sqrt(2 * 2000), atol=0)
