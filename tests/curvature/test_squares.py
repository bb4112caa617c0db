"""The diagonal of the GGN and of the empirical Fisher, for any network, against Jacobians of single examples."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

import bayesify
from bayesify import Laplace
from bayesify.layers import _gradients
from tests.conformance.cases import EXAMPLES
from tests.curvature.naive import diagonal_ggn, output_hessians

EXACT = {"rtol": 1e-9, "atol": 1e-12}
PRECISION = 0.7


class Twice(nn.Module):
    """One layer that is called twice, and a weight that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.enter = nn.Linear(4, 4)
        self.leave = nn.Linear(4, 3)
        self.other = nn.Linear(4, 4, bias=False)
        self.other.weight = self.enter.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.mix(self.enter(x)))
        return self.leave(torch.tanh(self.mix(self.other(x))))


class Tokens(nn.Module):
    """Tokens that repeat, one of padding, positions without a batch, and a projection tied to a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 5, padding_idx=0)
        self.places = nn.Embedding(7, 5)
        self.norm = nn.RMSNorm(5)
        self.head = nn.Linear(5, 5)
        self.classes = nn.Embedding(3, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.places(torch.arange(tokens.shape[1]))
        x = self.head(torch.relu_(self.norm(x))).mean(1)
        return functional.linear(x, self.classes.weight)


class TimeFirst(nn.Module):
    """(B, T, D) outside, (T, B, D) inside; and windows, (B r, w, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(4, 4)
        self.norm = nn.LayerNorm((2, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inside(x.transpose(0, 1))).transpose(0, 1)
        windows = self.norm(x.reshape(-1, 2, 4))
        return self.head(windows.reshape(len(x), -1, 4).mean(1))


def one_dimension() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, padding="same", dilation=2, padding_mode="circular"),
        nn.InstanceNorm1d(4, affine=True),
        nn.ReLU(inplace=True),
        nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1, groups=2),
        nn.Conv1d(6, 3, 2, stride=3, groups=3, bias=False),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
    )


def three_dimensions() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 2, (1, 2, 3), stride=(1, 2, 1), padding=(0, 1, 1)),
        nn.BatchNorm3d(2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(2 * 3 * 3 * 4, 3),
    )


def _numbers(*shape):
    return lambda rows: torch.randn(rows, *shape, dtype=torch.float64)


NETWORKS = {
    **{name: (example.network, example.inputs) for name, example in EXAMPLES.items()},
    "twice": (Twice, _numbers(4)),
    "tokens": (Tokens, lambda rows: torch.randint(0, 6, (rows, 7))),
    "time first": (TimeFirst, _numbers(4, 4)),
    "one dimension": (one_dimension, _numbers(2, 8)),
    "three dimensions": (three_dimensions, _numbers(1, 3, 4, 4)),
}


def fitted(network, x, y, **settings):
    method = Laplace(structure="diagonal", prior_precision=PRECISION, **settings)
    posterior = bayesify.convert(network, method)
    # Three batches, the last one shorter.
    batches = [(x[a:b], y[a:b]) for a, b in ((0, 2), (2, 4), (4, 5))]
    bayesify.fit(posterior, batches, num_data=len(x), progress=False, accuracy_tolerance=1)
    return posterior


@pytest.mark.parametrize("chunk", [1, 2**22])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.slow
def test_the_ggn_of_any_network(name, chunk, monkeypatch):
    monkeypatch.setattr(_gradients, "CHUNK", chunk)
    make, inputs = NETWORKS[name]
    torch.manual_seed(4)
    network = make().double().eval()
    x, y = inputs(5), torch.arange(5) % 3
    posterior = fitted(network, x, y)
    parameters = dict(network.named_parameters())
    hessians = output_hessians(posterior.likelihood, network(x), y)
    expected = diagonal_ggn(network, x, parameters, hessians)
    assert posterior.law.names == list(parameters)
    for key in parameters:
        assert_close(
            posterior.law.curvature.as_dict()[key], expected[key], **EXACT, msg=lambda text, key=key: f"{key} {text}"
        )
        variance = (2 * posterior.law.log_std.as_dict()[key]).exp()
        if key == "table.weight":
            assert not variance[0].any()
            variance, expected[key] = variance[1:], expected[key][1:]
        assert_close(variance, 1 / (expected[key] + PRECISION), **EXACT)


