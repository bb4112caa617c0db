"""Choosing from a pool batch by batch equals choosing from the whole; the loop goes on after it was killed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bayesify import MCDropout, convert, predict
from bayesify.decide import ActiveLearning, acquire


@pytest.fixture(scope="module")
def posterior():
    torch.manual_seed(0)
    return convert(nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4)), MCDropout())


@pytest.fixture(scope="module")
def pool():
    return torch.randn(230, 3, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("acquisition", ["entropy", "bald", "variation-ratio", "max-probability", "model-variance"])
def test_streaming_chooses_the_highest_scores(posterior, pool, acquisition):
    whole = predict(posterior, pool, num_draws=6, seed=0)
    found = acquire(posterior, DataLoader(TensorDataset(pool, pool), 32), 12, acquisition=acquisition, num_draws=6)
    name = {"entropy": "total", "bald": "epistemic", "max-probability": "msp"}.get(acquisition)
    scores = whole.score(name or acquisition.replace("-", "_"))
    assert len(found.unique()) == 12
    assert torch.allclose(scores[found], scores.sort(descending=True).values[:12], atol=1e-6)
    if acquisition != "variation-ratio":  # which has equal scores
        assert torch.equal(found, acquire(whole, 12, acquisition=acquisition))


def test_bounded_batch_bald(posterior, pool):
    """With all of the pool as candidates it is BatchBALD itself; with fewer, that of the highest BALD."""
    whole = predict(posterior, pool, num_draws=6, seed=0, keep_samples=True)
    exact = acquire(whole, 5, acquisition="batch-bald")
    loader = DataLoader(TensorDataset(pool), 50)
    options = {"acquisition": "batch-bald", "num_draws": 6}
    assert sorted(acquire(posterior, loader, 5, candidates=230, **options).tolist()) == sorted(exact.tolist())
    few = whole.epistemic.argsort(descending=True)[:20]
    wanted = few[acquire(whole[few], 5, acquisition="batch-bald")]
    assert torch.equal(acquire(posterior, loader, 5, candidates=20, **options), wanted)


def test_equal_scores_are_chosen_at_random(posterior):
    counts = torch.zeros(10)
    for seed in range(200):
        counts[acquire(posterior, [torch.zeros(5, 3), torch.zeros(5, 3)], 3, acquisition="random", seed=seed)] += 1
    assert counts.sum() == 600
    assert counts.min() > 35
    assert counts.max() < 90


def test_what_a_pool_refuses(posterior, pool):
    with pytest.raises(ValueError, match="the loader gave no batch"):
        acquire(posterior, [], 3)
    with pytest.raises(ValueError, match="NaN"):
        acquire(posterior, [pool * torch.nan], 3)
    with pytest.raises(ValueError, match="candidates must be at least num"):
        acquire(posterior, [pool], 3, acquisition="batch-bald", candidates=2)
    with pytest.raises(TypeError, match="Say how many"):
        acquire(posterior, [pool])
    assert acquire(posterior, [pool], 2, indices=torch.arange(1000, 1230)).min() >= 1000


class KilledError(Exception):
    pass


def _loop(path, *, after=None, **changed):
    learned = []

    def learn(indices, before):
        learned.append(len(indices))
        if after is not None and len(learned) > after:
            raise KilledError
        return indices

    settings = {
        "predict": lambda posterior, indices: SimpleNamespace(epistemic=(torch.tensor(indices) * 37 % 101).double()),
        "measure": lambda posterior: {"sum": float(sum(posterior))},
        "start": [0, 1], "pool": range(40), "num": 3, "path": path, **changed,
    }  # fmt: skip
    return ActiveLearning(learn, **settings), learned


def test_a_killed_loop_goes_on(tmp_path):
    whole, _ = _loop(None)
    wanted = whole.run(6)
    path = tmp_path / "history.json"
    with pytest.raises(KilledError):
        _loop(path, after=3)[0].run(6)
    again, learned = _loop(path)
    assert len(again.history) == 3
    assert again.run(6) == wanted
    assert learned == [11, 14, 17]
    assert _loop(path)[0].run(6) == wanted  # nothing is left to do
    longer = _loop(path)[0].run(8)
    assert longer[:5] == wanted[:5]
    assert len(longer) == 8
    with pytest.raises(ValueError, match="other settings"):
        _loop(path, num=4)
    path.write_text(path.read_text().replace('"chosen"', '"Chosen"', 1))
    with pytest.raises(ValueError, match="damaged"):
        _loop(path)


def test_a_part_of_the_pool_is_looked_at(tmp_path):
    looked = []

    def predict(posterior, indices):
        looked.append(indices)
        return SimpleNamespace(epistemic=torch.tensor(indices).double())

    path = tmp_path / "history.json"
    rounds = _loop(path, predict=predict, subset=6)[0].run(5)
    assert [len(set(some)) for some in looked] == [6] * 4
    assert len({frozenset(some) for some in looked}) == 4  # others in each round
    for one, some in zip(rounds, looked, strict=False):
        assert list(one.chosen) == sorted(some, reverse=True)[:3]  # the best of these
        assert not set(some) & set(one.labelled)
    assert _loop(path, predict=None, subset=6)[0].run(5) == rounds
    with pytest.raises(ValueError, match="other settings"):
        _loop(path)
    with pytest.raises(ValueError, match="subset is at least num, 3"):
        _loop(None, subset=2)
    few = _loop(None, predict=predict, pool=range(6), subset=6)[0].run(2)  # 4 are open: all of them
    assert few[0].chosen == (5, 4, 3)
    assert looked[-1] == [2, 3, 4, 5]


def test_learning_curves():
    pytest.importorskip("matplotlib")
    loop, _ = _loop(None)
    loop.run(4)
    figure = loop.plot("sum")
    line = figure.axes[0].lines[0]
    assert line.get_xdata().tolist() == [2, 5, 8, 11]
    assert line.get_ydata().tolist() == loop.curve("sum")[1]
    assert figure.axes[0].get_xlabel() == "labels"
