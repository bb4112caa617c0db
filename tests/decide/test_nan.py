"""A NaN looks neither certain nor worth a label."""

import pytest
import torch
from torch import nn

from bayesify import (
    BayesAdapter,
    Bernoulli,
    Custom,
    DeepEnsemble,
    Gaussian,
    Laplace,
    MCDropout,
    Streamlined,
    convert,
    fit,
    predict,
)  # fmt: skip
from bayesify.decide import Detector, acquire
from bayesify.decide.acquisition import SCORES

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
BROKEN = X.clone()
BROKEN[2, 1] = torch.nan
BROKEN[4] = torch.nan
ROWS = torch.tensor([False, False, True, False, True, False])

LIKELIHOODS = {
    "classes": ("classification", 3, torch.arange(6) % 3),
    "binary": (Bernoulli(), 1, torch.arange(6) % 2),
    "several answers": (Bernoulli(), 2, torch.zeros(6, 2)),
    "numbers": ("regression", 1, torch.zeros(6, 1)),
    "known noise": (Gaussian(0.5), 2, torch.zeros(6, 2)),
    "noise head": (Gaussian("head"), 2, torch.zeros(6, 1)),
    "custom": (Custom(lambda output, target: -((output - target) ** 2).mean(-1)), 2, torch.zeros(6, 2)),
}
WAYS = {
    "dropout": (MCDropout(), ("sampling", "mean", "streamlined", "linearised")),
    "adapter": (
        BayesAdapter(start_std=(0.1, 0.1)),
        ("sampling", "mean", "streamlined", "linearised", Streamlined(covariance="full")),
    ),
    "laplace": (Laplace(), ("sampling", "streamlined")),
    "laplace, diagonal": (Laplace(structure="diagonal"), ("sampling", "streamlined")),
    "ensemble": (DeepEnsemble(members=2, start="network"), ("sampling",)),
}


def made(way, likelihood):
    torch.manual_seed(0)
    meaning, outputs, targets = LIKELIHOODS[likelihood]
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, outputs)).eval()
    posterior = convert(network, WAYS[way][0], likelihood=meaning)
    if "laplace" in way:
        fit(posterior, [(X, targets)], num_data=6, progress=False, accuracy_tolerance=2)
    return posterior


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of priors and accuracies of six examples
@pytest.mark.slow
def test_every_score_of_a_nan_is_nan(way, likelihood):
    try:
        posterior = made(way, likelihood)
    except ValueError:
        assert "laplace" in way  # which does not take every likelihood
        return
    tried = 0
    for how in WAYS[way][1]:
        try:
            good, broken = (predict(posterior, x, how=how, num_draws=None, seed=0) for x in (X, BROKEN))
        except ValueError:  # a predictor that does not take the likelihood
            continue
        tried += 1
        for name in broken.scores:
            scores = broken.score(name).reshape(6, -1)
            assert torch.equal(scores.isnan().all(1), ROWS), (how, name)
            torch.testing.assert_close(scores[~ROWS], good.score(name).reshape(6, -1)[~ROWS], msg=f"{how} {name}")
            with pytest.raises(ValueError, match="NaN"):
                Detector.fit(good.score(name).reshape(6, -1)[:, 0], id_acceptance=0.5)(scores)
    assert tried


@pytest.mark.parametrize("how", [*SCORES, "batch-bald", "random"])
def test_acquire_refuses_nan_and_counts_it(how):
    posterior = made("dropout", "classes")
    prediction = predict(posterior, BROKEN, keep_samples=True, seed=0)
    if how == "random":
        assert len(acquire(prediction, 3, acquisition=how)) == 3
        return
    with pytest.raises(ValueError, match="The scores of 2 of 6 examples are NaN, the first at position 2"):
        acquire(prediction, 3, acquisition=how)
    assert len(acquire(prediction[~ROWS], 3, acquisition=how)) == 3


def test_slices_and_joins_keep_nan():
    prediction = predict(made("dropout", "classes"), BROKEN, seed=0, chunk_size=2)
    assert torch.equal(prediction.variation_ratio.isnan(), ROWS)
    assert torch.equal(prediction[2:].variation_ratio.isnan(), ROWS[2:])
