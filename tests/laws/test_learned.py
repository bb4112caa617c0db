"""A posterior that never learned says so; one that has, or need not, does not."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import APD, MAP, SGLD, SWAG, BayesAdapter, DeepEnsemble, Laplace, MCDropout

SENTENCE = "This posterior has no uncertainty yet"
NEEDY = {
    "laplace, last layer": Laplace(),
    "laplace, diagonal": Laplace(structure="diagonal"),
    "laplace, kronecker": Laplace(structure="kronecker"),
    "swag": SWAG(epochs=2),
    "sgld": SGLD(epochs=2, samples_per_chain=3),
    "apd": APD(epochs=2, samples_per_chain=3, chains=2, steps=5),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)).eval()


def data() -> TensorDataset:
    torch.manual_seed(1)
    x = torch.randn(48, 4)
    return TensorDataset(x, x[:, :3].argmax(1))


def epistemic(posterior: bayesify.Posterior) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return bayesify.predict(posterior, data().tensors[0], seed=0).epistemic.max().item()


@pytest.mark.parametrize("name", NEEDY)
@pytest.mark.slow
def test_a_posterior_that_never_learned_says_so_once(name):
    posterior = bayesify.convert(network(), NEEDY[name])
    assert "bayesify.fit(posterior, loader)" in posterior.learned
    with pytest.warns(UserWarning, match=SENTENCE):
        assert bayesify.predict(posterior, data().tensors[0], seed=0).epistemic.abs().max() < 1e-6
    assert epistemic(posterior) < 1e-6  # without another word
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accuracy fell|The NLL of|The prior precision|The search for")
        bayesify.fit(posterior, DataLoader(data(), batch_size=12), progress=False)
    assert posterior.learned is True
    assert epistemic(posterior) > 1e-6


@pytest.mark.parametrize("look", ["evaluate", "calibrate", "check", "sample_bank"])
def test_whoever_looks_is_told(look):
    posterior = bayesify.convert(network(), Laplace(structure="diagonal"))
    loader = [data().tensors]
    calls = {
        "evaluate": lambda: bayesify.evaluate(posterior, loader),
        "calibrate": lambda: bayesify.calibrate(posterior, loader, num_draws=2),
        "check": lambda: bayesify.check(posterior, loader, how="linearised", num_draws=4),
        "sample_bank": lambda: bayesify.sample_bank(posterior, 2),
    }
    with pytest.warns(UserWarning, match=SENTENCE):
        calls[look]()


@pytest.mark.parametrize("method", [MAP(), MCDropout(), BayesAdapter(), DeepEnsemble(members=2), bayesify.IBNN()])
def test_what_need_not_learn_is_not_warned_of(method):
    posterior = bayesify.convert(network(), method)
    assert posterior.learned is True
    epistemic(posterior)


def test_a_prediction_of_the_mean_is_not_expected_to_be_random():
    posterior = bayesify.convert(network(), Laplace())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bayesify.predict(posterior, data().tensors[0], how="mean")


def test_loops_of_ones_own_as_the_guide_writes_them():
    loader, size = DataLoader(data(), batch_size=12, shuffle=True), 48

    def train(posterior, optimizer, context, each):
        for epoch in range(3):
            for batch in loader:
                with context():
                    posterior.loss(batch, num_data=size).total.backward()
                optimizer.step()
                optimizer.zero_grad()
            each(epoch)

    swag = bayesify.convert(network(), SWAG())
    train(swag, torch.optim.SGD(swag.network.parameters(), lr=0.1), nullcontext, lambda _: swag.law.collect())
    assert swag.learned is True
    assert epistemic(swag) > 0

    sgld = bayesify.convert(network(), SGLD(samples_per_chain=10))
    (stage,) = sgld.method.stages(sgld)
    sampler = sgld.method.make_optimizer(stage.groups)
    train(sgld, sampler, stage.context, lambda epoch: sgld.method.collect(sgld) if epoch else None)
    assert len(sgld.law) == 2
    assert epistemic(sgld) > 0

    laplace = bayesify.convert(network(), Laplace(prior_precision=10.0))
    train(laplace, torch.optim.SGD(laplace.parameters(), lr=0.1), nullcontext, lambda _: None)
    assert "bayesify.fit(posterior, loader)" in laplace.learned
    trained = laplace.network[3].weight.clone()
    bayesify.fit(laplace, loader, epochs=0, progress=False)
    assert torch.equal(laplace.network[3].weight, trained)
    assert epistemic(laplace) > 0
