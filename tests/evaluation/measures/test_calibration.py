"""Calibration errors against torchmetrics and naive loops over bins."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.functional.classification import multiclass_calibration_error

from bayesify import measure


def _problem(seed: int, count: int = 300, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, classes, generator=generator, dtype=torch.float64)
    return logits.softmax(-1), torch.randint(classes, (count,), generator=generator)


def _loop_ece(confidence: np.ndarray, hit: np.ndarray, num_bins: int) -> float:
    total = 0.0
    for i in range(num_bins):
        inside = (confidence > i / num_bins) & (confidence <= (i + 1) / num_bins)
        if i == 0:
            inside |= confidence == 0
        if inside.any():
            total += inside.mean() * abs(hit[inside].mean() - confidence[inside].mean())
    return total


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), num_bins=st.sampled_from([1, 5, 10, 15]))
def test_ece_equals_loop_and_torchmetrics(seed: int, num_bins: int) -> None:
    """Ece equals a loop over intervals, and torchmetrics."""
    probs, labels = _problem(seed)
    confidence, predicted = probs.max(-1)
    result = measure.ece(probs, labels, num_bins=num_bins)
    hit = (predicted == labels).numpy()
    assert result == pytest.approx(_loop_ece(confidence.numpy(), hit, num_bins), abs=1e-13)
    peer = multiclass_calibration_error(probs, labels, num_classes=4, n_bins=num_bins)
    assert result == pytest.approx(peer.item(), abs=1e-6)


def test_bins_are_open_below_and_closed_above() -> None:
    """A confidence on an edge belongs to the bin below it: 0.6 with 5 bins is in (0.4, 0.6]."""
    diagram = measure.reliability([0.6, 0.61, 0.8, 1.0], [1, 1, 0, 1], num_bins=5)
    assert diagram.count.tolist() == [0, 0, 1, 2, 1]
    assert diagram.edges.tolist() == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert diagram.accuracy[2:].tolist() == [1.0, 0.5, 1.0]
    assert diagram.confidence[2:].tolist() == pytest.approx([0.6, 0.705, 1.0])
    assert diagram.confidence[:2].isnan().all()
    assert diagram.accuracy[:2].isnan().all()
    for i in range(8, 16):
        assert measure.reliability([i / 15], [1]).count.argmax() == i - 1


def test_reliability_gives_ece() -> None:
    """The diagram holds all that the error needs."""
    probs, labels = _problem(1)
    diagram = measure.reliability(probs, labels)
    gap = diagram.count * (diagram.accuracy - diagram.confidence).abs()
    assert gap.nansum().item() / 300 == pytest.approx(measure.ece(probs, labels), abs=1e-14)
    assert diagram.count.sum() == 300


def test_adaptive_ece_equals_split() -> None:
    """Without ties the bins are consecutive parts of equal size."""
    probs, labels = _problem(2)
    confidence, predicted = probs.max(-1)
    order = confidence.argsort()
    gap = (confidence - (predicted == labels).double())[order]
    expected = sum(abs(part.sum().item()) for part in gap.reshape(15, 20)) / 300
    assert measure.adaptive_ece(probs, labels) == pytest.approx(expected, abs=1e-13)


@settings(max_examples=30, deadline=None)
@given(
    p=st.lists(st.sampled_from([0.5, 0.6, 0.7, 0.9]), min_size=2, max_size=30),
    seed=st.integers(0, 100),
)
def test_adaptive_ece_ignores_the_order_of_ties(p: list[float], seed: int) -> None:
    """Shuffling examples of equal confidence changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (len(p),), generator=generator)
    order = torch.randperm(len(p), generator=generator)
    shuffled = measure.adaptive_ece(torch.tensor(p)[order], labels[order], num_bins=4)
    assert measure.adaptive_ece(torch.tensor(p), labels, num_bins=4) == pytest.approx(shuffled, abs=1e-13)


def test_classwise_ece_equals_loop() -> None:
    """The mean over classes of one-against-rest errors; a zero probability is in bin one."""
    probs, labels = _problem(3)
    probs[0] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    p, y = probs.numpy(), labels.numpy()
    expected = np.mean([_loop_ece(p[:, c], (y == c).astype(float), 15) for c in range(4)])
    assert measure.classwise_ece(probs, labels) == pytest.approx(expected, abs=1e-13)


def test_binary_means_two_columns() -> None:
    """p(y=1) gives the errors of (1 - p, p): confidently and rightly 'no' is no error."""
    p = torch.tensor([0.01, 0.02, 0.99, 0.3])
    columns = torch.stack([1 - p.double(), p.double()], -1)
    labels = [0, 0, 1, 1]
    for function in (measure.ece, measure.adaptive_ece, measure.classwise_ece):
        assert function(p, labels) == pytest.approx(function(columns, labels), abs=1e-15)
    assert measure.ece(p[:3], labels[:3]) == pytest.approx(0.04 / 3, abs=1e-8)


def test_calibrated_and_overconfident() -> None:
    """Perfect calibration gives 0, certainty that is always wrong gives 1."""
    probs = torch.tensor([[0.75, 0.25]]).expand(4, 2)
    assert measure.ece(probs, [0, 0, 0, 1]) == 0
    assert measure.adaptive_ece(probs, [0, 0, 0, 1], num_bins=2) == 0
    assert measure.classwise_ece(probs, [0, 0, 0, 1]) == 0
    assert measure.ece([[1.0, 0.0]], [1]) == 1


def test_ignored_positions() -> None:
    """Ignored positions of a dense output do not count."""
    probs, labels = _problem(4)
    ignored = labels.clone()
    ignored[:150] = -100
    for function in (measure.ece, measure.adaptive_ece, measure.classwise_ece):
        dense = function(probs.reshape(3, 100, 4), ignored.reshape(3, 100))
        assert dense == pytest.approx(function(probs[150:], labels[150:]), abs=1e-14)


@pytest.mark.parametrize("num_bins", [0, -1, 2.5])
@pytest.mark.parametrize("name", ["ece", "adaptive_ece", "classwise_ece", "reliability"])
def test_number_of_bins(name: str, num_bins: float) -> None:
    """Fewer than one bin, or part of one, is refused."""
    with pytest.raises(ValueError, match="num_bins"):
        getattr(measure, name)([0.5], [1], num_bins=num_bins)
