"""The demo's story: its numbers against naive counts, and how it is told."""

import io
import math
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bayesify import MCDropout, convert
from bayesify.choosing import Candidate, Choice
from bayesify.cli import _picturing, _telling
from bayesify.cli._comparison import Task
from bayesify.cli._story import Decided, Gain, Story, best_of, decide_all, gain_of, in_one_pass
from bayesify.decide import Guard
from bayesify.evaluation.evaluation import Cost, evaluate
from bayesify.evaluation.mistakes import find_mistakes
from bayesify.evaluation.report import write_report
from tests.evaluation.report.makers import Page, classification


def loader(number, seed, spread=3.0):
    """Logits of three classes, which a network that passes them on gets right most of the time."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (number,), generator=generator)
    logits = spread * nn.functional.one_hot(labels, 3) + torch.randn(number, 3, generator=generator)
    return DataLoader(TensorDataset(logits, labels), batch_size=64)


@pytest.fixture
def task():
    ood = {"noise": DataLoader(TensorDataset(torch.zeros(50, 3), torch.zeros(50).long()), batch_size=64)}
    return Task(network=nn.Identity(), val=loader(600, 0), test=loader(300, 1), ood=ood)


def test_what_guards_do_is_counted(task):
    posterior = convert(nn.Identity(), "map")
    plain = evaluate(posterior, task.test, name="network")
    (found,), refusal = decide_all(task, {"ours": posterior}, plain)
    assert refusal is None
    assert float(posterior.likelihood.temperature) == 1  # it was copied
    guard = Guard.fit(convert(nn.Identity(), "map"), task.val, max_risk=0.05)
    verdicts, handed, answered, wrong = [], 0, 0, 0
    for x, y in task.test.dataset:
        one = guard(x[None])
        verdicts.append(one.verdict[0])
        handed += one.verdict[0] != "answer" and int(x.argmax()) != int(y)
        answered += one.verdict[0] == "answer"
        wrong += one.verdict[0] == "answer" and int(one.label) != int(y)
    assert found.verdicts["digits"] == {name: verdicts.count(name) for name in ("answer", "ask", "ood")}
    assert (found.handed, found.answered, found.wrong) == (handed, answered / 300, wrong / answered)
    assert handed > 0
    assert found.caught == {"noise": 1.0}  # all logits alike
    assert sum(found.verdicts["noise"].values()) == 50


def test_a_promise_that_cannot_be_made_is_a_sentence(task):
    posterior = convert(nn.Identity(), "map")
    plain = evaluate(posterior, task.test, name="network")
    found, refusal = decide_all(task, {"ours": posterior}, plain, max_risk=0.001)
    assert found == []
    assert refusal.startswith("ours: ")
    assert "0.001" in refusal


def test_the_best_is_that_of_the_validation_data(task):
    sharp, right = (convert(nn.Identity(), "map") for _ in range(2))
    sharp.likelihood.temperature.fill_(0.01)
    assert best_of(task, {"sharp": sharp, "right": right}) == "right"


def test_a_gain_is_a_paired_difference():
    one, other = classification("one"), classification("other", sharpness=0.5)
    found = gain_of(replace(one, cost=Cost(None, 2.0)), other)
    naive = [
        float(one.prediction.log_probs[row, label] - other.prediction.log_probs[row, label])
        for row, label in enumerate(one.targets.tolist())
    ]
    mean = sum(naive) / len(naive)
    spread = math.sqrt(sum((value - mean) ** 2 for value in naive) / (len(naive) - 1) / len(naive))
    assert found.value == pytest.approx(mean, abs=1e-6)
    assert found.error == pytest.approx(spread, abs=1e-6)
    assert found.nll == (one.metrics["nll"], other.metrics["nll"])
    assert found.value == pytest.approx(found.nll[1] - found.nll[0], abs=1e-6)
    assert found.cost == 2.0
    assert replace(found, value=0.3, error=0.1).clear
    assert not replace(found, value=0.2, error=0.1).clear


def test_one_pass_is_measured_where_it_is_fewer_passes(task):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 3))
    task = replace(task, network=network)
    posteriors = {
        "dropout": convert(network, MCDropout(p=0.3, insert_before="linear")),
        "plain": convert(network, "map"),  # one draw already
    }
    rows = [evaluate(one, task.test, name=name, ood=task.ood) for name, one in posteriors.items()]
    ((slow, fast),) = in_one_pass(task, posteriors, rows)
    assert (slow.name, fast.name) == ("dropout", "dropout, one pass")
    direct = evaluate(posteriors["dropout"], task.test, how="streamlined", ood=task.ood)
    assert fast.metrics == direct.metrics
    assert fast.cost.predict > 0


def story(**changes):
    """A story of two posteriors, with numbers that can be found again."""
    rows = [classification("network", sharpness=3.0), classification("ours", noise=1.0)]
    mistakes = find_mistakes(*rows)
    counts = {"digits": {"answer": 60, "ask": 15, "ood": 5}, "photos": {"answer": 1, "ask": 3, "ood": 36}}
    one = Decided("the network + temperature", counts, 0.75, 0.02, 3, {"photos": 0.975}, torch.arange(80) % 3)
    views = Candidate("plain, identity, mirror", 2, 0.0, 0.3, 0.01, -0.05, 0.01)
    slow, fast = (
        replace(classification(name, noise=1.0), cost=Cost(1.0, cost)) for name, cost in (("a", 20.0), ("b", 2.5))
    )
    given = {
        "ours": "ours",
        "mistakes": mistakes,
        "mistaken": len(mistakes),
        "num_test": 80,
        "decided": [one, replace(one, name="ours", handed=4, answered=0.7)],
        "refusal": None,
        "pairs": [(slow, fast)],
        "choice": Choice((Candidate("plain + temperature", 1), views), "plain + temperature"),
        "gains": [Gain("ours", "the network + temperature", (0.1, 0.2), 0.1, 0.01, 5.0)],
    }
    return Story(**{**given, **changes})


def test_it_is_told_in_order_with_its_numbers():
    told = story()
    text = _telling.text(told, torch.rand(80, 1, 8, 8))
    places = [text.index(line) for line in ("Where is it wrong", "Who answers?", "One pass beside", "Is it worth it?")]
    assert places == sorted(places)
    before, after = told.mistakes.sure()
    assert f"gets {told.mistaken} of 80 test digits wrong, and is at least 99 % sure of {before}" in text
    assert f"ours is as sure of {after} of the same ones" in text
    assert f"It hands over 4 of the network's {told.mistaken} mistakes, and does not answer 98 % of the photos." in text
    assert "in plain passes (and the NLL changes by): a 2.5 instead of 20.0 (+0.000)." in text
    assert "On the test digits ours is better than the network + temperature, for 5.0 plain passes: NLL 0.100" in text
    assert "A mirrored view harms on the validation digits (gain -0.050 +- 0.020 nats)" in text
    assert f"{told.mistakes.labels[0]}: {100 * float(told.mistakes.before[0]):.2f} %" in text
    assert "█" in text or "▓" in text


def test_what_may_be_chance_is_called_so():
    gain = Gain("ours", "the network + temperature", (0.19, 0.2), 0.01, 0.01, 5.0)
    text = _telling.text(story(gains=[gain]), torch.rand(80, 1, 8, 8))
    assert "On the test digits the network + temperature is as good as ours, for 5.0 plain passes" in text
    assert "which may be chance. Take the cheaper one." in text


def test_nothing_to_tell_is_told(monkeypatch):
    empty = story(mistakes=None, mistaken=0, decided=[], refusal="ours: too few.", pairs=[], choice=None, gains=[])
    text = _telling.text(empty, torch.rand(80, 1, 8, 8))
    assert "The network gets all of 80 test digits right." in text
    assert "No guard could be fitted. ours: too few." in text
    assert "One pass" not in text
    assert _picturing.sections(empty) == []
    assert empty.to_dict()["sure"] == {"network": 0, "ours": 0}


def test_a_terminal_without_blocks_gets_plain_characters(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="cp1252"))
    text = _telling.text(story(), torch.ones(80, 1, 8, 8))
    assert "################" in text
    text.encode("cp1252")


def test_the_report_tells_it_too(tmp_path):
    told = story()
    rows = [classification("network", sharpness=3.0), classification("ours", noise=1.0)]
    path = write_report(rows, tmp_path / "report.html", shown="ours", opening=_picturing.sections(told))
    page = Page(path.read_text(encoding="utf-8"))
    sections = [values["id"] for tag, values in page.tags if tag == "section"]
    assert sections[:5] == ["mistakes", "answers", "passes", "worth", "comparison"]
    assert len(page.ids) == len(set(page.ids))
    assert f"4 of {told.mistaken}" in page.text
    assert "97.5%" in page.text
    bars = [
        values["aria-label"] for tag, values in page.tags if tag == "svg" and "photos" in values.get("aria-label", "")
    ]
    assert len(bars) == 2
