"""A row of the scoreboard is what the library says, by hand; ways to predict ask for what they need and no more."""

import dataclasses
from functools import partial

import pytest
import torch

import bayesify
from bayesify.data import Split, corrupt, read_digits
from experiments import cost
from experiments.board import Board, Way, passes_of
from experiments.config import Config
from experiments.digits import Digits
from experiments.examples import figures, load_columns
from experiments.records import Records
from experiments.run import examples_path, fitted, run
from experiments.shift import SHIFTS, STRENGTHS, near_images, shifts

QUICK = Digits(hidden=16, epochs=2)


@dataclasses.dataclass(frozen=True)
class Shifted(Digits):
    """The digits, of which some are corrupted."""

    def setting(self, seed, *, trial, work):
        made = super().setting(seed, trial=trial, work=work)
        test = read_digits("test")
        return dataclasses.replace(made, shifted=partial(shifts, test.inputs[:30], test.targets[:30], lambda x: x))


TASK = Shifted(hidden=16, epochs=2)


def measured(method: bayesify.Method, board: Board, tmp_path):
    posterior, setting = fitted(Config("a", TASK, method, ()), work=tmp_path)
    before = {name: value.clone() for name, value in posterior.state_dict().items()}
    row = board(posterior, setting, seed=3, trial=False)
    after = posterior.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items()), "the posterior is left alone"
    return row, posterior, setting


def test_a_plain_epoch_is_timed_by_some_of_its_steps(monkeypatch, tmp_path):
    """A clock that ticks once for each reading: a step takes one tick, and an epoch as many as it has steps."""
    ticks = iter(range(1000))
    monkeypatch.setattr(cost, "now", lambda: next(ticks))
    setting = QUICK.setting(0, trial=True, work=tmp_path)
    before = {name: value.clone() for name, value in setting.network.state_dict().items()}
    state = torch.get_rng_state()
    batch = len(next(iter(setting.train))[0])
    torch.set_rng_state(state)
    whole = dataclasses.replace(setting, fitting={"num_data": 7 * batch})
    assert cost.epoch_seconds(whole) == pytest.approx(7)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in setting.network.state_dict().items())


@pytest.mark.slow
def test_a_row_is_what_the_library_says(tmp_path):
    pytest.importorskip("PIL")
    board = Board(Way(num_draws=4), near=(), resamples=20, repeats=1)
    row, posterior, setting = measured(bayesify.MCDropout(), board, tmp_path)
    bayesify.calibrate(posterior, setting.val, num_draws=4, seed=3)
    theirs = bayesify.evaluate(posterior, setting.test, ood=setting.ood, num_draws=4, seed=3).metrics
    temperature = pytest.approx(float(posterior.likelihood.temperature), abs=1e-4)
    assert row["fitted"]["temperature"] == [temperature]
    assert row["test"]["error"] == pytest.approx(1 - theirs["accuracy"], abs=1e-5)
    for name in ("nll", "brier", "ece", "aurc"):
        assert row["test"][name] == pytest.approx(theirs[name], abs=1e-5)
        assert row["intervals"][name][0] <= row["test"][name] <= row["intervals"][name][1]
    assert row["far"] == row["ood"]["photos"]
    assert row["far"]["auroc-total"] == pytest.approx(theirs["auroc/photos"], abs=1e-5)
    assert row["far"]["fpr95-total"] == pytest.approx(theirs["fpr-at-95-ood-recall/photos"], abs=1e-5)
    assert row["far"]["auroc-epistemic"] == pytest.approx(theirs["auroc-epistemic/photos"], abs=1e-5)
    assert "near" not in row
    assert row["passes"] == 4
    assert row["cost in plain passes"] > 0
    test = read_digits("test")
    losses = {}
    for name in SHIFTS:
        for strength in STRENGTHS:
            prediction = bayesify.predict(posterior, corrupt(test.inputs[:30], name, strength), num_draws=4, seed=3)
            losses[name, strength] = -float(prediction.log_prob(test.targets[:30]).mean())
    assert row["shift"]["nll"] == pytest.approx(sum(losses.values()) / 25, abs=1e-5)
    second = sum(losses[name, 2] for name in SHIFTS) / 5
    assert row["shift by strength"]["2"]["nll"] == pytest.approx(second, abs=1e-5)
    contrast = sum(losses["contrast", strength] for strength in STRENGTHS) / 5
    assert row["shift by corruption"]["contrast"]["nll"] == pytest.approx(contrast, abs=1e-5)


def test_a_plain_row_has_nothing_epistemic_and_one_pass(tmp_path):
    pytest.importorskip("PIL")
    board = Board(Way(calibrate=False, num_draws=8), near=("photos",), resamples=5, repeats=1)
    row, _, _ = measured(bayesify.MAP(), board, tmp_path)
    assert row["passes"] == 1
    assert row["fitted"]["temperature"] == [1.0]
    assert set(row["near"]) == {"auroc-total", "fpr95-total"}
    assert "far" not in row


