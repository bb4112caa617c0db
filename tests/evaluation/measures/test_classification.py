"""Accuracy, log score and Brier score against scikit-learn and hand values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn import metrics

from bayesify import measure


@pytest.fixture(name="problem")
def _problem() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(200, 4, generator=generator, dtype=torch.float64)
    return logits.softmax(-1), torch.randint(4, (200,), generator=generator)


def test_against_sklearn(problem: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Accuracy and log loss are scikit-learn's, Brier a naive sum."""
    probs, labels = problem
    p, y = probs.numpy(), labels.numpy()
    assert measure.accuracy(probs, labels) == metrics.accuracy_score(y, p.argmax(-1))
    assert measure.nll(probs, labels) == pytest.approx(metrics.log_loss(y, p), rel=1e-12)
    naive = sum(sum((p[n, c] - (y[n] == c)) ** 2 for c in range(4)) for n in range(200)) / 200
    assert measure.brier(probs, labels) == pytest.approx(naive, rel=1e-12)


def test_log_probs_equal_probs(problem: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Both spellings of the log score agree, and log probabilities do not underflow."""
    probs, labels = problem
    assert measure.nll(None, labels, log_probs=probs.log()) == pytest.approx(measure.nll(probs, labels), rel=1e-14)
    log_probs = torch.tensor([[0.0, -1000.0]]).log_softmax(-1)
    assert measure.nll(None, [1], log_probs=log_probs) == 1000.0
    assert measure.nll(log_probs.exp(), [1]) == math.inf


def test_binary_is_two_columns() -> None:
    """A 1-D array of p(y=1) means the columns (1 - p, p), and a tie predicts class 0."""
    p = np.array([0.9, 0.2, 0.5, 1.0])
    columns = np.stack([1 - p, p], axis=-1)
    y = np.array([1, 1, 0, 1])
    assert measure.accuracy(p, y) == measure.accuracy(columns, y) == 0.75
    assert measure.nll(p, y) == measure.nll(columns, y)
    assert measure.brier(p, y) == pytest.approx(2 * metrics.brier_score_loss(y, p), rel=1e-12)


def test_dense_labels_and_ignored_positions(problem: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Dense input with ignored positions equals the flat problem without them."""
    probs, labels = problem
    ignored = labels.clone()
    ignored[::3] = -100
    kept = ignored != -100
    for function in (measure.accuracy, measure.nll, measure.brier):
        dense = function(probs.reshape(2, 10, 10, 4), ignored.reshape(2, 10, 10))
        assert dense == pytest.approx(function(probs[kept], labels[kept]), rel=1e-14)
        assert dense != function(probs, labels)
    assert measure.accuracy(probs, torch.where(kept, labels, 255), ignore_index=255) == (
        measure.accuracy(probs[kept], labels[kept])
    )


def test_exactly_one_of_probs_and_log_probs() -> None:
    """Both or neither is an error, and so are logits in place of log probabilities."""
    with pytest.raises(ValueError, match="not both and not neither"):
        measure.nll(None, [0])
    with pytest.raises(ValueError, match="not both and not neither"):
        measure.nll([[0.5, 0.5]], [0], log_probs=[[-0.7, -0.7]])
    with pytest.raises(ValueError, match="log_softmax"):
        measure.nll(None, [0], log_probs=[[3.0, -0.7]])
    with pytest.raises(ValueError, match="1-D"):
        measure.nll(None, [0], log_probs=[-0.7])
