"""What people do by mistake, and the sentence they get."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import MAP, MCDropout

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, torch.arange(6) % 3)


def make_network(outputs=3):
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, outputs))


@pytest.mark.parametrize(
    "use",
    [
        lambda network: bayesify.predict(network, X),
        lambda network: bayesify.fit(network, DataLoader(DATA, 2), epochs=1),
        lambda network: bayesify.calibrate(network, DataLoader(DATA, 2)),
        lambda network: bayesify.evaluate(network, DataLoader(DATA, 2)),
        lambda network: bayesify.save(network, "nowhere"),
    ],
)
def test_a_plain_network_where_a_posterior_is_needed(use):
    with pytest.raises(TypeError, match=r"got a Sequential.*bayesify.convert\(network"):
        use(make_network())


@pytest.mark.parametrize("method", [MAP(), MCDropout(), bayesify.SWAG()])
def test_the_network_inside_a_noisy_posterior_is_a_plain_one(method):
    noisy = bayesify.convert(make_network(), MCDropout())
    noisy(X)  # a pass puts its noise into the network, and takes it out
    plain = make_network()
    plain.load_state_dict(noisy.network.state_dict())
    assert str(noisy.network) == str(plain)
    inner, other = (bayesify.convert(network, method) for network in (noisy.network, plain))
    assert inner.conversion == other.conversion
    assert inner.state_dict().keys() == other.state_dict().keys()
    with inner.mean(), other.mean():
        torch.testing.assert_close(inner.eval()(X), other.eval()(X), rtol=0, atol=0)


def test_data_sets_where_loaders_are_needed():
    posterior = bayesify.convert(make_network(), MCDropout())
    with pytest.raises(TypeError, match="DataLoader"):
        bayesify.predict(posterior, DATA)
    with pytest.raises(TypeError, match="DataLoader"):
        bayesify.fit(posterior, DATA, epochs=1)


def test_an_optimizer_where_a_function_is_needed():
    posterior = bayesify.convert(make_network(), MCDropout())
    with pytest.raises(TypeError, match="lambda groups"):
        bayesify.fit(posterior, DataLoader(DATA, 2), optimizer=torch.optim.Adam(posterior.parameters()), epochs=1)


def test_arrays_are_tensors():
    posterior = bayesify.convert(make_network(), MCDropout())
    by_array, by_tensor = (bayesify.predict(posterior, inputs, seed=0) for inputs in (np.asarray(X), X))
    assert torch.equal(by_array.log_probs, by_tensor.log_probs)


def test_one_output_is_not_a_class():
    with pytest.raises(ValueError, match=r"likelihood='binary'.*likelihood='regression'"):
        bayesify.predict(bayesify.convert(make_network(1), MAP()), X)


def test_include_that_misses_the_dropout_says_so():
    with pytest.raises(ValueError, match="include and exclude leave out"):
        bayesify.convert(make_network(), MCDropout(), include="0")


def test_results_say_what_they_are():
    posterior = bayesify.convert(make_network(), MAP())
    history = bayesify.fit(posterior, DataLoader(DATA, 2), epochs=1, accuracy_tolerance=1, progress=False)
    prediction = bayesify.predict(posterior, X)
    evaluation = bayesify.evaluate(posterior, DataLoader(DATA, 2))
    assert repr(history).startswith("History(1 epochs")
    assert repr(prediction).startswith("ClassificationPrediction of 6 examples, 3 classes\non average confidence ")
    assert "accuracy" in repr(evaluation)
    assert "tensor" not in repr(prediction)
    assert all("tensor" not in repr(value) and "\n" not in repr(value) for value in (history, evaluation))


@pytest.mark.slow
def test_the_package_runs_as_a_program():
    run = subprocess.run([sys.executable, "-m", "bayesify", "--version"], capture_output=True, text=True, check=True)
    assert bayesify.__version__ in run.stdout
