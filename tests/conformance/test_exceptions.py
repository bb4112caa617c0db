"""A failure leaves the posterior as it was: modes, layers, and whether there is noise."""

import copy
import functools
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bayesify
from bayesify import Posterior
from tests.conformance.cases import CLASSES, Case, Example, has_mean, is_random


class BlownError(Exception):
    pass


class Fuse(nn.Module):
    """Passes on what it gets, so many times, and then fails; for ever from a negative number on."""

    def __init__(self) -> None:
        super().__init__()
        self.left = -1

    def forward(self, x: Tensor) -> Tensor:
        if self.left == 0:
            raise BlownError
        self.left -= 1
        return x


def _posterior(case: Case) -> Posterior:
    return copy.deepcopy(_fitted(case))


@functools.cache
def _fitted(case: Case) -> Posterior:
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), Fuse(), nn.Linear(8, CLASSES)).eval()
    posterior = bayesify.convert(network, case.noisy)
    x = torch.randn(16, 4)
    bayesify.fit(posterior, [(x, torch.arange(16) % CLASSES)] * 4, num_data=16, progress=False, accuracy_tolerance=1)
    return posterior


def _fuse(posterior: Posterior) -> Fuse:
    return next(module for module in posterior.modules() if isinstance(module, Fuse))


def _state(posterior: Posterior) -> tuple:
    # What a generator learns with is left behind when it has learned.
    named = [(name, m) for name, m in posterior.named_modules() if not name.startswith("learning")]
    modules = [(id(m), m.training, sorted(m.__dict__)) for _, m in named]
    present = posterior.present()
    return modules, present.kind, present.keys, present.part


def _assert_works(posterior: Posterior) -> None:
    x = torch.randn(32, 4)
    with torch.no_grad():
        passes = torch.stack([posterior(x) for _ in range(8)])
    assert (passes.amax(0) > passes.amin(0)).any() == is_random(posterior)


@pytest.mark.parametrize("training", [False, True])
def test_an_exception_inside_mean(case: Case, training: bool):
    if case.variant == ", together":
        pytest.skip("the mean of one chain has no statistics")
    posterior = _posterior(case).train(training)
    before = _state(posterior)
    member = nullcontext() if has_mean(posterior) else posterior.member(1)
    with pytest.raises(BlownError), member, posterior.mean():
        raise BlownError
    assert _state(posterior) == before
    _assert_works(posterior.eval())


@pytest.mark.parametrize("passes", [0, 1])
def test_an_exception_inside_a_draw(case: Case, passes: int):
    posterior = _posterior(case)
    before = _state(posterior)
    draw = posterior.draw(0)
    draw(torch.randn(5, 4))  # a first pass may look at the network with inputs of its own
    _fuse(posterior).left = passes
    for _ in range(passes):
        draw(torch.randn(5, 4))
    with pytest.raises(BlownError):
        draw(torch.randn(5, 4))
    _fuse(posterior).left = -1
    assert _state(posterior) == before
    _assert_works(posterior.eval())


def test_an_exception_inside_predict(case: Case):
    posterior = _posterior(case).train()
    before = _state(posterior)
    _fuse(posterior).left = 0
    with pytest.raises(BlownError):
        bayesify.predict(posterior, torch.randn(5, 4), num_draws=2)
    _fuse(posterior).left = -1
    assert _state(posterior) == before
    _assert_works(posterior.eval())


@pytest.mark.parametrize("passes", [0, 1, 4])
@pytest.mark.slow
def test_an_exception_inside_fit(case: Case, passes: int):
    posterior = _posterior(case).eval()
    next(posterior.network.children()).train()
    before = _state(posterior)
    _fuse(posterior).left = passes
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    x = torch.randn(8, 4)
    generators = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    with pytest.raises(BlownError):
        bayesify.fit(posterior, [(x, torch.arange(8) % CLASSES)] * 3, num_data=8, epochs=2, progress=False)
    _fuse(posterior).left = -1
    assert _state(posterior) == before
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1:] == (np.random.get_state()[1].tolist(), random.getstate())
    bayesify.fit(posterior, [(x, torch.arange(8) % CLASSES)], num_data=8, progress=False, accuracy_tolerance=1)
    _assert_works(posterior.eval())


def test_modes_nest_and_come_back(posterior: Posterior, mlp: Example):
    if not has_mean(posterior):
        pytest.skip("it has no mean network")
    x = mlp.inputs(3)
    with posterior.mean():
        mean = posterior(x)
        inner = posterior.draw(0)(x)
        assert torch.equal(posterior(x), mean)
    assert torch.equal(inner, posterior.draw(0)(x))
