"""Four predictors: what they cost at first, which posteriors have them, their objects and their old names."""

import copy
import functools
import warnings

import pytest
import torch
from torch import nn

from bayesify import (
    ABNN,
    IBNN,
    MAP,
    SGLD,
    SWAG,
    BayesAdapter,
    DeepEnsemble,
    Laplace,
    Linearised,
    MCDropout,
    Mean,
    Sampling,
    Streamlined,
    capabilities,
    convert,
    fit,
    predict,
)  # fmt: skip
from bayesify.laws import GaussianLaw, MemberLaw, Posterior, Refusal
from bayesify.prediction import PREDICTORS, as_predictor

CLASSES = 3


class Recurrent(nn.Module):
    """An LSTM, whose weights have no formula in a backward pass and are looped over."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 5, batch_first=True)
        self.norm = nn.LayerNorm(5)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.head(self.dropout(self.norm(self.lstm(x)[0][:, -1])))


class Joins(nn.Module):
    """Adds what comes before the noise to what comes after it, so that draws are folded in at the inputs."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        h = self.first(x)
        return self.head(h + self.dropout(self.norm(h)))


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, CLASSES))


def cnn():
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(4, CLASSES)),
    )


NETWORKS = {"mlp": (mlp, (4,)), "cnn": (cnn, (2, 5, 5)), "lstm": (Recurrent, (4, 3)), "joins": (Joins, (4,))}
METHODS = {
    "map": MAP(),
    "mc-dropout": MCDropout(),
    "abnn": ABNN(members=2, alpha=0.1),
    "ensemble": DeepEnsemble(members=2, start="perturbed"),
    "swag": SWAG(rank=2, num_bn_draws=4, epochs=2, snapshots_per_epoch=2),
    "swag, diagonal": SWAG(rank=0, num_bn_draws=4, epochs=2, snapshots_per_epoch=2),
    "adapter": BayesAdapter(start_std=(0.02, 0.02)),
    "ibnn": IBNN(components=2, means_std=0.05, start_std=(0.05, 0.05)),
    "laplace": Laplace(prior_precision=300.0),
    "laplace, kronecker": Laplace(structure="kronecker", prior_precision=300.0),
    "sgld": SGLD(samples_per_chain=4, burn_in=0.3, epochs=2, lr=0.1, weight_decay=0.0),
}


@functools.cache
def made(name, network):
    torch.manual_seed(1)
    make, shape = NETWORKS[network]
    posterior = convert(make().eval(), METHODS[name])
    x = torch.randn(8, *shape, generator=torch.Generator().manual_seed(3))
    if name.startswith(("swag", "laplace", "sgld")):
        loader = [(x[:4], torch.arange(4) % CLASSES), (x[4:], torch.arange(4) % CLASSES)]
        fit(posterior, loader, num_data=8, progress=False, accuracy_tolerance=1.0)
    return posterior.eval(), x


class Forwards:
    """Notes the number of rows of every call of a network's forward."""

    def __init__(self, network):
        self.network, self.rows = network, []

    def __enter__(self):
        self.handle = self.network.register_forward_pre_hook(lambda _, args: self.rows.append(len(args[0])))
        return self

    def __exit__(self, *_):
        self.handle.remove()


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", METHODS)
def test_a_first_prediction_has_at_most_six_calls_more_each_on_few_rows(name, network):
    known, x = made(name, network)
    for how, answer in capabilities(known).items():
        if not answer:
            continue
        posterior = copy.deepcopy(known)  # nothing is known of a copy's network
        with Forwards(posterior.network) as first:
            one = predict(posterior, x, how=how, num_draws=4)
        with Forwards(posterior.network) as second:
            other = predict(posterior, x, how=how, num_draws=4)
        extra = first.rows[: len(first.rows) - len(second.rows)]
        assert first.rows[len(extra) :] == second.rows  # what a second one does comes last
        assert len(extra) <= (2 if how == "mean" else 6), (how, extra)
        assert set(extra) <= {2, 3, 4}, (how, extra)  # two draws of two rows together are four
        assert torch.equal(one.probs, other.probs)


def test_predictions_without_draws_have_no_draws(monkeypatch):
    posterior, x = made("adapter", "mlp")
    posterior = copy.deepcopy(posterior)
    monkeypatch.setattr(GaussianLaw, "drawn", lambda *_: pytest.fail("a draw"))
    for how in ("streamlined", "linearised", "mean", "mean"):
        predict(posterior, x, how=how)


def test_what_is_found_out_is_kept_for_each_kind_of_inputs_and_not_for_their_sizes():
    network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES)).eval()
    posterior = convert(network, MCDropout())
    predict(posterior, torch.randn(5, 4), num_draws=2)
    with Forwards(posterior.network) as sizes:
        predict(posterior, torch.randn(7, 4), num_draws=2)
    assert sizes.rows == [7]
    with Forwards(posterior.network) as ranks:
        predict(posterior, torch.randn(7, 3, 4), num_draws=2)
    assert len(ranks.rows) > 1
    with Forwards(posterior.network) as both:
        predict(posterior, torch.randn(2, 4), num_draws=2)
        predict(posterior, torch.randn(2, 6, 4), num_draws=2)
    assert both.rows == [2, 2]


# -- dry runs ---------------------------------------------------------------------------------------------------------