@pytest.mark.parametrize("name", ["twice", "convolutions", "attention", "tokens"])
def test_the_empirical_fisher_of_any_network(name):
    make, inputs = NETWORKS[name]
    torch.manual_seed(4)
    network = make().double().eval()
    x, y = inputs(5), torch.arange(5) % 3
    found = fitted(network, x, y, curvature="fisher").law.curvature.as_dict()
    parameters = dict(network.named_parameters())
    expected = {key: torch.zeros_like(p) for key, p in parameters.items()}
    for row in range(5):
        loss = functional.cross_entropy(network(x[row : row + 1]), y[row : row + 1])
        grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        for key, grad in zip(parameters, grads, strict=True):
            expected[key] += 0 if grad is None else grad**2
    for key in parameters:
        assert_close(found[key], expected[key], **EXACT)


@pytest.mark.slow
def test_drawn_labels_have_the_ggn_as_their_mean():
    make, inputs = NETWORKS["attention"]
    torch.manual_seed(4)
    network = make().double().eval()
    x, y = inputs(5), torch.arange(5) % 3
    exact = fitted(network, x, y).law.curvature.as_dict()
    runs = [fitted(network, x, y, mc_labels=20, seed=seed).law.curvature.as_dict() for seed in range(12)]
    for key, expected in exact.items():
        each = torch.stack([run[key] for run in runs])
        error = each.std(0) / 12**0.5
        assert bool(((each.mean(0) - expected).abs() <= 8 * error + 1e-12).all()), key
        assert bool(each.std(0).any()), key


def test_what_was_seen_stands_for_all_data():
    make, inputs = NETWORKS["mlp"]
    network = make()
    x, y = inputs(5), torch.arange(5) % 3
    once = fitted(network, x, y)
    posterior = bayesify.convert(network, once.method)
    bayesify.fit(posterior, [(x, y)], num_data=50, progress=False, accuracy_tolerance=1)
    for key, value in once.law.curvature.as_dict().items():
        assert_close(posterior.law.curvature.as_dict()[key], 10 * value, **EXACT)
    assert_close(posterior.law.log_likelihood, 10 * once.law.log_likelihood)


def test_fitting_again_begins_anew():
    make, inputs = NETWORKS["mlp"]
    x, y = inputs(5), torch.arange(5) % 3
    posterior = fitted(make(), x, y)
    before = {key: value.clone() for key, value in posterior.state_dict().items()}
    bayesify.fit(posterior, [(x, y)], num_data=5, progress=False, accuracy_tolerance=1)
    for key, value in posterior.state_dict().items():
        assert_close(value, before[key], **EXACT)


def test_a_frozen_backbone_needs_no_gradient():
    make, inputs = NETWORKS["mlp"]
    network = make()
    for parameter in network.parameters():
        parameter.requires_grad_(False)
    head = network[-1]
    head.requires_grad_(True)
    x, y = inputs(5), torch.arange(5) % 3
    posterior = fitted(network, x, y)
    assert posterior.law.names == ["7.weight", "7.bias"]
    expected = diagonal_ggn(
        network, x, dict(head.named_parameters()), output_hessians(posterior.likelihood, network(x), y)
    )
    assert_close(posterior.law.curvature.as_dict()["7.weight"], expected["weight"], **EXACT)


def test_batch_statistics_are_refused():
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2)).double()
    with pytest.raises(ValueError, match="Module '1' normalises by the statistics of the batch"):
        fitted(network, torch.randn(5, 3).double(), torch.arange(5) % 2)
