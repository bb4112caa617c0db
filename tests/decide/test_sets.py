"""Prediction sets: equal to a naive loop, and they hold what they promise."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor

from bayesify import Categorical
from bayesify.decide import PredictionIntervals, PredictionSets, conformal_quantile


def _problem(seed: int, count: int, classes: int = 5) -> tuple[Tensor, Tensor]:
    """Probabilities that are sharper than the truth, and labels of the truth."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, classes, generator=generator, dtype=torch.float64)
    logits[:, 0] += 0.7
    labels = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    return (2 * logits).softmax(-1), labels


def _naive_score(row: list[float], label: int, kind: str, penalty: float, free: int, share: float) -> float:
    if kind == "split":
        return 1 - row[label]
    order = sorted(range(len(row)), key=lambda index: -row[index])
    rank = order.index(label)
    total = math.fsum(row[index] for index in order[:rank]) + share * row[label]
    total = 1.0 if rank == len(row) - 1 and share == 1 else total
    return total + (penalty * max(0, rank + 1 - free) if kind == "raps" else 0)


def _naive_quantile(scores: list[float], coverage: float) -> float:
    rank = math.ceil(round((len(scores) + 1) * coverage, 9))
    return sorted(scores)[rank - 1] if rank <= len(scores) else math.inf


@pytest.mark.parametrize("kind", ["split", "aps", "raps"])
@pytest.mark.parametrize("by", ["all", "class", "group"])
@pytest.mark.parametrize("seed", [None, 3])
def test_sets_are_those_of_a_naive_loop(kind, by, seed):
    probs, labels = _problem(0, 150)
    new, _ = _problem(1, 40)
    groups, new_groups = labels % 2 + (probs[:, 1] > 0.5), torch.arange(40) % 4
    given = {"groups": groups} if by == "group" else {"condition": "class"} if by == "class" else {}
    sets = PredictionSets.fit(probs, labels, coverage=0.85, kind=kind, penalty=0.1, free=2, seed=seed, **given)
    called = {"groups": new_groups} if by == "group" else {}
    found = sets(new, seed=None if seed is None else 9, **called)

    def shares(count, seed):
        if seed is None:
            return [1.0] * count
        return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()

    own = shares(150, seed)
    scores = [
        _naive_score(row, label, kind, 0.1, 2, share)
        for row, label, share in zip(probs.tolist(), labels.tolist(), own, strict=True)
    ]
    other = shares(40, None if seed is None else 9)
    for row, values in enumerate(new.tolist()):
        for label in range(5):
            if by == "all":
                rest = scores
            elif by == "class":
                rest = [s for s, y in zip(scores, labels.tolist(), strict=True) if y == label]
            else:
                rest = [s for s, g in zip(scores, groups.tolist(), strict=True) if g == int(new_groups[row])]
            score = _naive_score(values, label, kind, 0.1, 2, other[row])
            assert bool(found[row, label]) == (score <= _naive_quantile(rest, 0.85)), (row, label)
    assert 0 < float(found.double().mean()) < 1


@pytest.mark.parametrize("kind", ["split", "aps", "raps"])
def test_coverage_holds_for_all_and_for_each_class(kind):
    """Over 100 draws of 60 calibration examples and 50 new ones the mean lies in [.8, .8 + 1/61], to four errors."""
    hits, own = [], [[] for _ in range(3)]
    for seed in range(100):
        probs, labels = _problem(seed, 110, classes=3)
        new, truth = probs[60:], labels[60:]
        for condition, into in ((None, None), ("class", own)):
            sets = PredictionSets.fit(
                probs[:60], labels[:60], coverage=0.8, kind=kind, condition=condition, seed=2 * seed
            )
            held = sets(new, seed=2 * seed + 1).gather(1, truth[:, None])[:, 0].double()
            if into is None:
                hits.append(float(held.mean()))
            else:
                for label in range(3):
                    if (truth == label).any():
                        into[label].append(float(held[truth == label].mean()))
    mean = torch.tensor(hits, dtype=torch.float64)
    error = float(mean.std()) / 10
    assert 0.8 - 4 * error < float(mean.mean()) < 0.8 + 1 / 61 + 4 * error
    for values in own:
        each = torch.tensor(values, dtype=torch.float64)
        assert float(each.mean()) > 0.8 - 4 * float(each.std()) / math.sqrt(len(each))


def test_sets_take_predictions_and_ignored_labels_and_survive_json():
    logits = torch.randn(1, 200, 4, generator=torch.Generator().manual_seed(0))
    prediction = Categorical().from_samples(logits)
    labels = logits[0].argmax(-1)
    labels[0] = -100
    sets = PredictionSets.fit(prediction, labels, coverage=0.9, condition="class")
    kept = PredictionSets.fit(prediction.probs[1:], labels[1:], coverage=0.9, condition="class")
    assert torch.equal(sets.thresholds, kept.thresholds)
    again = PredictionSets.from_dict(json.loads(json.dumps(sets.to_dict())))
    assert torch.equal(again(prediction), sets(prediction))
    rare = PredictionSets.fit(prediction[:12], labels[:12], coverage=0.9, condition="class")
    assert rare.thresholds.isinf().all()
    assert PredictionSets.from_dict(json.loads(json.dumps(rare.to_dict())))(prediction).all()


def test_what_sets_refuse():
    probs, labels = _problem(0, 20)
    with pytest.raises(ValueError, match="kind must be one of"):
        PredictionSets.fit(probs, labels, kind="best")
    with pytest.raises(ValueError, match="two promises"):
        PredictionSets.fit(probs, labels, condition="class", groups=labels)
    with pytest.raises(ValueError, match="share in"):
        PredictionSets.fit(probs, labels, coverage=90)
    with pytest.raises(ValueError, match="one whole number from 0 on"):
        PredictionSets.fit(probs, labels, groups=labels - 1)
    sets = PredictionSets.fit(probs, labels, groups=labels)
    with pytest.raises(ValueError, match="Give groups="):
        sets(probs)
    with pytest.raises(TypeError, match="no numbers"):
        PredictionIntervals.fit(Categorical().from_samples(probs.log()[None]), labels)


def test_conformal_quantile_at_the_edges():
    assert conformal_quantile(range(1, 20), 0.95) == 19
    assert conformal_quantile(range(1, 19), 0.95) == math.inf
    assert conformal_quantile([1.0, math.inf], 0.5) == math.inf
