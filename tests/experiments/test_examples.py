"""Figures from columns of examples are those of the library; intervals hold what they should."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import measure
from experiments.examples import columns_of, figures, intervals, load_columns, save_columns


def classified(seed: int = 0, shape: tuple[int, ...] = (60,)) -> tuple[bayesify.Prediction, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(3, *shape, 4, generator=generator, dtype=torch.float64)
    likelihood = bayesify.Categorical()
    targets = torch.randint(4, shape, generator=generator)
    return likelihood.from_samples(logits.movedim(-1, 2) if len(shape) > 1 else logits), targets


def test_figures_of_classification_are_the_library_s():
    prediction, targets = classified()
    found = figures(columns_of(prediction, targets))
    right = prediction.label == targets
    wanted = {
        "error": 1 - measure.accuracy(prediction.probs, targets),
        "nll": measure.nll(prediction.probs, targets),
        "brier": measure.brier(prediction.probs, targets),
        "ece": measure.ece(prediction.probs, targets),
        "aurc": measure.aurc(prediction.msp, right),
        "coverage at 1 % risk": measure.coverage_at_risk(prediction.msp, right, max_risk=0.01),
    }
    assert found == pytest.approx(wanted, abs=1e-12)


def test_pixels_count_one_by_one():
    prediction, targets = classified(shape=(5, 3, 2))
    found = figures(columns_of(prediction, targets))
    assert prediction.label.shape == targets.shape
    assert found["nll"] == pytest.approx(measure.nll(prediction.probs, targets), abs=1e-12)
    assert found["ece"] == pytest.approx(measure.ece(prediction.probs, targets), abs=1e-12)
    targets[0, 0, 0] = -100
    with pytest.raises(ValueError, match="must have a label"):
        columns_of(prediction, targets)


def test_figures_of_regression_are_those_of_the_targets_own_units():
    torch.manual_seed(0)
    network = nn.Linear(2, 1).double()
    x, y = torch.randn(50, 2, dtype=torch.float64), torch.randn(50, 1, dtype=torch.float64)
    posterior = bayesify.convert(network, "map", likelihood="regression")
    prediction = bayesify.predict(posterior, DataLoader(TensorDataset(x, y), 25))
    scale = 3.0
    found = figures(columns_of(prediction, y, scale=scale))
    mean, variance, targets = scale * prediction.mean, scale**2 * prediction.variance, scale * y[:, 0]
    low, high = prediction.interval(0.95)
    wanted = {
        "rmse": measure.rmse(mean, targets),
        "nll": measure.gaussian_nll(mean, variance, targets),
        "crps": measure.crps_gaussian(mean, variance, targets),
        "coverage": measure.interval_coverage(scale * low, scale * high, targets),
    }
    assert found == pytest.approx(wanted, abs=1e-12)


def test_the_interval_of_a_mean_is_that_of_a_gaussian():
    prediction, targets = classified(shape=(400,))
    columns = columns_of(prediction, targets)
    low, high = intervals(columns, resamples=500)["nll"]
    losses = -columns["log_prob"]
    half = 1.96 * float(losses.std()) / math.sqrt(len(losses))
    assert (low + high) / 2 == pytest.approx(float(losses.mean()), abs=0.15 * half)
    assert (high - low) / 2 == pytest.approx(half, rel=0.15)


def test_pairs_see_the_same_examples():
    columns = columns_of(*classified())
    worse = {**columns, "log_prob": columns["log_prob"] - 0.5}
    found = intervals(worse, columns, resamples=50)
    assert found["nll"] == pytest.approx((0.5, 0.5), abs=1e-12), "what every example adds has no spread"
    assert found["aurc"] == (0.0, 0.0)
    with pytest.raises(ValueError, match="same examples"):
        intervals(columns, {name: column[1:] for name, column in columns.items()})


def test_columns_are_kept_to_five_digits_of_every_figure(tmp_path):
    columns = columns_of(*classified())
    save_columns(tmp_path / "new" / "a.npz", columns)
    back = load_columns(tmp_path / "new" / "a.npz")
    assert figures(back) == pytest.approx(figures(columns), abs=1e-6)
    assert back["correct"].dtype == torch.bool
