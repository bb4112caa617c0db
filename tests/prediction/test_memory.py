"""Memory does not grow with the number of draws, nor with the square of the number of classes."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bayesify import (
    SWAG,
    BayesAdapter,
    DeepEnsemble,
    Linearised,
    MCDropout,
    Prediction,
    Streamlined,
    convert,
    predict,
)
from bayesify.laws import kept
from bayesify.prediction import layout
from bayesify.prediction.one_pass import one_pass_of
from bayesify.prediction.streamlined.joint import WIDEST
from tests.laws.networks import spread


class Peak(TorchDispatchMode):
    """The most bytes that results of operations held at once, beside a posterior's own tensors."""

    def __init__(self, posterior, inputs):
        super().__init__()
        self.now = self.most = 0
        there = [inputs, *posterior.state_dict().values()]
        self.known = {tensor.untyped_storage().data_ptr() for tensor in there}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return result

    def add(self, storage):
        pointer, size = storage.data_ptr(), storage.nbytes()
        if pointer and pointer not in self.known:
            self.known.add(pointer)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.drop, pointer, size)

    def drop(self, pointer, size):
        self.known.discard(pointer)
        self.now -= size


class Joins(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.dropout = nn.Linear(16, 16), nn.Linear(16, 3), nn.Dropout(0.5)

    def forward(self, x):
        h = self.a(x)
        return self.b(h + self.dropout(h))


class ReadsOutside(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x):
        return nn.functional.linear(self.a(x), self.b.weight)


def network():
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(64, 3)).eval()


POSTERIORS = {
    "dropout": lambda: convert(network(), MCDropout()),
    "dropout and joins": lambda: convert(Joins().eval(), MCDropout()),
    "swag": lambda: spread(convert(network(), SWAG(rank=2))),
    "swag of the last layer": lambda: spread(convert(network(), SWAG(rank=2), include="3")),
    "weights read elsewhere": lambda: spread(convert(ReadsOutside().eval(), SWAG(rank=2), include="b")),
    "members": lambda: convert(network(), DeepEnsemble(members=64)),
}


@pytest.mark.parametrize("kind", POSTERIORS)
@pytest.mark.parametrize("folds", [True, False])
@pytest.mark.slow
def test_peak_does_not_grow_with_draws(kind, folds, monkeypatch):
    # Passes of 64 rows hold 8 draws of 8 examples, or, with room for one row, one draw.
    monkeypatch.setattr(layout, "CPU_ELEMENTS", 1)
    monkeypatch.setattr(layout, "LEAST_ROWS", 64 if folds else 1)
    monkeypatch.setattr(kept, "MOST_NUMBERS", 0)  # of the last draws' weights, which have a bound and a test of it
    posterior = POSTERIORS[kind]()
    x = torch.randn(24, 16)
    peaks, stays = [], []
    with Peak(posterior, x) as peak:
        for samples in (16, 16, 64):  # in two passes the weights of one are made beside the other's, as in eight
            peak.most = peak.now
            predict(posterior, x, num_draws=samples, seed=0, chunk_size=8)
            peaks.append(peak.most)
            stays.append(peak.now)
    assert len(set(stays)) == 1  # nothing stays but what the first prediction may have learned
    assert peaks[2] <= 1.05 * peaks[1]


def test_the_measure_sees_kept_samples():
    posterior = POSTERIORS["dropout"]()
    x = torch.randn(64, 16)
    peaks = []
    for samples in (8, 256):
        with Peak(posterior, x) as peak:
            kept = predict(posterior, x, num_draws=samples, seed=0, chunk_size=64, keep_samples=True)
        peaks.append(peak.most)
        assert peak.now >= kept.samples.nbytes  # what stays is seen
    assert peaks[1] > peaks[0] + 248 * 64 * 3 * 4


def test_a_first_draw_does_not_shrink_the_passes():
    """The passes that find the batch have three rows; counted as two they would cut every later pass by a third."""
    network = torch.nn.Sequential(torch.nn.Linear(4, 1024), torch.nn.Dropout(0.5), torch.nn.Linear(1024, 3))
    posterior = convert(network, MCDropout())
    x = torch.randn(2, 4)
    predict(posterior, x, num_draws=2, seed=0)
    assert layout.layout_of(posterior, x, posterior.keys(2, 0)).rows == 2**20 // 1024


@pytest.mark.parametrize("sketch", [0, 1])
def test_a_linearised_pass_grows_with_classes_and_not_with_their_square(sketch):
    x, peaks = torch.randn(2, 3, 6, 6), []
    for classes in (50, 200):
        layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes)]
        posterior = convert(nn.Sequential(*layers), BayesAdapter())
        found = one_pass_of(posterior, Linearised(sketch=sketch), x)
        with Peak(posterior, x) as peak:
            found.moments(x)
        peaks.append(peak.most)
    assert peaks[1] < 4.5 * peaks[0]  # 2.5 times as much again while a unit vector for each class was held


def test_a_covariance_of_too_many_outputs_is_refused():
    posterior = convert(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, WIDEST + 1)), BayesAdapter())
    with pytest.raises(ValueError, match=r"4,097\^2 numbers for each example.*Use how='streamlined'"):
        predict(posterior, torch.randn(1, 2), how=Streamlined(covariance="full"))


def test_chunks_of_a_prediction_hold_no_draws_of_theirs(monkeypatch):
    """What a prediction makes when it is asked holds the draws' logits, which must not add up over chunks."""
    network, x = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)), torch.randn(6, 4)
    posterior, seen = convert(network, MCDropout()), []
    whole = predict(posterior, x, num_draws=50)
    assert "energy" not in vars(whole)
    join = type(whole).join

    def looked(parts):
        seen.extend("energy" in vars(part) for part in parts)
        return join(parts)

    monkeypatch.setattr(Prediction, "join", looked)
    found = predict(posterior, x, num_draws=50, chunk_size=2)
    assert seen == [True] * 3
    torch.testing.assert_close(found.energy, whole.energy)
