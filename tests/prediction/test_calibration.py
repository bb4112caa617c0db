"""Calibration after any method: one number, the best on the data given."""

import copy
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from scipy import optimize, special
from torch import nn

import bayesify
from bayesify import MAP, Bernoulli, Categorical, DeepEnsemble, Gaussian, MCDropout
from bayesify.prediction import Views, layout, predict
from bayesify.prediction.calibration import draws_of

F64 = torch.float64
METHODS = [MAP(), MCDropout(), DeepEnsemble(members=3, start="perturbed")]


def loader(x, y, size=16):
    return list(zip(x.split(size), y.split(size), strict=True))


def network(outputs, scale=1.0):
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, outputs)).double().eval()
    with torch.no_grad():
        made[-1].weight.mul_(scale)
    return made


def labels_for(logits):
    """Draw labels as if the temperature of logits (S, ..., C) were 2.5, so that the best is not at an end."""
    return torch.distributions.Categorical((logits / 2.5).softmax(-1).mean(0)).sample()


def mixture_nll(draws, labels, temperature):
    """The definition, in numpy: -mean ln (1/S) sum_s softmax(logits_s / T)_label."""
    scaled = special.log_softmax(draws / temperature, axis=-1)
    picked = scaled[:, range(len(labels)), labels]
    return -(special.logsumexp(picked, axis=0) - math.log(len(draws))).mean()


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
@pytest.mark.parametrize("scale", [4.0, 20.0])
def test_the_temperature_is_that_of_a_brute_force_search(method, scale):
    posterior = bayesify.convert(network(3, scale), method)
    x = torch.randn(80, 4, dtype=F64)
    with torch.no_grad():
        logits = torch.stack([posterior.evaluate(x, [key])[0] for key in posterior.keys(6, 3)])
    y = labels_for(logits)
    bayesify.calibrate(posterior, loader(x, y), pooling="probs", temperatures="one", num_draws=6, seed=3)
    draws = logits.numpy()
    best = optimize.minimize_scalar(
        lambda t: mixture_nll(draws, y.numpy(), math.exp(t)), bounds=(-4, 4), method="bounded", options={"xatol": 1e-9}
    )
    found = posterior.likelihood.temperature.item()
    assert math.log(found) == pytest.approx(best.x, abs=1e-4)
    assert mixture_nll(draws, y.numpy(), found) <= best.fun + 1e-12
    assert 0.05 < abs(math.log(found)) < 3.9  # the test is about something
    prediction = predict(posterior, x, num_draws=6, seed=3)
    assert prediction.log_probs[range(80), y].mean().item() == pytest.approx(-best.fun, abs=1e-9)


def test_a_binary_temperature_is_that_of_a_brute_force_search():
    posterior = bayesify.convert(network(1, 20.0), MCDropout(), likelihood="binary")
    x = torch.randn(60, 4, dtype=F64)
    with torch.no_grad():
        draws = torch.stack([posterior.evaluate(x, [key])[0, :, 0] for key in posterior.keys(5, 0)])
    pairs = torch.stack([torch.zeros_like(draws), draws], -1)
    y = labels_for(pairs).double()
    bayesify.calibrate(posterior, loader(x, y), pooling="probs", num_draws=5)
    best = optimize.minimize_scalar(
        lambda t: mixture_nll(pairs.numpy(), y.long().numpy(), math.exp(t)), bounds=(-4, 4), method="bounded"
    )
    assert math.log(posterior.likelihood.temperature.item()) == pytest.approx(best.x, abs=1e-4)


