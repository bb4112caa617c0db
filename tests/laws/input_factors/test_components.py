"""Every row that is trained belongs to a component: what prediction uses, and nothing between two."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import bayesify
from bayesify import IBNN
from bayesify.laws import Pass

EXACT = {"rtol": 1e-12, "atol": 1e-12}
TOKENS = torch.randint(7, (6, 4), generator=torch.Generator().manual_seed(0))


class Tied(nn.Module):
    """An embedding whose weight is read in one of several ways at the end."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embedding = nn.Embedding(7, 5)
        self.positions = nn.Embedding(4, 5)
        self.mix = nn.Linear(5, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 7, bias=False)
        if how == "two modules":
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        if self.how == "positions without a batch":
            h = h + self.positions(torch.arange(4))
        h = self.norm(h + torch.tanh(self.mix(h))).mean(1)
        if self.how == "read outside":
            return functional.linear(h, self.embedding.weight)
        if self.how == "read inside and outside":
            return self.head(h) + h @ self.head.weight.T
        return self.head(h)


WAYS = ["untied", "two modules", "read outside", "read inside and outside", "positions without a batch"]


def _posterior(how: str, **settings) -> bayesify.Posterior:
    torch.manual_seed(0)
    method = IBNN(**{"components": 3, "means_std": 0.5, "start_std": (0.0, 0.0), **settings})
    return bayesify.convert(Tied(how).double(), method).train()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("how", WAYS)
def test_rows_of_a_pass_equal_their_own_components_network(how: str, bias: bool):
    posterior = _posterior(how, bias=bias)
    trace = posterior.trace(TOKENS)
    networks = [posterior.law.component(k)(TOKENS) for k in range(3)]
    for same in (False, True):
        for own in posterior.law.assign(6, 4, same=same, trace=trace).view(4, 6):
            found = posterior.outputs(TOKENS, Pass(part=own))
            torch.testing.assert_close(found, torch.stack([networks[k][i] for i, k in enumerate(own)]), **EXACT)


@pytest.mark.parametrize("how", WAYS)
def test_a_fresh_pass_is_made_of_components_and_reaches_all(how: str):
    posterior = _posterior(how)
    networks = torch.stack([posterior.law.component(k)(TOKENS) for k in range(3)])
    reached = set()
    for _ in range(20):  # 3 (2/3)^20: the chance that one is not among so many passes of one component is 1e-3
        away = (posterior(TOKENS) - networks).abs().amax(-1)
        assert (away.amin(0) < 1e-12).all()
        reached |= set(away.argmin(0).tolist())
    assert reached == {0, 1, 2}
    with posterior.member(1):
        torch.testing.assert_close(posterior(TOKENS), networks[1], **EXACT)


@pytest.mark.parametrize("how", WAYS)
def test_the_loss_of_as_many_copies_as_components_is_the_components_mean(how: str):
    posterior = _posterior(how, repeats=3)
    labels = torch.arange(6)
    wanted = torch.stack(
        [functional.cross_entropy(posterior.law.component(k)(TOKENS), labels) for k in range(3)]
    ).mean()
    torch.testing.assert_close(posterior.loss((TOKENS, labels), num_data=6)["nll"], wanted, **EXACT)


def test_components_of_rows_that_share_a_weight_cannot_differ():
    posterior = _posterior("read outside")
    mixed = pytest.raises(ValueError, match=r"\['embedding'\] are read outside .* exclude these layers")
    with mixed:
        posterior.outputs(TOKENS, Pass(part=torch.tensor([0, 1, 0, 1, 0, 1])))
    excluded = bayesify.convert(Tied("read outside"), IBNN(), exclude="embedding")
    assert not excluded.law.one_component(excluded.trace(TOKENS))


def test_batch_normalisation_with_one_component_at_a_time_gets_a_warning():
    network = nn.Sequential(Tied("read outside"), nn.BatchNorm1d(7))
    posterior = bayesify.convert(network, IBNN())
    with pytest.warns(UserWarning, match=r"\['0\.embedding'\] .* one component at a time"):
        posterior(TOKENS)
