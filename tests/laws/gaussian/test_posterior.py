"""The distribution itself, and passes of whole networks."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.testing import assert_close

import bayesify
from bayesify import MAP, BayesAdapter
from bayesify.laws import GaussianLaw, Posterior

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def _posterior(network: nn.Module, *, low: float = -2.0, noise: str = "exemplar", **options) -> Posterior:
    torch.manual_seed(1)
    stds = {name: nn.Parameter(low + torch.rand_like(p)) for name, p in network.named_parameters()}
    return Posterior(network, GaussianLaw(network, log_stds=stds, estimator=noise, **options), method=MAP())


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


# -- the distribution ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("centred", [False, True])
def test_kl_and_entropy_are_those_of_torch(centred: bool):
    network = _mlp()
    centres = {name: torch.randn_like(p) for name, p in network.named_parameters()} if centred else None
    posterior = _posterior(network, prior_means=centres)
    kl = entropy = 0.0
    for name, mean in network.named_parameters():
        q = Normal(mean, posterior.law.log_std.get_parameter(name).exp())
        p = Normal(centres[name] if centres else torch.zeros_like(mean), 0.7)
        kl, entropy = kl + kl_divergence(q, p).sum(), entropy + q.entropy().sum()
    assert_close(posterior.law.kl(0.7), kl, **EXACT)
    assert_close(posterior.law.entropy(), entropy, **EXACT)


def test_kl_is_zero_with_zero_gradient_at_the_prior():
    network = _mlp()
    for p in network.parameters():
        nn.init.zeros_(p)
    stds = {name: nn.Parameter(torch.full_like(p, math.log(0.3))) for name, p in network.named_parameters()}
    posterior = Posterior(network, GaussianLaw(network, log_stds=stds), method=MAP())
    kl = posterior.law.kl(0.3)
    kl.backward()
    assert_close(kl, torch.zeros_like(kl), rtol=0, atol=1e-12)
    for p in posterior.parameters():
        assert_close(p.grad, torch.zeros_like(p), rtol=0, atol=1e-12)


def test_what_has_no_width_is_not_random_and_has_no_part_in_the_kl():
    network = _mlp()
    posterior = _posterior(network)
    whole = posterior.law.kl(0.5)
    rows = [name for name in posterior.law.names if name.startswith("2.")]
    alone = _posterior(nn.Sequential(network[0]))
    for name in alone.law.names:
        alone.law.log_std.get_parameter(name).data.copy_(posterior.law.log_std.get_parameter(name))
    for name in rows:
        posterior.law.log_std.get_parameter(name).data.fill_(-math.inf)
    assert_close(posterior.law.kl(0.5), alone.law.kl(0.5), **EXACT)
    assert whole > posterior.law.kl(0.5)
    posterior.law.kl(0.5).backward()
    for name in rows:
        assert not posterior.law.log_std.get_parameter(name).grad.any()
        assert torch.equal(
            posterior.draw(0).posterior.weights(posterior.keys(1, 0)[0])[name], network.get_parameter(name)
        )


def test_bad_shapes_and_priors_get_a_sentence():
    network = _mlp()
    with pytest.raises(ValueError, match=r"'0\.weight' have the shape"):
        GaussianLaw(network, log_stds={"0.weight": torch.zeros(3, 4)})
    with pytest.raises(ValueError, match="prior_std must be positive"):
        _posterior(network).law.kl(0.0)


# -- draws ----------------------------------------------------------------------------------------------------------


def test_a_draw_is_the_plain_network_with_its_weights():
    network = _mlp()
    posterior = _posterior(network)
    x = torch.randn(5, 3, dtype=torch.float64)
    key = posterior.keys(3, seed=4)[2]
    weights = posterior.weights(key)
    hidden = torch.tanh(x @ weights["0.weight"].T + weights["0.bias"])
    assert_close(posterior.evaluate(x, [key])[0], hidden @ weights["2.weight"].T + weights["2.bias"], **EXACT)


def test_draws_have_the_moments_of_the_posterior():
    posterior = _posterior(nn.Linear(40, 50).double())
    draws = torch.stack([posterior.weights(key)["weight"] for key in posterior.keys(200, seed=0)])
    scores = (draws - posterior.network.weight) / posterior.law.log_std.get_parameter("weight").exp()
    # 400,000 standard normals: false alarms in 1 of 10^6 runs for each line.
    count = scores.numel()
    assert abs(scores.mean()) < 4.9 / count**0.5
    assert abs(scores.var() - 1) < 4.9 * (2 / count) ** 0.5


# -- passes ---------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """A tied weight, a layer called twice, a weight read by another module, attention, and parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.twice = nn.Linear(4, 4, bias=False)
        self.read = nn.Linear(4, 4, bias=False)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.scale = nn.Parameter(torch.ones(4))
        self.positions = nn.Embedding(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions(torch.arange(3))
        x = self.tied(torch.tanh(self.first(x))) * self.scale
        x = x + self.attention(x, x, x)[0]
        x = self.twice(torch.tanh(self.twice(x)))
        return self.head(torch.nn.functional.linear(x, self.read.weight).mean(1))


def test_what_the_plan_says():
    torch.manual_seed(0)
    posterior = _posterior(Odd().double(), noise="auto")
    x = torch.randn(6, 3, 4, dtype=torch.float64)
    posterior(x)
    plan = posterior.law.plan(posterior.trace(x))
    assert sorted(plan.sites) == ["head", "positions", "twice"]
    assert [call.dim for call in plan.sites["twice"].calls] == [0, 0]
    assert [call.dim for call in plan.sites["positions"].calls] == [None]
    assert {name.partition(".")[0] for name in plan.shared} == {"first", "tied", "read", "attention", "scale"}
    assert not posterior.independent_rows(x)


@pytest.mark.parametrize("noise", ["exemplar", "flipout", "local", "auto"])
def test_a_layer_that_is_called_twice_has_one_draw(noise: str):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.layer(x), self.layer(x)], 1)

    torch.manual_seed(0)
    posterior = _posterior(Twice().double(), noise=noise)
    y = posterior(torch.randn(8, 3, dtype=torch.float64))
    assert torch.equal(y[:, 0], y[:, 1])
    assert y.unique().numel() == 24