@given(
    draws=st.integers(1, 4),
    scale=st.sampled_from([0.01, 1.0, 100.0, 1e4]),
    before=st.sampled_from([0.1, 1.0, 3.0, 1e3]),  # the last is beyond what is searched
    seed=st.integers(0, 10_000),
)
@pytest.mark.slow
def test_it_is_never_worse_than_before(draws, scale, before, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(draws, 12, 3, dtype=F64, generator=generator)
    labels = torch.randint(3, (12,), generator=generator)
    likelihood = Categorical().double()
    likelihood.temperature.fill_(before)
    old, new = likelihood.calibrate([(logits, labels)])
    assert old == pytest.approx(mixture_nll(logits.numpy(), labels.numpy(), before), rel=1e-9)
    assert new == pytest.approx(mixture_nll(logits.numpy(), labels.numpy(), likelihood.temperature.item()), rel=1e-9)
    assert new <= old


@pytest.mark.parametrize("noise_std", [0.1, None, "per-output", "head"])
@pytest.mark.parametrize("method", [MAP(), MCDropout()], ids=lambda m: m.name)
def test_the_scale_of_the_variance_is_the_closed_form(method, noise_std):
    likelihood = Gaussian(noise_std, num_outputs=2)
    posterior = bayesify.convert(network(4 if noise_std == "head" else 2), method, likelihood=likelihood)
    x, y = torch.randn(50, 4, dtype=F64), 3 * torch.randn(50, 2, dtype=F64)
    plain = predict(posterior, x, num_draws=6, seed=0)
    bayesify.calibrate(posterior, loader(x, y), num_draws=6)
    expected = ((y - plain.mean) ** 2 / plain.variance).mean().item()
    assert posterior.likelihood.variance_scale.item() == pytest.approx(expected, rel=1e-12)
    scaled = predict(posterior, x, num_draws=6, seed=0)

    def nll(scale):
        return -torch.distributions.Normal(plain.mean, (scale * plain.variance).sqrt()).log_prob(y).mean().item()

    best = optimize.minimize_scalar(lambda t: nll(math.exp(t)), bounds=(-8, 8), method="bounded")
    assert math.log(expected) == pytest.approx(best.x, abs=1e-4)
    assert torch.equal(scaled.mean, plain.mean)
    torch.testing.assert_close(scaled.variance, expected * plain.variance, rtol=1e-12, atol=0)


def test_the_nll_of_regression_before_and_after():
    outputs, y = torch.randn(4, 30, dtype=F64), torch.randn(30, dtype=F64)
    likelihood = Gaussian(0.2).double()

    def nll():
        prediction = likelihood.from_samples(outputs)
        return -torch.distributions.Normal(prediction.mean, prediction.std).log_prob(y).mean().item()

    for first in (True, False):  # again, on what was scaled before: nothing is left to gain
        before = nll()
        old, new = likelihood.calibrate([(outputs, y)])
        assert old == pytest.approx(before, rel=1e-12)
        assert new == pytest.approx(nll(), rel=1e-12)
        assert new < old if first else new == pytest.approx(old, rel=1e-12)


def test_an_exact_regression_gets_a_small_scale_and_not_zero():
    likelihood = Gaussian(1.0)
    likelihood.calibrate([(torch.zeros(2, 5), torch.zeros(5))])
    assert 0 < likelihood.variance_scale.item() < 1e-9


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_large_batches_are_divided_into_passes(method, monkeypatch):
    posterior = bayesify.convert(network(3), method)
    x = torch.randn(50, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    batch, views, sizes = [(x, torch.zeros(50, dtype=torch.long))], Views("identity", lambda x: -x), []
    whole = draws_of(posterior, batch, views, num_draws=6)
    monkeypatch.setattr(layout, "CPU_ELEMENTS", 1)  # no more than LEAST_ROWS at a time
    posterior.network[0].register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    divided = draws_of(posterior, batch, views, num_draws=6)
    assert max(sizes) <= 6 * layout.LEAST_ROWS < 50  # draws may share a pass
    assert divided.parts == whole.parts
    torch.testing.assert_close(divided.batches[0][0], whole.batches[0][0], rtol=0, atol=1e-12)


def test_ignored_labels_do_not_count():
    logits = 5 * torch.randn(3, 40, 3, dtype=F64)
    labels = labels_for(logits)
    ignored = labels.clone()
    ignored[::2] = -100
    some, all_of_them = Categorical().double(), Categorical().double()
    some.calibrate([(logits, ignored)])
    all_of_them.calibrate([(logits[:, 1::2], labels[1::2])])
    assert some.temperature.item() == all_of_them.temperature.item() < 50
    with pytest.raises(ValueError, match="every target is ignore_index"):
        Categorical().calibrate([(logits, torch.full((40,), -100))])


def test_batches_of_tokens_may_have_different_lengths():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(9, 3).double()

        def forward(self, ids):
            return 5 * self.table(ids)

    posterior = bayesify.convert(Tagger(), MAP())
    with torch.no_grad():
        ids = [torch.randint(9, (4, length)) for length in (3, 7)]
        batches = [(x, labels_for(posterior.outputs(x)[None])) for x in ids]
    batches[1][1][:, 5:] = -100
    bayesify.calibrate(posterior, batches)
    with torch.no_grad():
        logits = torch.cat([posterior.outputs(x)[y != -100] for x, y in batches])[None]
    labels = torch.cat([y[y != -100] for _, y in batches]).numpy()
    best = optimize.minimize_scalar(
        lambda t: mixture_nll(logits.numpy(), labels, math.exp(t)), bounds=(-4, 4), method="bounded"
    )
    assert math.log(posterior.likelihood.temperature.item()) == pytest.approx(best.x, abs=1e-4)
    assert best.x < 3.9


def test_images_of_classes_and_of_answers():
    logits = 5 * torch.randn(2, 4, 3, 5, 6, dtype=F64)
    labels = labels_for(logits.movedim(2, -1))
    dense, flat = Categorical().double(), Categorical().double()
    dense.calibrate([(logits, labels)])
    flat.calibrate([(logits.movedim(2, -1).reshape(2, -1, 3), labels.flatten())])
    assert 1 < dense.temperature.item() == flat.temperature.item() < 50
    yes, flat_yes = Bernoulli().double(), Bernoulli().double()
    answers = (labels == 0).float()
    yes.calibrate([(logits[:, :, 0], answers)])
    flat_yes.calibrate([(logits[:, :, 0].flatten(1), answers.flatten())])
    assert 1 < yes.temperature.item() == flat_yes.temperature.item() < 50


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_it_is_saved_with_the_posterior(tmp_path, method):
    plain = network(3, 20.0)
    posterior = bayesify.convert(plain, method)
    x, y = torch.randn(40, 4, dtype=F64), torch.randint(3, (40,))
    bayesify.calibrate(posterior, loader(x, y))
    bayesify.save(posterior, tmp_path)
    loaded = bayesify.load(tmp_path, plain)
    assert loaded.likelihood.temperature.item() == posterior.likelihood.temperature.item() != 1
    assert torch.equal(predict(loaded, x, seed=0).log_probs, predict(posterior, x, seed=0).log_probs)


def test_the_loss_and_the_modes_of_layers_stay():
    posterior = bayesify.convert(network(3, 20.0).train(), MAP())
    x = torch.randn(40, 4, dtype=F64)
    with torch.no_grad():
        batch = (x, labels_for(network(3, 20.0)(x)[None]))
    modes = [m.training for m in posterior.modules()]
    state = copy.deepcopy(posterior.network.state_dict())
    with posterior.mean():
        posterior.network.eval()
        before = posterior.loss(batch, num_data=8).total.item()
        posterior.network.train()
    bayesify.calibrate(posterior, [batch])
    assert [m.training for m in posterior.modules()] == modes
    assert all(torch.equal(t, state[name]) for name, t in posterior.network.state_dict().items())
    posterior.eval()
    assert posterior.loss(batch, num_data=8).total.item() == before
    temperature = posterior.likelihood.temperature.item()
    bayesify.calibrate(posterior, [batch])  # its dropout was off before, too
    assert posterior.likelihood.temperature.item() == pytest.approx(temperature, rel=1e-5)


@pytest.mark.parametrize(
    ("likelihood", "batches", "sentence"),
    [
        ("classification", [], "validation loader gave no batch"),
        ("classification", [(torch.zeros(2, 4, dtype=F64), torch.tensor([0, 7]))], "Labels run from 0 to 7"),
        ("classification", [(torch.zeros(2, 4, dtype=F64) / 0, torch.tensor([0, 1]))], "logits are not finite"),
        ("regression", [(torch.zeros(2, 4, dtype=F64) / 0, torch.zeros(2, 3))], "predictions or the targets are not"),
        ("regression", [(torch.zeros(2, 4, dtype=F64), torch.zeros(2, 3) / 0)], "predictions or the targets are not"),
    ],
)
def test_bad_input_gets_a_sentence_and_changes_nothing(likelihood, batches, sentence):
    posterior = bayesify.convert(network(3), MAP(), likelihood=likelihood)
    with pytest.raises(ValueError, match=sentence):
        bayesify.calibrate(posterior, batches)
    number = "temperature" if likelihood == "classification" else "variance_scale"
    assert getattr(posterior.likelihood, number).item() == 1


def test_classes_that_are_ruled_out_do_not_hinder():
    logits = 5 * torch.randn(2, 30, 4, dtype=F64)
    logits[..., 3] = -math.inf
    labels = labels_for(logits)
    masked, plain = Categorical().double(), Categorical().double()
    masked.calibrate([(logits, labels)])
    plain.calibrate([(logits[..., :3], labels)])
    assert masked.temperature.item() == pytest.approx(plain.temperature.item(), rel=1e-5) != 1
