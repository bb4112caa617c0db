"""What lies before the first randomness runs once, and the numbers are those of a loop over the draws."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayesify import SWAG, DeepEnsemble, MCDropout, convert, predict
from bayesify.prediction import layout
from tests.laws.networks import spread
from tests.prediction.test_predict import looped

EXACT = {"rtol": 1e-11, "atol": 1e-12}
SAMPLES = 20
X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Counted(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


@pytest.fixture(params=["folded", "one draw at a time"])
def arrangement(request, monkeypatch):
    """Evaluate draws together, or, as for large batches, one after another."""
    if request.param == "one draw at a time":
        monkeypatch.setattr(layout, "CPU_ELEMENTS", 1)
        monkeypatch.setattr(layout, "LEAST_ROWS", 1)
    return request.param


def check(posterior, x=X, samples=SAMPLES, chunk_size=6):
    """Compare with a loop, for members and draws alike, and return how the passes were arranged."""
    expected = looped(posterior, x, samples, 0).softmax(-1)
    prediction = predict(posterior, x, num_draws=samples, seed=0, chunk_size=chunk_size, keep_samples=True)
    torch.testing.assert_close(prediction.samples, expected, **EXACT)
    if len(expected) > 1:
        assert (expected[0] - expected[1]).abs().max() > 1e-4
    return layout.layout_of(posterior, x, posterior.keys(2, 0))


def calls_per_chunk(posterior, counted, samples=SAMPLES):
    predict(posterior, X, num_draws=1, seed=0)  # the first prediction also looks at the network
    counted.calls = 0
    predict(posterior, X, num_draws=samples, seed=0, chunk_size=2)
    return counted.calls / 3


def plain(*middle):
    return nn.Sequential(Counted(4, 8), nn.Tanh(), Counted(8, 8), *middle, nn.Linear(8, 3)).double().eval()


POSTERIORS = {
    "dropout before the last layer": lambda: convert(plain(nn.Dropout(0.5)), MCDropout()),
    "swag of the last layer": lambda: spread(convert(plain(), SWAG(rank=3), include="3")),
    "members of the last layer": lambda: convert(plain(), DeepEnsemble(members=SAMPLES), include="3"),
}


@pytest.mark.parametrize("kind", POSTERIORS)
@pytest.mark.slow
def test_the_prefix_runs_once_per_chunk(kind, arrangement):
    posterior = POSTERIORS[kind]()
    check(posterior)
    for index in (0, 2):
        for samples in (2, 7, 20):
            assert calls_per_chunk(posterior, posterior.network[index], samples) == 1


def test_what_comes_after_the_noise_runs_for_each_draw(arrangement):
    network = nn.Sequential(nn.Dropout(0.5), Counted(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double().eval()
    posterior = convert(network, MCDropout())
    check(posterior)
    assert calls_per_chunk(posterior, posterior.network[1]) == (1 if arrangement == "folded" else SAMPLES)


# -- networks on which remembering is easily wrong ------------------------------------------------------------------


class Case(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = Counted(4, 8)
        self.b = nn.Linear(8, 8)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(8, 3)
        self.double().eval()


class InPlaceAdd(Case):
    def forward(self, x):
        h = self.a(x)
        out = self.dropout(self.b(h))
        if out.shape == h.shape:
            h += out  # changes what was remembered
            out = h
        else:
            out = out + h.repeat(out.shape[0] // h.shape[0], 1)
        return self.last(out)


class InPlaceRelu(Case):
    def forward(self, x):
        return self.last(self.dropout(self.relu(self.b(self.relu(self.a(x))))))


class IgnoredReturn(Case):
    def forward(self, x):
        h = self.a(x)
        self.relu(h)  # works in place; what it returns is not used
        return self.last(self.dropout(h))


class FunctionalInPlace(Case):
    def forward(self, x):
        h = self.a(x)
        h.relu_().mul_(2)
        h = self.b(h)
        h[:, 0] = 1
        return self.last(self.dropout(h).sin_())


class ResidualJoin(Case):
    def forward(self, x):
        h = self.a(x)
        return self.last(h + self.dropout(self.b(h)))


class LateJoin(Case):
    def forward(self, x):
        early = self.b(self.a(x))
        late = self.b(self.dropout(early))
        return self.last(torch.cat([late[:, :4], early[:, 4:]], 1))


class Appends(Case):
    def forward(self, x):
        skips = []
        h = self.b(self.collect(x, skips))
        return self.last(self.dropout(h) + skips.pop())

    def collect(self, x, skips):
        h = self.a(x)
        skips.append(h)
        return h


class Collector(nn.Module):
    """A module that leaves something in a list it was given."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 8)

    def forward(self, x, skips):
        h = self.inner(x)
        skips.append(h.tanh())
        return h


class CollectsInAList(Case):
    def __init__(self):
        super().__init__()
        self.collector = Collector().double()

    def forward(self, x):
        skips = []
        h = self.collector(x, skips)
        return self.last(self.dropout(h) + skips.pop())


