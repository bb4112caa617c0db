"""A malformed request is the caller's own mistake: later predictions are as they were, and as fast."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from bayesify import ABNN, IBNN, SWAG, BayesAdapter, DeepEnsemble, MCDropout, convert, predict
from bayesify.prediction import layout
from tests.marks import slow_but

GOOD = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
MALFORMED = {
    "features": torch.randn(5, 6),
    "integers": torch.ones(5, 4, dtype=torch.long),
    "NaN": torch.full((5, 4), torch.nan),
    "one NaN": torch.cat([torch.full((1, 4), torch.nan), GOOD]),
    "empty": GOOD[:0],
    "rank": torch.randn(5),
    "rank and features": torch.randn(2, 3, 3, 7),
    "names": {"nonsense": GOOD},
    "more inputs": (GOOD, GOOD),
}
METHODS = (MCDropout(), BayesAdapter(), IBNN(), ABNN(), DeepEnsemble(members=2), SWAG())


class Counts(nn.Linear):
    calls = 0

    def forward(self, x):
        Counts.calls += 1
        return super().forward(x)


pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # that a posterior has learned nothing


@pytest.fixture(params=METHODS, ids=lambda method: method.name)
def posterior(request):
    torch.manual_seed(0)
    network = nn.Sequential(Counts(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)).eval()
    return convert(network, request.param)


def look(posterior):
    """Return a good prediction, the calls that it costs, and what is known of the network."""
    Counts.calls = 0
    probs = predict(posterior, GOOD, seed=0, num_draws=6).probs
    loss = posterior.loss((GOOD, torch.zeros(5, dtype=torch.long)), num_data=9).total
    calls, trace = Counts.calls, posterior.trace(GOOD)
    found = layout.layout_of(posterior, GOOD, posterior.keys(2, 0))
    known = (found.rows, found.folded_rows, found.folds, found.joins, found.opaque, trace.calls)
    plans = [len(getattr(plan, "shared", ())) for key, plan in trace.memo.items() if "layout" not in key]
    return probs, (calls, known, plans), loss.isfinite()


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("first", slow_but([True], [True, False]), ids=["first", "later"])
@pytest.mark.slow
def test_a_malformed_request_changes_nothing(posterior, name, first):
    good = copy.deepcopy(posterior)
    look(good)  # what is learned from the first prediction costs passes of its own
    expected = look(good)
    if not first:
        look(posterior)
    with nullcontext() if "NaN" in name else pytest.raises(Exception):  # noqa: PT011  the network's own, of any kind
        predict(posterior, MALFORMED[name], seed=1, num_draws=6)
    look(posterior)
    found = look(posterior)
    assert torch.equal(found[0], expected[0])
    assert found[1] == expected[1]


def test_the_error_is_that_of_the_inputs_as_they_were_given():
    posterior = convert(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)), MCDropout())
    predict(posterior, GOOD)
    with pytest.raises(RuntimeError, match="5x6 and 4x8"):  # not those of a batch that holds several draws
        predict(posterior, MALFORMED["features"])
