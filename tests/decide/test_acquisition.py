"""Acquisition: data-set indices, best first; Batch-BALD against a sum over all joint labels."""

import itertools
import math

import pytest
import torch

from bayesify.decide import acquire, active_learning, batch_bald
from bayesify.likelihoods import Categorical


def prediction(rows: int = 30, draws: int = 6, classes: int = 3, seed: int = 0):
    logits = 2 * torch.randn(draws, rows, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Categorical().from_samples(logits, keep_samples=True)


@pytest.mark.parametrize(
    ("how", "score"),
    [
        ("entropy", lambda p: -(p.mean(0) * p.mean(0).log()).sum(-1)),
        ("bald", lambda p: -(p.mean(0) * p.mean(0).log()).sum(-1) + (p * p.log()).sum(-1).mean(0)),
        ("max-probability", lambda p: 1 - p.mean(0).amax(-1)),
        ("model-variance", lambda p: (p**2).sum(-1).mean(0) - (p.mean(0) ** 2).sum(-1)),
    ],
)
def test_the_highest_scores_are_chosen(how, score):
    pool = prediction()
    expected = score(pool.samples).argsort(descending=True)[:5]
    indices = torch.arange(30) * 7 + 100
    assert acquire(pool, 5, acquisition=how, indices=indices).tolist() == (expected * 7 + 100).tolist()


def test_variation_ratio_counts_votes_and_breaks_ties_at_random():
    pool = prediction()
    votes = torch.nn.functional.one_hot(pool.samples.argmax(-1), 3).sum(0).amax(-1)
    chosen = [acquire(pool, 30, acquisition="variation-ratio", seed=seed) for seed in range(5)]
    for order in chosen:
        assert (votes[order].diff() >= 0).all()
    assert len({tuple(order.tolist()) for order in chosen}) == 5


def test_random_is_without_replacement_and_by_seed():
    pool = prediction()
    one, same, other = (acquire(pool, 30, acquisition="random", seed=seed).tolist() for seed in (0, 0, 1))
    assert one == same != other
    assert sorted(one) == list(range(30))


def joint_information(probs: torch.Tensor, rows: list[int]) -> float:
    """I(y_rows; w) by a sum over every joint label."""
    draws, _, classes = probs.shape
    total = 0.0
    for labels in itertools.product(range(classes), repeat=len(rows)):
        joint = torch.ones(draws, dtype=torch.float64)
        for row, label in zip(rows, labels, strict=True):
            joint = joint * probs[:, row, label]
        p = joint.mean().item()
        total -= p * math.log(p)
    conditional = -(probs[:, rows] * probs[:, rows].log()).sum(-1).mean(0).sum().item()
    return total - conditional


def test_batch_bald_is_greedy_on_the_joint_information():
    probs = prediction(rows=8, draws=5).samples
    chosen: list[int] = []
    for _ in range(4):
        rest = [row for row in range(8) if row not in chosen]
        chosen.append(max(rest, key=lambda row: joint_information(probs, [*chosen, row])))
    assert batch_bald(probs, 4).tolist() == chosen


def test_sampled_joint_labels_come_near_the_exact_sum():
    probs = prediction(rows=6, draws=5).samples
    exact = batch_bald(probs, 6)
    sampled = batch_bald(probs, 6, joint_samples=20_000)
    assert torch.equal(exact, sampled)
    few = batch_bald(probs, 3, joint_samples=5)
    assert len(set(few.tolist())) == 3


def test_batch_bald_does_not_choose_the_same_twice_over():
    # Two copies of the best example: BALD takes both, Batch-BALD one and another.
    probs = prediction(rows=5, draws=8, seed=3).samples
    best = int(torch.stack([torch.tensor(joint_information(probs, [row])) for row in range(5)]).argmax())
    doubled = torch.cat([probs, probs[:, best : best + 1]], 1)
    assert set(batch_bald(doubled, 2).tolist()) != {best, 5}
    pool = Categorical().from_samples(doubled.log(), keep_samples=True)
    assert set(acquire(pool, 2, acquisition="bald").tolist()) == {best, 5}
    assert acquire(pool, 2, acquisition="batch-bald").tolist() == batch_bald(doubled, 2).tolist()


def test_the_loop_labels_data_set_indices():
    pool = [2, 4, 6, 8, 10, 12]
    seen: list[list[int]] = []
    scores = {index: index / 20 for index in pool}

    def learn(labelled: list[int], before: list[int] | None) -> list[int]:
        assert before == (seen[-1] if seen else None)
        seen.append(labelled)
        return labelled

    class Scores:
        def __init__(self, indices: list[int]) -> None:
            self.epistemic = torch.tensor([scores[index] for index in indices])

    rounds = active_learning(
        learn, lambda posterior, indices: Scores(indices), lambda posterior: {"labels": float(len(posterior))},
        start=[4], pool=pool, num=2, rounds=4,
    )  # fmt: skip
    assert seen == [[4], [4, 12, 10], [4, 12, 10, 8, 6], [4, 12, 10, 8, 6, 2]]
    assert [r.results["labels"] for r in rounds] == [1, 3, 5, 6]
    assert rounds[-1].chosen == ()
    with pytest.raises(ValueError, match="given twice"):
        active_learning(learn, None, None, start=[1, 1], pool=pool, num=1, rounds=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"acquisition": "best"}, "acquisition must be one of"),
        ({"num": 0}, "at least 1"),
        ({"indices": [1, 2]}, "2 indices for a pool of 30"),
    ],
)
def test_bad_input(options: dict, words: str):
    with pytest.raises(ValueError, match=words):
        acquire(prediction(), **{"num": 3, **options})


def test_batch_bald_needs_the_draws():
    pool = Categorical().from_samples(torch.randn(2, 4, 3))
    with pytest.raises(ValueError, match="keep_samples=True"):
        acquire(pool, 2, acquisition="batch-bald")
