"""Modes: what they mean, that they end, and that threads do not see each other's."""

import copy
import pickle
import sys
import threading

import pytest
import torch
from torch import nn

from bayesify import MCDropout, convert, predict
from bayesify.laws import Key
from tests.laws.networks import mlp


@pytest.fixture
def posterior():
    return convert(mlp(), MCDropout())


X = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_mean_is_the_network():
    network = mlp()
    posterior = convert(network, MCDropout())
    with posterior.mean() as inside:
        assert inside is posterior
        assert torch.equal(posterior(X), network(X))
    assert not torch.equal(posterior(X), network(X))


def test_train_and_eval_do_not_change_the_noise(posterior):
    drawn = posterior.draw(0)(X)
    for module in (posterior.train(), posterior.eval()):
        assert torch.equal(module.draw(0)(X), drawn)
        assert not torch.equal(module(X), module(X))
        with module.mean():
            assert torch.equal(module(X), module(X))


def test_modes_nest_and_return(posterior):
    drawn = posterior.draw(0)(X)
    with posterior.mean():
        silent = posterior(X)
        with posterior.drawn(Key(0)):
            assert torch.equal(posterior(X), drawn)
            assert torch.equal(posterior.draw(0)(X), drawn)
        assert torch.equal(posterior(X), silent)
    assert not torch.equal(posterior(X), posterior(X))


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.fail = False

    def forward(self, x):
        x = self.dropout(x)
        if self.fail:
            raise KeyError("broken")
        return x


def test_an_exception_restores_everything():
    posterior = convert(Fails().train(), MCDropout())
    posterior.network.fail = True
    calls = [
        lambda: posterior(X),
        lambda: posterior.draw(0)(X),
        lambda: posterior.evaluate(X, [Key(0), Key(1)]),
        lambda: predict(posterior, X, seed=0),
    ]
    for call in calls:
        with pytest.raises(KeyError, match="broken"):
            call()
    for context in (posterior.mean(), posterior.drawn(Key(0))):
        with pytest.raises(KeyError, match="broken"), context:
            posterior(X)
    present = posterior.present()
    assert (present.kind, present.keys, present.part, posterior.runtime.runner) == ("fresh", (), None, None)
    assert posterior.network.training
    assert posterior.lock.acquire(blocking=False)
    posterior.lock.release()
    posterior.network.fail = False
    assert not torch.equal(posterior(X), posterior(X))
    assert torch.equal(posterior.draw(0)(X), posterior.draw(0)(X))


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_are_fresh_and_independent(posterior, clone):
    with posterior.mean():
        other = clone(posterior)
        assert not torch.equal(other(X), other(X))  # the mode stays behind
    assert torch.equal(other.draw(4)(X), posterior.draw(4)(X))
    assert other.runtime is not posterior.runtime
    assert other.law.network is other.network
    assert other.law.sites() <= set(other.network.modules())
    with posterior.mean():
        silent = posterior(X)
    with torch.no_grad():
        other.network[0].weight.zero_()
    with posterior.mean():
        assert torch.equal(posterior(X), silent)


def run_together(*functions):
    """Run functions in threads, as interleaved as can be, and raise what they raise."""
    errors = []
    barrier = threading.Barrier(len(functions))

    def guarded(function):
        barrier.wait()
        try:
            function()
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]


def test_threads_do_not_see_each_others_mode(posterior):
    drawn, other = posterior.draw(0)(X), posterior.draw(1)(X)
    with posterior.mean():
        silent = posterior(X)

    def silently():
        for _ in range(100):
            with posterior.mean():
                for _ in range(3):
                    assert torch.equal(posterior(X), silent)

    def drawing(seed, expected):
        for _ in range(150):
            assert torch.equal(posterior.draw(seed)(X), expected)

    def fresh():
        for _ in range(150):
            out = posterior(X)
            assert not any(torch.equal(out, known) for known in (drawn, other, silent))

    run_together(silently, lambda: drawing(0, drawn), lambda: drawing(1, other), fresh)


def test_threads_can_predict_with_one_posterior():
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).double().train()
    posterior = convert(network, MCDropout())
    expected = [predict(posterior, X, seed=seed, num_draws=3, chunk_size=1).probs for seed in (0, 1)]

    def predicting(seed):
        for _ in range(20):
            assert torch.equal(predict(posterior, X, seed=seed, num_draws=3, chunk_size=1).probs, expected[seed])

    run_together(lambda: predicting(0), lambda: predicting(1))
    assert all(module.training for module in posterior.network.modules())