@pytest.mark.slow
def test_examples_are_found_by_the_row_and_give_its_figures(tmp_path):
    pytest.importorskip("PIL")
    board = Board(Way(num_draws=2), near=(), resamples=5, repeats=1)
    config = Config("a", TASK, bayesify.MCDropout(), (board,), seeds=(0, 1))
    run("few", [config], work=tmp_path, results=tmp_path)
    rows = Records(tmp_path / "few.json").read()
    assert [row["seed"] for row in rows] == [0, 1]
    for row in rows:
        columns = load_columns(examples_path(tmp_path, row["hash"], row["seed"]))
        assert figures(columns) == pytest.approx(row["measures"]["test"], abs=2e-5)
        assert "examples" not in row["measures"]
        auroc = bayesify.measure.auroc(columns["total"], columns["total/photos"])
        assert auroc == pytest.approx(row["measures"]["far"]["auroc-total"], abs=1e-4)


class Views:
    """Stands for the library's."""

    def __init__(self, *names):
        self.names = names

    def __len__(self):
        return len(self.names)


def test_a_way_asks_for_what_it_says(tmp_path, monkeypatch):
    asked = []
    for name in ("widen", "calibrate"):
        told = lambda posterior, loader, name=name, **options: asked.append((name, options))  # noqa: E731
        monkeypatch.setattr(bayesify, name, told, raising=False)
    monkeypatch.setattr(bayesify, "Views", Views, raising=False)
    posterior, setting = fitted(Config("a", QUICK, bayesify.MCDropout(), ()), work=tmp_path)
    Way(num_draws=8).ready(posterior, setting, seed=1, trial=False)
    assert asked == [("calibrate", {"num_draws": 8, "seed": 1})]
    asked.clear()
    way = Way(widened=True, views=("identity", "mirror"), pooling="auto", temperatures="each", num_draws=8)
    ready = way.ready(posterior, setting, seed=1, trial=True)
    assert ready is not posterior
    assert [name for name, _ in asked] == ["widen", "calibrate"]
    assert asked[0][1].pop("views").names == way.views
    assert asked[0][1] == {"num_draws": 4}, "a trial draws less"
    options = asked[1][1]
    assert options.pop("views").names == ("identity", "mirror")
    assert options == {"pooling": "auto", "temperatures": "each", "num_draws": 4, "seed": 1}
    assert "views" not in way.options(seed=1, trial=False), "calibration leaves them with the posterior"
    assert dataclasses.replace(way, calibrate=False).options(seed=1, trial=False)["views"].names == way.views
    asked.clear()
    Way(calibrate=False).ready(posterior, setting, seed=1, trial=False)
    assert asked == []


def test_what_is_chosen_stands_for_the_row_s_posterior(tmp_path, monkeypatch):
    posterior, setting = fitted(Config("a", QUICK, bayesify.MAP(), ()), work=tmp_path)
    found = bayesify.convert(setting.network, bayesify.MCDropout())
    asked = []

    def choose(*words, **options):
        asked.append((words, options))
        return found

    monkeypatch.setattr(bayesify, "choose", choose, raising=False)
    assert Way(passes=4).ready(posterior, setting, seed=0, trial=False) is found
    assert asked == [((setting.network, setting.val), {"passes": 4})]


@pytest.mark.parametrize(
    ("method", "include", "wanted"),
    [
        (bayesify.MAP(), None, 2),
        (bayesify.MCDropout(), None, 6),
        (bayesify.MCDropout(p=0.1, insert_before="linear"), ("5",), 2),
    ],
)
def test_views_multiply_functions_and_take_turns_among_draws(method, include, wanted, tmp_path):
    posterior, setting = fitted(Config("a", QUICK, method, (), include=include), work=tmp_path)
    assert isinstance(setting.network[5], torch.nn.Linear), "the last layer"
    options = {"how": "sampling", "num_draws": 6, "views": Views("identity", "mirror")}
    assert passes_of(posterior, options) == wanted
    assert passes_of(posterior, {**options, "how": "streamlined"}) is None
    alone = {**options, "views": None}
    assert passes_of(posterior, alone) == (6 if wanted == 6 else 1)


def test_near_images_are_of_two_classes_or_shuffled():
    test = read_digits("test")
    made = near_images(Split(test.inputs, test.targets), 40)
    half = len(test) // 2
    pairs = [i for i in range(half) if test.targets[i] != test.targets[half + i]][:40]
    for image, i in zip(made["mixed"], pairs, strict=True):
        assert torch.allclose(image, (test.inputs[i] + test.inputs[half + i]) / 2)
    same = test.inputs[:40].flatten(1).sort(1).values
    assert torch.equal(made["shuffled"].flatten(1).sort(1).values, same), "the same pixels"
    assert not torch.equal(made["shuffled"], test.inputs[:40])