class Picky(nn.Module):
    """Refuses batches of two or three rows."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, CLASSES))

    def forward(self, x):
        if len(x) in (2, 3):
            raise RuntimeError("not two, not three")
        return self.body(x)


def test_a_failed_dry_run_is_a_warning_and_no_error():
    posterior = convert(Picky().eval(), MCDropout())
    x = torch.randn(5, 4)
    keys = posterior.keys(4, 0)
    with pytest.warns(UserWarning, match="dry run .* failed .RuntimeError: not two, not three"):
        found = predict(posterior, x, num_draws=4, keep_samples=True)
    drawn = torch.stack([posterior.evaluate(x, [key])[0].softmax(-1) for key in keys])
    torch.testing.assert_close(found.samples, drawn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said once
        predict(posterior, x, num_draws=4)
        predict(posterior, x, how="mean")
        assert "forward pass" in predict(posterior, x, how="streamlined").predictor
        with pytest.raises(ValueError, match=r"not two, not three.*Use how='sampling'"):
            predict(posterior, x, how="linearised")


@pytest.mark.parametrize("how", PREDICTORS)
def test_an_error_on_the_users_own_inputs_is_the_users(how):
    posterior = convert(mlp().eval(), MCDropout())
    with pytest.raises(RuntimeError, match="5x6 and 4x8"):
        predict(posterior, torch.randn(5, 6), how=how)
    assert not posterior.runtime.traces  # it taught nothing
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predict(posterior, torch.randn(5, 4), how=how)


# -- what there is ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_a_capability_is_kept_and_a_refusal_is_what_predict_says(name):
    posterior, x = made(name, "mlp")
    for how, answer in capabilities(posterior).items():
        if answer:
            assert len(predict(posterior, x, how=how, num_draws=2)) == 8
            continue
        assert isinstance(answer, Refusal)
        with pytest.raises(ValueError, match="how='sampling'") as caught:
            predict(posterior, x, how=how)
        assert str(caught.value) == answer


def test_objects_are_predictors():
    posterior, x = made("adapter", "mlp")
    for one, name in (
        (Sampling(), "sampling"),
        (Streamlined(), "streamlined"),
        (Linearised(), "linearised"),
        (Mean(), "mean"),
    ):
        assert torch.equal(one(posterior, x).probs, predict(posterior, x, how=name).probs)
        assert as_predictor(name) == one
        assert one.supports(posterior) is True
    assert repr(Streamlined(covariance="full")) == "Streamlined(covariance='full')"
    with pytest.raises(ValueError, match=r"engine must be one of \['auto', 'moments', 'principal', 'margin'\]"):
        Streamlined(engine="magic")
    with pytest.raises(ValueError, match="covariance must be one of"):
        Streamlined(covariance="some")
    with pytest.raises(ValueError, match="carried forward, with engine='moments'"):
        Streamlined(engine="margin", covariance="full")


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("closed-form", Streamlined(), "laplace"),
        ("moments", Streamlined(engine="moments"), "adapter"),
        ("margin", Streamlined(engine="margin"), "adapter"),
        ("principal", Streamlined(engine="principal"), "adapter"),
        ("covariance", Streamlined(covariance="full"), "laplace"),
    ],
)
def test_old_names_work_with_a_warning_that_names_the_object(old, new, name):
    posterior, x = made(name, "mlp")
    with pytest.warns(DeprecationWarning, match="how=Streamlined") as caught:
        found = predict(posterior, x, how=old)
    assert caught[0].filename == __file__
    assert torch.equal(found.probs, predict(posterior, x, how=new).probs)
    assert repr(new) in str(caught[0].message)


def test_the_old_name_of_a_closed_form_is_for_a_last_layer_alone():
    posterior, x = made("adapter", "mlp")
    with (
        pytest.warns(DeprecationWarning, match=r"Streamlined\(\)"),
        pytest.raises(ValueError, match=r"has no prediction in closed form.*Use how='streamlined'"),
    ):
        predict(posterior, x, how="closed-form")


# -- mixtures of laws -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_members_that_are_last_layers_have_their_closed_forms():
    """The mixture's moments are those of its parts, each in closed form, and close to those of draws."""
    posterior, x = made("laplace", "mlp")
    law, network = posterior.law, posterior.network
    other = copy.deepcopy(law)
    other.__dict__["network"] = network
    other.set_prior_precision(30.0)
    both = Posterior(network, MemberLaw(network, [law, other]))
    alone = [predict(Posterior(network, part), x, how="streamlined") for part in (law, other)]
    found = predict(both, x, how="streamlined")
    assert "closed form" in found.predictor
    torch.testing.assert_close(found.probs, (alone[0].probs + alone[1].probs) / 2)
    variance = (alone[0].logits_variance + alone[1].logits_variance) / 2
    torch.testing.assert_close(found.logits_variance, variance)
    assert (alone[1].logits_variance > 1.5 * alone[0].logits_variance).all()
    drawn = predict(both, x, num_draws=4000).logits_variance.sum()
    assert abs(found.logits_variance.sum() / drawn - 1) < 0.1


def test_members_of_different_kinds_have_each_its_own_engine():
    posterior, x = made("laplace", "mlp")
    law, network = posterior.law, posterior.network
    log_stds = {name: torch.full_like(p, -4.0) for name, p in network.named_parameters()}
    gaussian = GaussianLaw(network, log_stds=log_stds)
    both = Posterior(network, MemberLaw(network, [law, gaussian]))
    for how in ("streamlined", "linearised"):
        alone = [predict(Posterior(network, part), x, how=how).probs for part in (law, gaussian)]
        torch.testing.assert_close(predict(both, x, how=how).probs, (alone[0] + alone[1]) / 2, rtol=1e-3, atol=1e-3)
