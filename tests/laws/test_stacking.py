"""Several draws of weights in one pass are the draws one by one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import bayesify
from bayesify import ABNN, IBNN, SWAG, BayesAdapter, DeepEnsemble, Laplace, convert, predict
from bayesify.laws import BankLaw, GaussianLaw, Posterior
from bayesify.laws.stacking import FEW_OUTPUTS, FEW_ROWS, LARGE, find_stacking
from bayesify.prediction.layout import layout_of

EXACT = {"rtol": 1e-11, "atol": 1e-12}
F64 = torch.float64


class Swapped(nn.Module):
    """The batch is the second dimension of what its linear layer sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.last = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x):
        x = self.norm(self.linear(x.view(len(x), 4, 6).transpose(0, 1)))
        return self.last(x.mean(0))


class Residual(nn.Module):
    """Joins what is before the first random layer with what is after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 3)

    def forward(self, x):
        x = x + torch.relu(self.first(x))
        return self.last(x + self.second(x))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.last = nn.Embedding(9, 6), nn.RMSNorm(6), nn.Linear(6, 3, bias=False)

    def forward(self, x):
        return self.last(self.norm(self.table((x.abs() * 3).long().clamp_max(8))).mean(1))


def image(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, 3, 4)), *layers, nn.Flatten(), nn.LazyLinear(3))


NETWORKS = {
    "linear": lambda: nn.Sequential(nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 3)),
    "large": lambda: nn.Sequential(nn.Linear(24, LARGE // 24 + 1, bias=False), nn.ReLU(), nn.LazyLinear(3)),
    "convolution": lambda: image(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, (2, 3), 2, groups=2, bias=False)
    ),
    "padding": lambda: image(nn.Conv2d(2, 4, 3, padding="same", padding_mode="circular"), nn.GroupNorm(2, 4)),
    "transposed": lambda: image(nn.ConvTranspose2d(2, 4, 3, stride=2, groups=2), nn.ReLU(), nn.Conv2d(4, 1, 1)),
    "swapped": Swapped,
    "residual": Residual,
    "words": Words,
}


def network_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    made = NETWORKS[name]().to(F64).eval()
    made(torch.randn(2, 24, dtype=F64))
    for module in made.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return made


def gaussian(network: nn.Module) -> Posterior:
    network = copy.deepcopy(network)
    log_stds = {name: torch.full_like(p, -1.0) for name, p in network.named_parameters()}
    return Posterior(network, GaussianLaw(network, log_stds=log_stds)).eval()


def alone(posterior: Posterior, x: torch.Tensor, keys: list) -> torch.Tensor:
    return torch.cat([posterior.evaluate(x, [key]) for key in keys])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_layers_have_the_tensors_of_each_draw(name: str, rows: int):
    posterior = gaussian(network_of(name))
    x = torch.randn(rows, 24, dtype=F64)
    keys = posterior.keys(4, seed=1)
    found = predict(posterior, x, num_draws=4, seed=1, keep_samples=True)
    expected = alone(posterior, x, keys)
    assert expected.var(0).min() > 1e-6
    torch.testing.assert_close(found.samples, expected.softmax(-1), **EXACT)
    layout = layout_of(posterior, x, keys)
    assert layout.stacking is not None
    assert layout.folds
    assert layout.joins == (name == "residual")
    together = posterior.evaluate(x, keys, tiled=layout.joins)
    torch.testing.assert_close(together, expected, **EXACT)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("method", [BayesAdapter(start_std=(0.1, 0.2)), DeepEnsemble(members=4, start="perturbed")])
@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1, FEW_OUTPUTS + 1])
@torch.no_grad()
def test_products_are_those_of_each_draw_in_whichever_order(method: bayesify.Method, rows: int, bias: bool):
    torch.manual_seed(0)
    wide, narrow = LARGE // 24 + 1, 2 * FEW_OUTPUTS
    layers = [nn.Linear(24, wide, bias=bias), nn.ReLU(), nn.Linear(wide, narrow, bias=bias), nn.Linear(narrow, 3)]
    network, x = nn.Sequential(*layers).to(F64), torch.randn(rows, 24, dtype=F64)
    for include in (None, "3"):
        posterior = convert(network, method, include=include).eval()
        keys = posterior.keys(4, seed=1)
        naive = torch.stack([posterior.plain_network(posterior.weights(key))(x) for key in keys])
        assert naive.var(0).min() > 1e-12
        torch.testing.assert_close(posterior.evaluate(x, keys), naive, **EXACT)


METHODS = {
    "bayes-adapter": BayesAdapter(start_std=(0.1, 0.2)),
    "swag": SWAG(num_bn_draws=6),
    "abnn": ABNN(members=2),
    "ibnn": IBNN(components=2, start_std=(0.2, 0.3)),
    "deep-ensemble": DeepEnsemble(members=5),
    "laplace": Laplace(structure="kronecker"),
    "laplace-diagonal": Laplace(structure="diagonal"),
    "laplace-last": Laplace(structure="last-layer"),
}


def fitted(method: bayesify.Method) -> Posterior:
    posterior = convert(network_of("convolution"), method)
    torch.manual_seed(1)
    data = [(torch.randn(8, 24, dtype=F64), torch.randint(3, (8,))) for _ in range(2)]
    bayesify.fit(posterior, data, epochs=2, num_data=16, seed=0, progress=False)
    return posterior.eval()


@pytest.mark.parametrize("name", METHODS)
@torch.no_grad()
def test_draws_of_every_law_share_a_pass(name: str):
    with torch.enable_grad():
        posterior = fitted(METHODS[name])
    x = torch.randn(2, 24, dtype=F64)
    passes = []
    handle = posterior.network.register_forward_hook(lambda *_: passes.append(1))
    whole = predict(posterior, x, num_draws=5, seed=3, keep_samples=True)
    passes.clear()
    again = predict(posterior, x, num_draws=5, seed=3, keep_samples=True)
    assert len(passes) == 1
    handle.remove()
    expected = alone(posterior, x, posterior.keys(5, seed=3)).softmax(-1)
    assert expected.var(0).max() > 1e-8
    torch.testing.assert_close(whole.samples, expected, **EXACT)
    torch.testing.assert_close(again.samples, expected, **EXACT)
    each = predict(posterior, x, num_draws=5, seed=3, keep_samples=True, chunk_size=1)
    torch.testing.assert_close(each.samples, expected, **EXACT)


@torch.no_grad()
def test_members_of_different_laws_share_a_pass_and_keep_their_temperatures():
    network = network_of("linear")
    one = convert(network, BayesAdapter(start_std=(0.1, 0.2)))
    other = convert(network, DeepEnsemble(members=2))
    both = bayesify.ensemble([one, other]).eval()
    x = torch.randn(2, 24, dtype=F64)
    keys = both.keys(6, seed=0)
    both.likelihood.temperature = torch.tensor([0.5, 2.0], dtype=F64)
    assert both.law.together(both.trace(x)) == "stack"
    temperatures = both.likelihood.temperature[[key.path[0] for key in keys]]
    expected = (alone(both, x, keys) / temperatures[:, None, None]).softmax(-1)
    found = predict(both, x, num_draws=6, seed=0, keep_samples=True)
    torch.testing.assert_close(found.samples, expected, **EXACT)


def test_what_cannot_share_a_pass_does_not():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.inner = nn.Linear(24, 24), nn.Linear(24, 3)

        def forward(self, x):
            return self.inner(nn.functional.linear(self.table(x), self.table.weight))

    class Own(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    x = torch.randn(2, 24, dtype=F64)
    for network in (Tied(), nn.Sequential(nn.Linear(24, 4), Own(4, 3))):
        posterior = gaussian(network.double())
        assert posterior.law.together(posterior.trace(x)) == "one"
        keys = posterior.keys(3, seed=0)
        found = predict(posterior, x, num_draws=3, seed=0, keep_samples=True)
        torch.testing.assert_close(found.samples, alone(posterior, x, keys).softmax(-1), **EXACT)
    assert find_stacking(Own(4, 3), ["weight"], None) is None


@torch.no_grad()
def test_draws_are_made_again_after_a_change_however_it_is_made():
    posterior = gaussian(network_of("linear"))
    x = torch.randn(2, 24, dtype=F64)
    keys = posterior.keys(3, seed=0)

    def right() -> None:
        torch.testing.assert_close(posterior.evaluate(x, keys), alone(posterior, x, keys), **EXACT)

    right()
    posterior.network[0].weight.data[3, 2] += 1
    right()
    posterior.law.log_std.as_dict()["2.weight"].add_(1)
    right()
    posterior.law.rescale(0.5)
    right()
    posterior.load_state_dict({name: 2 * tensor for name, tensor in posterior.state_dict().items()})
    right()


@torch.no_grad()
def test_draws_in_memory_are_bounded(monkeypatch: pytest.MonkeyPatch):
    posterior = gaussian(network_of("linear"))
    x, size = torch.randn(1, 24, dtype=F64), sum(p.numel() for p in posterior.network.parameters())
    monkeypatch.setattr("bayesify.laws.kept.MOST_NUMBERS", 4 * size)
    kept = posterior.runtime.kept
    for seed, held in ((0, 3), (0, 3), (1, 3), (2, 3)):
        posterior.evaluate(x, posterior.keys(3, seed))
        assert kept._numbers == held * size == sum(s.numel() for one in kept._found.values() for s in one.values())
    posterior.evaluate(x, posterior.keys(5, 0))
    assert not kept._found


def test_gradients_reach_what_draws_are_made_of():
    posterior = gaussian(network_of("convolution"))
    for log_std in posterior.law.log_std.as_dict().values():
        log_std.requires_grad_()
    tensors = [*posterior.network.parameters(), *posterior.law.log_std.as_dict().values()]
    x, keys = torch.randn(2, 24, dtype=F64), posterior.keys(3, seed=0)
    found = torch.autograd.grad(posterior.evaluate(x, keys).square().sum(), tensors)
    expected = torch.autograd.grad(alone(posterior, x, keys).square().sum(), tensors)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@torch.no_grad()
def test_a_bank_of_a_network_with_normalisation_takes_each_samples_statistics():
    network = network_of("convolution")
    bank = Posterior(network, BankLaw(network, names=[n for n, _ in network.named_parameters()], size=4)).eval()
    for row in torch.randn(4, bank.law.samples.shape[1], dtype=F64):
        bank.law.append(row)
    bank.refresh_statistics([(torch.randn(16, 24, dtype=F64), torch.zeros(16))])
    x, keys = torch.randn(2, 24, dtype=F64), bank.keys(4, seed=0)
    assert bank.law.together(bank.trace(x)) == "stack"
    torch.testing.assert_close(bank.evaluate(x, keys), alone(bank, x, keys), **EXACT)