@pytest.mark.parametrize("noise", ["exemplar", "flipout", "auto", "local", "shared"])
def test_tokens_of_an_example_share_a_weight(noise: str):
    posterior = _posterior(nn.Linear(3, 2).double(), noise=noise)
    x = torch.randn(4, 1, 3, dtype=torch.float64).expand(4, 5, 3)
    y = posterior(x)
    assert_close(y, y[:, :1].expand(4, 5, 2), **EXACT)
    again = posterior(x[:1].expand(4, 5, 3))
    assert torch.allclose(again[0], again[1]) == (noise == "shared")


def test_a_fresh_pass_in_evaluation_mode_is_noisy_inside_transformer_layers():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    posterior = _posterior(nn.TransformerEncoder(layer, 2).double().eval(), low=-4.0)
    plan = posterior.law.plan(posterior.trace(torch.randn(2, 3, 8).double()))
    assert {"layers.0.linear1", "layers.1.norm2"} <= set(plan.sites)
    shared = plan.shared
    for name in shared:
        posterior.law.log_std.get_parameter(name).data.fill_(-math.inf)
    x = torch.randn(1, 3, 8, dtype=torch.float64).expand(4, 3, 8)
    with torch.no_grad():
        y = posterior(x)
    assert not torch.isclose(y[0], y[1]).any()


def test_passes_repeat_with_torchs_generator_and_leave_the_network_plain():
    network = _mlp()
    posterior = _posterior(network, noise="auto")
    x = torch.randn(6, 3, dtype=torch.float64)
    torch.manual_seed(3)
    one = posterior(x)
    torch.manual_seed(3)
    assert torch.equal(one, posterior(x))
    assert not torch.equal(one, posterior(x))
    assert all("forward" not in module.__dict__ for module in network.modules())
    with posterior.mean():
        assert_close(posterior(x), network(x), **EXACT)


def test_one_example_and_one_output():
    for noise in ("exemplar", "flipout", "local", "auto", "shared"):
        posterior = _posterior(nn.Sequential(nn.Linear(3, 1), nn.Flatten()).double(), noise=noise)
        assert posterior(torch.randn(1, 3, dtype=torch.float64)).shape == (1, 1)


def test_members_of_gaussian_posteriors():
    network = _mlp()
    members = []
    for shift in (0.0, 3.0):
        one = _posterior(copy.deepcopy(network), noise="auto")
        with torch.no_grad():
            for parameter in one.network.parameters():
                parameter += shift
        members.append(one)
    posterior = bayesify.ensemble(members)
    x = torch.randn(2000, 3, dtype=torch.float64)
    with torch.no_grad():
        for index in range(2):
            with posterior.member(index), posterior.mean():
                mean = posterior(x)
            for tensor in posterior.law.parts[index].log_std.parameters():
                tensor.data.fill_(-30.0)
            with posterior.member(index):
                assert_close(posterior(x), mean, rtol=0, atol=1e-10)  # a standard deviation of e^-30


def test_the_start_is_uniform_between_the_two_logarithms():
    posterior = bayesify.convert(nn.Linear(200, 50), BayesAdapter())
    for log_std in posterior.law.log_std.parameters():
        assert log_std.min() >= -6
        assert log_std.max() <= -5
    weights = posterior.law.log_std.get_parameter("weight")
    assert abs(weights.mean() + 5.5) < 4.9 * (1 / 12 / weights.numel()) ** 0.5  # false alarms in 1 of 10^6
    other = bayesify.convert(nn.Linear(200, 50), BayesAdapter(seed=1)).law.log_std.get_parameter("weight")
    assert not torch.equal(weights, other)


@pytest.mark.parametrize("noise", ["exemplar", "flipout", "auto", "shared"])
@pytest.mark.parametrize("layer", ["linear", "conv", "norm"])
def test_a_frozen_weight_beside_a_random_bias(layer: str, noise: str):
    torch.manual_seed(0)
    made = {"linear": nn.Linear(3, 2), "conv": nn.Conv1d(3, 2, 2), "norm": nn.BatchNorm1d(3)}[layer].double().eval()
    made.weight.requires_grad_(False)
    posterior = bayesify.convert(made, BayesAdapter(start_std=(0.1, 0.2), estimator=noise))
    assert posterior.law.names == ["bias"]
    x = torch.randn(6, 3, dtype=torch.float64) if layer == "linear" else torch.randn(6, 3, 4, dtype=torch.float64)
    change = posterior(x) - made(x)
    if layer != "linear":  # a bias is the same at all positions
        assert_close(change, change[..., :1].expand_as(change), **EXACT)
        change = change[..., 0]
    assert (change.abs() > 0).all()
    assert torch.allclose(change[0], change[1]) == (noise == "shared")
