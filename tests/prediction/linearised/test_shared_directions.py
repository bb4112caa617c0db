"""Laws whose weights move together, along directions that all layers share: against the whole Jacobian, in float64."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

from bayesify import SGLD, SWAG, Linearised, Streamlined, capabilities, convert, predict
from bayesify._core.random import Key
from bayesify.laws import BankLaw, GeneratorLaw, MemberLaw, Posterior
from bayesify.laws.low_rank import leading
from tests.prediction.linearised.networks import NETWORKS, randn

EXACT = {"rtol": 1e-9, "atol": 1e-12}
NAMES = ["mlp", "tokens", "residual", "twice", "odd", "transformer"]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def swag(network, rank=3, snapshots=6):
    """Return a SWAG posterior of weights that moved by chance."""
    posterior = convert(network.double().eval(), SWAG(rank=rank, scale=0.3))
    law = posterior.law
    for _ in range(snapshots):
        law.collect(law.codec.flatten(law.network) + 0.3 * torch.randn_like(law.average))
    if posterior.statistics is not None:  # as they are; the derivatives are what is tested
        posterior.law.statistics = posterior.statistics = None
    return posterior


def covariance_of(posterior, inputs, mean, weights_covariance):
    """Return J S J', (B, K, K), at a mean (D,) of all random weights."""
    codec = posterior.law.codec

    def run(vector):
        return functional_call(posterior.network, codec.split(vector), (inputs,)).flatten(1)

    jacobian = jacrev(run)(mean)
    return jacobian @ weights_covariance @ jacobian.mT


def centred(covariance):
    projection = torch.eye(covariance.shape[-1], dtype=covariance.dtype) - 1 / covariance.shape[-1]
    return (projection @ covariance @ projection).diagonal(dim1=-2, dim2=-1).sum(-1)


def low_rank(law):
    """Return the covariance of SWAG's weights, as its equation says."""
    deviations = law.deviations
    return 0.3**2 / 2 * (torch.diag(law.variance()) + deviations.T @ deviations / (len(deviations) - 1))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of the reference's vmap
@pytest.mark.parametrize("name", NAMES)
def test_swag_with_a_rank(name):
    make, inputs = NETWORKS[name]
    posterior = swag(make())
    expected = centred(covariance_of(posterior, inputs, posterior.law.average, low_rank(posterior.law)))
    found = predict(posterior, inputs, how="linearised")
    torch.testing.assert_close(found.logits_variance.sum(-1), expected, **EXACT)
    assert found.predictor.endswith("with 3 directions that all weights share")


def test_swag_equals_its_draws():
    """Weights that move little: the variance of many draws, which know nothing of components."""
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    posterior = swag(network)
    posterior.law.rescale(0.05)
    x = randn(3, 4)
    draws = torch.stack([posterior.evaluate(x, [key])[0] for key in posterior.keys(4000, 0)]).detach()
    drawn = (draws - draws.mean(-1, keepdim=True)).var(0).sum(-1)
    torch.testing.assert_close(
        predict(posterior, x, how="linearised").logits_variance.sum(-1), drawn, rtol=0.08, atol=0
    )


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_streamlined_takes_a_backward_pass():
    make, inputs = NETWORKS["mlp"]
    network = make()
    network[-1] = nn.Linear(6, 2)
    posterior = swag(network)
    expected = centred(covariance_of(posterior, inputs, posterior.law.average, low_rank(posterior.law)))
    for how in ("streamlined", Streamlined(engine="margin")):
        found = predict(posterior, inputs, how=how)
        torch.testing.assert_close(found.logits_variance.sum(-1), expected, **EXACT)
    with pytest.raises(ValueError, match=r"Weights move together here.*how='streamlined' or how='linearised'"):
        predict(posterior, inputs, how=Streamlined(engine="moments"))


def test_scales_of_layers():
    make, inputs = NETWORKS["mlp"]
    posterior = swag(make())
    one = predict(posterior, inputs, how="linearised").logits_variance
    layers = dict.fromkeys(("0", "2", "4"), 4.0)
    torch.testing.assert_close(
        predict(posterior, inputs, how="linearised", variance_scale=layers).logits_variance, 4 * one, **EXACT
    )


def bank(network, size):
    law = BankLaw(network, names=[name for name, _ in network.named_parameters()], size=size)
    first = law.codec.flatten(network)
    for _ in range(size):
        law.append(first + 0.1 * torch.randn_like(first))
    return Posterior(network, law)


@pytest.mark.parametrize("size", [5, 30])
def test_bank(size):
    """A few samples are all directions; of many the rest is a variance of each weight."""
    make, inputs = NETWORKS["mlp"]
    posterior = bank(make().double().eval(), size)
    samples, mean = posterior.law.samples, posterior.law.average()
    deviations = (samples - mean) / size**0.5
    exact = deviations.T @ deviations
    if size > 20:
        columns, left = leading(deviations)
        assert columns.shape == (20, samples.shape[1])
        torch.testing.assert_close((columns.square().sum(0) + left), exact.diagonal(), **EXACT)
        exact = columns.T @ columns + torch.diag(left)
    found = predict(posterior, inputs, how=Linearised()).logits_variance.sum(-1)
    torch.testing.assert_close(found, centred(covariance_of(posterior, inputs, mean, exact)), **EXACT)
    assert capabilities(posterior)["streamlined"] is True


def test_an_empty_bank_says_so():
    network = nn.Linear(4, 3)
    law = BankLaw(network, names=["weight"], size=3)
    assert "no samples yet" in capabilities(Posterior(network, law))["linearised"]


@pytest.mark.parametrize("hidden", [(), (5,)])
def test_generator(hidden):
    """Weights of a generator, against the moments of many draws; without hidden layers against their formula."""
    make, inputs = NETWORKS["mlp"]
    network = make().double().eval()
    names = [name for name, _ in network.named_parameters()]
    law = GeneratorLaw(network, names=names, latent=3, hidden=hidden, num_bn_draws=4, residual=True)
    with torch.no_grad():
        law.generator[-1].weight.normal_(std=0.1)
        law.residual_std.fill_(0.05)
    posterior = Posterior(network, law)
    found = predict(posterior, inputs, how="linearised").logits_variance.sum(-1)
    weight = law.generator[-1].weight.detach()
    if hidden:
        draws = torch.stack([law.sample(Key(0, index)) for index in range(3000)])
        covariance, tolerance = draws.T.cov(), {"rtol": 0.15, "atol": 0}
    else:
        covariance, tolerance = weight @ weight.T + 0.05**2 * torch.eye(len(weight)).double(), EXACT
    expected = centred(covariance_of(posterior, inputs, law.centre(), covariance))
    torch.testing.assert_close(found, expected, **tolerance)


def test_members_of_such_laws():
    make, inputs = NETWORKS["mlp"]
    network = make().double().eval()
    laws = [bank(network, 4).law for _ in range(2)]
    both = predict(Posterior(network, MemberLaw(network, laws)), inputs, how="linearised").probs
    alone = [predict(Posterior(network, law), inputs, how="linearised").probs for law in laws]
    torch.testing.assert_close(both, (alone[0] + alone[1]) / 2, **EXACT)


def test_chains_of_sgld_have_it():
    network = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    posterior = convert(network, SGLD(samples_per_chain=4))
    law = posterior.law
    for _ in range(4):
        law.append(law.codec.flatten(network) + 0.1 * torch.randn(sum(law.codec.sizes)))
    assert (predict(posterior, torch.randn(3, 4), how="streamlined").epistemic > 0).all()
