"""Posteriors, predictors and networks, every two of them: an answer, or a sentence that names what does answer."""

import copy
import functools
import re

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import ABNN, APD, IBNN, MAP, SGLD, SWAG, BayesAdapter, DeepEnsemble, Laplace, MCDropout, Streamlined
from bayesify.cli import main
from bayesify.laws import GaussianLaw, GaussianMixtureLaw, MemberLaw, Posterior, Refusal
from bayesify.prediction import PREDICTORS
from tests.conformance.pairs import covers, pairwise

CLASSES = 3
ENGINES = (
    *(Streamlined(engine=engine) for engine in ("moments", "margin", "principal")),
    *(Streamlined(covariance=covariance) for covariance in ("full", "per-head")),
)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 5, batch_first=True)
        self.norm = nn.LayerNorm(5)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.head(self.dropout(self.norm(self.lstm(x)[0][:, -1])))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.1, batch_first=True)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(self.layer(x).mean(1))


class Odd(nn.Module):
    """A weight in an einsum, a normalised weight, PReLU, a bilinear layer, and no last nn.Linear."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.slope = nn.PReLU(init=0.3)
        self.mixed = nn.Parameter(torch.randn(6, 5) / 3)
        self.dropout = nn.Dropout(0.1)
        self.pair = nn.Bilinear(5, 4, 5)
        self.length = nn.Parameter(torch.ones(CLASSES))
        self.direction = nn.Parameter(torch.randn(CLASSES, 5))

    def reset_parameters(self):
        for parameter in (self.mixed, self.length, self.direction):
            nn.init.uniform_(parameter, 0.5, 1.5)

    def forward(self, x):
        y = torch.einsum("bi,io->bo", self.slope(self.norm(self.first(x))), self.mixed)
        y = self.pair(self.dropout(y).tanh(), x)
        weight = self.length[:, None] * self.direction / self.direction.norm(dim=1, keepdim=True)
        return functional.linear(y, weight)


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, CLASSES))


def cnn():
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Conv2d(4, 4, 3)),
        *(nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES)),
    )


NETWORKS = {
    "mlp": (mlp, (4,)),
    "cnn": (cnn, (2, 7, 7)),
    "lstm": (Recurrent, (4, 3)),
    "transformer": (Tokens, (4, 6)),
    "odd": (Odd, (4,)),
}
SGLD_LIKE = {"epochs": 2, "lr": 0.1, "weight_decay": 0.0}
POSTERIORS = {
    "map": MAP(),
    "mc-dropout": MCDropout(p=0.1),
    "abnn": ABNN(members=2, alpha=0.1),
    "ensemble": DeepEnsemble(members=2, start="network"),
    "swag": SWAG(rank=2, num_bn_draws=4, epochs=2, snapshots_per_epoch=2),
    "swag, diagonal": SWAG(rank=0, num_bn_draws=4, epochs=2, snapshots_per_epoch=2),
    "adapter": BayesAdapter(start_std=(0.02, 0.02)),
    "ibnn": IBNN(components=2, draws_per_component=2, means_std=0.05, start_std=(0.05, 0.05)),
    "laplace": Laplace(prior_precision=300.0),
    "laplace, diagonal": Laplace(structure="diagonal", prior_precision=3000.0),
    "laplace, kronecker": Laplace(structure="kronecker", prior_precision=3000.0),
    "sgld": SGLD(samples_per_chain=4, burn_in=0.3, **SGLD_LIKE),
    "apd": APD(chains=2, hidden=(4,), latent=2, steps=2, num_bn_draws=4, samples_per_chain=4, **SGLD_LIKE),
    "mixture": None,
    "members": None,
}
LEARNED = ("swag", "laplace", "sgld", "apd")  # the others are random as they are converted


def inputs_of(network, rows=6):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, *NETWORKS[network][1], generator=generator)


@functools.cache
def made(name, network):
    torch.manual_seed(1)
    plain = NETWORKS[network][0]().eval()
    if (
        name == "laplace" and network == "odd"
    ):  # its default is the last linear layer, whose output must be the network's
        plain = nn.Sequential(plain, nn.Linear(CLASSES, CLASSES))
    x = inputs_of(network, 8)
    loader = DataLoader(TensorDataset(x, torch.arange(8) % CLASSES), batch_size=4)
    if name == "mixture":
        posterior = Posterior(plain, mixture_of(plain))
        posterior.refresh_statistics(loader)
    elif name == "members":
        posterior = Posterior(plain, members_of(plain))
    else:
        posterior = bayesify.convert(plain, POSTERIORS[name])
    if name.startswith(LEARNED):
        bayesify.fit(posterior, loader, progress=False, accuracy_tolerance=1.0)
    return posterior.eval()


def mixture_of(network):
    names = [name for name, _ in network.named_parameters()]
    law = GaussianMixtureLaw(network, names=names, components=2, num_bn_draws=4)
    with torch.no_grad():
        law.means += 0.02 * torch.randn_like(law.means)
        law.stds.fill_(0.02)
        law.shares.copy_(torch.tensor([0.25, 0.75]))
    return law


def members_of(network):
    """Return two members of Gaussian weights, with biases of their own."""
    tensors = {name: p.detach() for name, p in network.named_parameters()}
    log_stds = {name: torch.full_like(tensor, 0.02).log() for name, tensor in tensors.items()}
    biases = {name: tensor for name, tensor in tensors.items() if name.endswith("bias")}
    return MemberLaw(
        network,
        [
            GaussianLaw(network, log_stds=log_stds, own={name: bias + shift for name, bias in biases.items()})
            for shift in (0.0, 0.05)
        ],
    )


def predicted(posterior, x, how):
    options = {"num_draws": 4, "seed": 0} if how == "sampling" else {}
    return bayesify.predict(posterior, x, how=how, **options)


def is_right(prediction):
    values = [prediction.probs, prediction.total, prediction.aleatoric, prediction.epistemic]
    torch.testing.assert_close(prediction.probs.sum(-1), torch.ones(len(prediction)))
    torch.testing.assert_close(prediction.total, prediction.aleatoric + prediction.epistemic, rtol=1e-4, atol=1e-5)
    return all(bool(value.isfinite().all() and (value >= 0).all()) for value in values)


def named(refusal, how):
    """Return the predictors that a sentence advises."""
    found = [name for name in re.findall(r"how='([a-z-]+)'", refusal) if name != how]
    assert found, f"how={how!r} says no other: {refusal}"
    assert set(found) <= set(PREDICTORS)
    return found


HOWS = [*PREDICTORS, *ENGINES]
ROWS = pairwise(list(POSTERIORS), list(NETWORKS), HOWS)


def cells(*names, slow=("transformer", "odd")):
    """Return every posterior, or those of these names, on every network; some of the networks take long."""
    return [
        pytest.param(name, network, id=f"{network}-{name}", marks=[pytest.mark.slow] if network in slow else [])
        for network in NETWORKS
        for name in names or POSTERIORS
    ]


@pytest.mark.parametrize(("name", "network"), cells())
def test_an_answer_or_a_name_that_answers(name, network):
    """The posterior says whether it has a predictor; engines may still have no rule for a network."""
    posterior, x = made(name, network), inputs_of(network)
    for how in [how for *cell, how in ROWS if cell == [name, network]]:
        able = how.supports(posterior) if isinstance(how, Streamlined) else bayesify.capabilities(posterior)[how]
        prediction, refusal = attempted(posterior, x, how)
        if prediction is not None:
            assert able is True, how
            assert is_right(prediction), how
            assert how in ("sampling", "mean") or prediction.predictor
            continue
        if isinstance(how, str):
            assert isinstance(able, Refusal), how
        if not able:
            assert str(able) == refusal
        for other in named(refusal, how):
            assert is_right(predicted(posterior, x, other)), (how, other)


def test_every_two_of_a_posterior_a_network_and_a_predictor_meet():
    assert covers(ROWS, list(POSTERIORS), list(NETWORKS), HOWS)
    assert len(ROWS) < 1.1 * len(POSTERIORS) * len(HOWS)  # and not by a full product


def attempted(posterior, x, how):
    try:
        return predicted(posterior, x, how), None
    except (ValueError, NotImplementedError) as error:
        return None, str(error)


@pytest.mark.parametrize("name", POSTERIORS)
def test_the_table_of_capabilities(name):
    """Every posterior has draws and can be carried without them; members that were trained apart have no mean."""
    found = bayesify.capabilities(made(name, "mlp"))
    assert list(found) == list(PREDICTORS)
    assert [found[how] for how in ("sampling", "streamlined", "linearised")] == [True, True, True]
    assert bool(found["mean"]) is (name not in ("abnn", "ensemble", "members"))


LITTLE = cells("adapter", "laplace", "laplace, diagonal", "mixture", slow=set(NETWORKS) - {"mlp"})


@pytest.mark.parametrize(("name", "network"), LITTLE)
def test_little_noise_has_the_variance_of_draws(name, network):
    """Streamlined and linearised, by whatever engine; the variance of 400 draws has an error of 7 %."""
    posterior, x = made(name, network), inputs_of(network)
    if name == "mixture" and network in ("cnn", "odd"):
        pytest.skip("its batch-normalisation statistics belong to draws")
    drawn = bayesify.predict(posterior, x, num_draws=400, seed=0).logits_variance.sum()
    for how, bound in (("linearised", 1.5), ("streamlined", 2.0)):
        ratio = (bayesify.predict(posterior, x, how=how).logits_variance.sum() / drawn).item()
        assert 1 / bound < ratio < bound, (how, ratio)


@pytest.mark.parametrize("how", ["streamlined", "linearised", *ENGINES[:-1]], ids=str)
def test_a_random_last_layer_has_its_closed_form_by_every_name(how):
    """It was refused, with a sentence that its weights are no Gaussians."""
    posterior, x = made("laplace", "cnn"), inputs_of("cnn")
    closed = bayesify.predict(posterior, x, how="streamlined")
    found = bayesify.predict(posterior, x, how=how)
    for field, tensor in closed._fields():
        assert torch.equal(getattr(found, field), tensor), field
    assert "closed form" in found.predictor
    doubled = bayesify.predict(posterior, x, how=how, variance_scale=2.0)
    torch.testing.assert_close(doubled.logits_variance, 2 * closed.logits_variance)
    by_layer = bayesify.predict(posterior, x, how=how, variance_scale={posterior.law.layer: 2.0})
    assert torch.equal(by_layer.logits_variance, doubled.logits_variance)
    with pytest.raises(ValueError, match="There is no layer 'first'"):
        bayesify.predict(posterior, x, how=how, variance_scale={"first": 2.0})


def test_a_random_last_layer_is_checked_and_scaled():
    posterior, x = made("laplace", "mlp"), inputs_of("mlp")
    found = bayesify.check(posterior, [(x, torch.arange(6) % CLASSES)], num_draws=1000)
    assert 0.8 < found.variance_ratio < 1.25
    assert 0.8 < found.epistemic_ratio < 1.25
    loader = [(x, torch.arange(6) % CLASSES)]
    assert 0.99e-4 < bayesify.fit_variance_scale(posterior, loader) < 1.01e4
    assert list(bayesify.fit_variance_scale(posterior, loader, per_layer=True)) == [posterior.law.layer]


@pytest.mark.slow
def test_a_random_last_layer_is_exported():
    posterior, x, how = made("laplace", "mlp"), inputs_of("mlp"), "streamlined"
    found = bayesify.export(posterior, x, how=how).module()(x)
    torch.testing.assert_close(found["epistemic"], bayesify.predict(posterior, x, how=how).epistemic)
    torch.testing.assert_close(found["probs"], bayesify.predict(posterior, x, how=how).probs)


@pytest.mark.slow
@pytest.mark.parametrize(("likelihood", "outputs"), [("classification", 2), ("binary", 1), ("regression", 2)])
def test_a_random_last_layer_is_exported_for_every_likelihood(likelihood, outputs):
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs))
    posterior = bayesify.convert(network, Laplace(prior_precision=1.0), likelihood=likelihood)
    x, numbers = torch.randn(8, 4), torch.randn(8, outputs)
    y = numbers if likelihood == "regression" else (numbers[:, 0] > 0).long()
    y = y[:, None].float() if likelihood == "binary" else y
    bayesify.fit(posterior, [(x, y)], num_data=8, progress=False, accuracy_tolerance=1.0)
    found = bayesify.export(posterior, x).module()(x)
    torch.testing.assert_close(found["epistemic"], bayesify.predict(posterior, x, how="streamlined").epistemic)


def test_check_export_and_evaluate_take_the_same_names_and_refuse_alike():
    posterior, x = made("swag", "mlp"), inputs_of("mlp")
    batch = [(x, torch.arange(6) % CLASSES)]
    for how in (how for how in ENGINES if how.engine not in ("margin", "principal")):
        sentences = []
        for attempt in (
            lambda how=how: bayesify.predict(posterior, x, how=how),
            lambda how=how: bayesify.check(posterior, batch, how=how),
            lambda how=how: bayesify.export(posterior, x, how=how),
            lambda how=how: bayesify.evaluate(posterior, batch, how=how),
            lambda how=how: bayesify.fit_variance_scale(posterior, batch, how=how),
        ):
            with pytest.raises(ValueError, match="Use how='streamlined'") as caught:
                attempt()
            sentences.append(str(caught.value))
        assert len(set(sentences)) == 1, sentences


@pytest.mark.slow
def test_weights_that_are_looped_over_are_not_exported_but_predicted():
    posterior, x = made("adapter", "lstm"), inputs_of("lstm")
    assert is_right(bayesify.predict(posterior, x, how="linearised"))
    with pytest.raises(ValueError, match="Export how='streamlined'"):
        bayesify.export(posterior, x, how="linearised")
    expected = bayesify.predict(posterior, x, how="streamlined")
    assert is_right(expected)
    assert "one forward pass" in expected.predictor
    found = bayesify.export(posterior, x).module()(x)
    torch.testing.assert_close(found["epistemic"], expected.epistemic, rtol=1e-4, atol=1e-6)
    assert bayesify.export(posterior, x, how="mean").module()(x)["probs"].shape == (6, CLASSES)


def test_a_mixture_of_gaussians_has_its_weights():
    posterior, x = copy.deepcopy(made("mixture", "mlp")), inputs_of("mlp")
    posterior.law.stds.zero_()
    whole = bayesify.predict(posterior, x, how="linearised")
    alone = []
    for share in (0, 1):
        one = copy.deepcopy(posterior)
        one.law.shares.copy_(torch.eye(2)[share])
        alone.append(bayesify.predict(one, x, how="linearised").probs)
    torch.testing.assert_close(whole.probs, 0.25 * alone[0] + 0.75 * alone[1])


@pytest.mark.parametrize("command", ["evaluate", "predict", "compare"])
def test_the_command_line_names_every_predictor(command, capsys):
    assert main([command, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for how in PREDICTORS:
        assert how in text, how