class ViewOfBatch(Case):
    """Reshapes with the batch size that came in, which folding changes."""

    def forward(self, x):
        rows = x.shape[0]
        h = self.dropout(self.a(x)).reshape(rows, -1, 8)
        return self.last(h.softmax(1).sum(1) + h.mean(1))


class CalledTwice(Case):
    def forward(self, x):
        h = self.b(self.b(self.a(x)))
        return self.last(self.b(self.dropout(h)))


CASES = [
    InPlaceAdd, InPlaceRelu, IgnoredReturn, FunctionalInPlace, ResidualJoin, LateJoin, Appends, CollectsInAList,
    ViewOfBatch, CalledTwice,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_dropout(case, arrangement):
    check(convert(case(), MCDropout()))


@pytest.mark.parametrize(
    ("case", "include"),
    [(case, "last") for case in CASES]
    + [(case, "b") for case in CASES if case not in (IgnoredReturn, CollectsInAList, ViewOfBatch)],  # which have no b
)
@pytest.mark.slow
def test_random_weights(case, include):
    check(spread(convert(case(), SWAG(rank=3), include=include)))
    check(convert(case(), DeepEnsemble(members=4), include=include))


def test_in_place_layers_keep_the_rest_of_the_prefix(arrangement):
    posterior = convert(InPlaceRelu(), MCDropout())
    check(posterior)
    deep = nn.Sequential(nn.Sequential(Counted(4, 8), nn.ReLU(inplace=True)), nn.Dropout(0.5), nn.Linear(8, 3))
    posterior = convert(deep.double().eval(), MCDropout())
    check(posterior)
    assert calls_per_chunk(posterior, posterior.network[0][0]) == 1


class TiedProjection(nn.Module):
    """Reads the embedding's weight without calling the embedding, before a deterministic layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.body = nn.Linear(4, 4)
        self.out = nn.Linear(5, 3)
        self.double().eval()

    def forward(self, x):
        return self.out(F.linear(self.body(F.linear(x, self.embedding.weight).tanh()[:, :4]), self.embedding.weight))


class ReadsBeforeItCalls(nn.Module):
    """Uses a random weight first, then a deterministic layer, and then calls the layer that owns the weight."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.double().eval()

    def forward(self, x):
        return self.last(self.body(F.linear(x, self.last.weight)))


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.body = nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)
        self.double().eval()

    def forward(self, x):
        x = x[:, None].expand(-1, 3, -1).cumsum(1)
        return self.last(self.body(self.attention(x, x, x)[0]).mean(1))


class Encodes(nn.Module):
    """In evaluation mode torch runs this layer as one kernel, which reads every weight and calls no child."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.body = nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)
        self.double().eval()

    def forward(self, x):
        x = x[:, None].expand(-1, 3, -1).cumsum(1)
        return self.last(self.body(self.layer(x)).mean(1))


@pytest.mark.parametrize(
    ("make", "include", "opaque"),
    [
        (TiedProjection, "embedding", True),
        (ReadsBeforeItCalls, "last", True),
        (ReadsBeforeItCalls, "body", False),
        (Attends, "attention", False),
        (Attends, "attention.out_proj", False),
        (Encodes, "layer.linear2", True),
        (Encodes, "layer.self_attn", True),
        (Encodes, "last", False),
    ],
)
def test_weights_that_are_read_without_a_call(make, include, opaque):
    swag = spread(convert(make(), SWAG(rank=3), include=include))
    assert check(swag).opaque is opaque
    check(convert(make(), DeepEnsemble(members=4, start="perturbed"), include=include))


def test_what_is_learned_about_a_network_does_not_depend_on_its_spread():
    posterior = convert(ReadsBeforeItCalls(), SWAG(rank=3), include="last")
    with pytest.warns(UserWarning, match="no uncertainty yet"):
        predict(posterior, X, seed=0)  # before fitting every draw is the same
    check(spread(posterior))


class MaskedIfNeeded(nn.Module):
    """Builds a mask only for inputs that need one, as transformers do with padding."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(4, 3)
        self.double().eval()

    def forward(self, x, keep):
        h = self.dropout(x)
        return self.last(h if bool(keep.all()) else h * keep)


def test_a_network_that_joins_only_for_some_inputs():
    posterior = convert(MaskedIfNeeded(), MCDropout())
    keep = torch.ones(6, 4, dtype=torch.float64)
    keep[4, 1:] = 0
    inputs = (X, keep)
    prediction = predict(posterior, inputs, num_draws=SAMPLES, seed=0, chunk_size=2, keep_samples=True)
    torch.testing.assert_close(prediction.samples, looped(posterior, inputs, SAMPLES, 0).softmax(-1), **EXACT)


def test_a_forward_of_the_users_own_returns():
    network = plain(nn.Dropout(0.5))
    posterior = convert(network, MCDropout())
    layer = posterior.network[0]
    own = layer.forward = lambda x: Counted.forward(layer, x) * 2
    expected = looped(posterior, X, 5, 0).softmax(-1)
    got = predict(posterior, X, num_draws=5, seed=0, chunk_size=1, keep_samples=True).samples
    torch.testing.assert_close(got, expected, **EXACT)
    assert layer.__dict__["forward"] is own
