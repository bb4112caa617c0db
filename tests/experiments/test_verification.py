"""Verification of pairs against loops."""

import itertools
import math

import pytest
import torch

from experiments.verification import cosine_scores, verification_accuracy


def _pairs(number: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    same = torch.arange(number) % 3 != 0
    scores = (torch.randn(number, dtype=torch.float64) + 1.2 * same).mul(4).round() / 4  # with equal scores
    return scores, same


def _naive(scores: torch.Tensor, same: torch.Tensor, fold_of: list[int]) -> tuple[list[float], list[float]]:
    thresholds, accuracies = [], []
    for fold in sorted(set(fold_of)):
        train = [i for i in range(len(scores)) if fold_of[i] != fold]
        levels = sorted({float(scores[i]) for i in train})
        middles = [(a + b) / 2 for a, b in itertools.pairwise(levels)]
        best = (-1.0, 0.0)
        for threshold in [-math.inf, *middles, math.inf]:
            right = sum((float(scores[i]) >= threshold) == bool(same[i]) for i in train) / len(train)
            if right > best[0]:
                best = (right, threshold)
        thresholds.append(best[1])
        own = [i for i in range(len(scores)) if fold_of[i] == fold]
        accuracies.append(sum((float(scores[i]) >= best[1]) == bool(same[i]) for i in own) / len(own))
    return thresholds, accuracies


@pytest.mark.parametrize("given", [2, 7, "listed"])
def test_folds_equal_a_loop_over_thresholds(given: int | str):
    scores, same = _pairs()
    fold_of = [i % given if isinstance(given, int) else (i // 25) * 3 for i in range(len(scores))]
    found = verification_accuracy(scores, same, folds=given if isinstance(given, int) else fold_of)
    thresholds, accuracies = _naive(scores, same, fold_of)
    assert list(found.thresholds) == thresholds
    assert found.accuracy == pytest.approx(sum(accuracies) / len(accuracies), abs=1e-12)
    assert found.std == pytest.approx(float(torch.tensor(accuracies, dtype=torch.float64).std(correction=0)), abs=1e-12)


def test_one_kind_alone_has_no_finite_threshold():
    assert verification_accuracy([0.1, 0.2, 0.3, 0.4], [True] * 4, folds=2).thresholds == (-math.inf, -math.inf)
    assert verification_accuracy([0.1, 0.2, 0.3, 0.4], [False] * 4, folds=2).thresholds == (math.inf, math.inf)


def test_cosines_equal_a_loop():
    torch.manual_seed(1)
    a, b = torch.randn(5, 4), torch.randn(5, 4)
    for found, x, y in zip(cosine_scores(a, b), a.double(), b.double(), strict=True):
        naive = sum(p * q for p, q in zip(x, y, strict=True)) / math.sqrt(sum(p * p for p in x) * sum(q * q for q in y))
        assert float(found) == pytest.approx(float(naive), abs=1e-14)


def test_what_is_wrong_is_said():
    with pytest.raises(ValueError, match="no direction"):
        cosine_scores([[0.0, 0.0]], [[1.0, 0.0]])
    with pytest.raises(ValueError, match="must be \\(N, D\\)"):
        cosine_scores([0.0, 1.0], [1.0, 0.0])
    with pytest.raises(ValueError, match="at least two"):
        verification_accuracy([0.1, 0.2], [1, 0], folds=1)
    with pytest.raises(ValueError, match="at least two"):
        verification_accuracy([0.1], [1])
    with pytest.raises(ValueError, match="Shapes do not match"):
        verification_accuracy([0.1, 0.2], [1, 0], folds=[0, 1, 1])
