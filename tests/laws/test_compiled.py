"""Posteriors whose network is compiled: draws that share a pass are one graph, for batches of every size."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from bayesify import SWAG, DeepEnsemble, convert, predict
from tests.laws.networks import spread


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten())
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.body(x.view(-1, 2, 6, 6)))


class Twice(nn.Module):
    """One layer sees the batch first, and then second, so that its calls have to be counted."""

    def __init__(self):
        super().__init__()
        self.first, self.both, self.head = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 3)

    def forward(self, x):
        x = self.both(self.first(x.view(x.shape[0], 3, 24)))
        return self.head(self.both(x.transpose(0, 1).relu()).mean(0))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = {"d_model": 8, "nhead": 2, "dim_feedforward": 12, "dropout": 0.0, "batch_first": True}
        self.layer, self.head = nn.TransformerEncoderLayer(**sizes), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.layer(x.view(-1, 9, 8)).mean(1))


@pytest.fixture(autouse=True)
def anew():
    torch._dynamo.reset()
    counters.clear()


MEMBERS = DeepEnsemble(members=3, start="perturbed")


@pytest.mark.parametrize(("network", "method"), [(Images, MEMBERS), (Twice, SWAG(rank=2)), (Tokens, MEMBERS)])
@pytest.mark.slow
def test_a_second_size_is_compiled_for_all_others(network, method):
    """As in torch itself: a first size is a constant, a second one a variable, and one row another graph."""
    torch.manual_seed(0)
    posterior = convert(network().eval(), method, include=["layer.linear*", "head"] if network is Tokens else None)
    posterior = spread(posterior) if method.name == "swag" else posterior
    batches = [torch.randn(rows, 72) for rows in (3, 4, 2, 3, 4, 1)]
    expected = [predict(posterior, x, seed=0, num_draws=3).probs for x in batches]
    posterior.network.compile(backend="eager", fullgraph=True)
    graphs = []
    for x, probs in zip(batches, expected, strict=True):
        torch.testing.assert_close(predict(posterior, x, seed=0, num_draws=3).probs, probs, rtol=1e-5, atol=1e-6)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1] > graphs[0] > 0
    assert graphs[4] == graphs[1]
    assert graphs[5] - graphs[4] <= 1
    assert not counters["graph_break"]


def test_a_container_of_torchs_is_left_alone_as_torch_does():
    """`nn.Sequential.compile()` compiles nothing; nor does it each of ten layers, of which eight would be the limit."""
    torch.manual_seed(0)
    layers = [layer for _ in range(9) for layer in (nn.Linear(4, 4), nn.Tanh())]
    posterior = convert(nn.Sequential(*layers, nn.Linear(4, 3)), DeepEnsemble(members=3, start="perturbed"))
    x = torch.randn(2, 4)
    expected = predict(posterior, x, seed=0).probs
    posterior.network.compile(backend="eager")
    assert torch.equal(predict(posterior, x, seed=0).probs, expected)
    assert counters["stats"]["unique_graphs"] == 0
