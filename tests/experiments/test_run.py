"""The runner: every configuration can be built and told apart, and a small one runs, is kept and is not made again."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bayesify
from bayesify.laws import StudentLaw
from experiments.board import Board, Way
from experiments.config import Config, Fit, Student
from experiments.configs import experiments
from experiments.digits import Digits
from experiments.keep import keep, measure, unpack
from experiments.measures import Predictor, Predictors, Scored
from experiments.records import RESULTS
from experiments.run import fitted, found, main, measured

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "experiments").rglob("*.py")
    if path.name != "__init__.py"
)
SCRIPTS = [name for name in MODULES if "--trial" in Path(ROOT / (name.replace(".", "/") + ".py")).read_text("utf-8")]
PARTS = {
    "experiments.abnn_study": ("fit", "alpha"),
    "experiments.apd_mnist": (
        "tables", "rates", "chains", "agreements", "study", "samples", "scales", "components", "games",
    ),
    "experiments.omniglot_pairs": ("main", "tuning"),
}  # fmt: skip
QUICK = Digits(hidden=16, epochs=2)


@pytest.mark.parametrize("name", MODULES)
def test_every_module_can_be_imported(name):
    assert importlib.import_module(name).__doc__


@pytest.mark.parametrize("name", experiments())
def test_configurations_have_names_and_hashes_of_their_own(name):
    configs = experiments()[name]
    assert len({config.name for config in configs}) == len(configs) > 0
    assert len({json.dumps(config.described(), sort_keys=True) for config in configs}) == len(configs)
    for config in configs:
        assert config.seeds
        assert hash(config) == hash(dataclasses.replace(config))


def test_seeds_and_names_do_not_decide_the_fit_but_everything_else_does():
    config = found("digits", "bayes-adapter")
    same = dataclasses.replace(config, name="other", seeds=(7,), measures=(Scored(num_draws=2),))
    assert config.fit_hash() == same.fit_hash()
    changes = {
        "task": Digits(hidden=7), "method": dataclasses.replace(config.method, lr=0.5), "include": ("1",),
        "supervised": True,
    }  # fmt: skip
    others = {dataclasses.replace(config, **{key: value}).fit_hash() for key, value in changes.items()}
    assert len(others | {config.fit_hash()}) == 5
    assert "seeds" not in config.described()


@pytest.mark.slow
def test_an_experiment_is_kept_and_not_made_again(tmp_path, capsys):
    configs = [
        Config("map", QUICK, bayesify.MAP(), (Scored(),)),
        Config("abnn", QUICK, bayesify.ABNN(members=1, epochs=1), (Scored(num_draws=2),), seeds=(0, 1)),
    ]
    words = ["tiny", "--results", str(tmp_path), "--work", str(tmp_path / "work")]
    main(words, {"tiny": configs})
    text = (tmp_path / "tiny.json").read_text()
    rows = json.loads(text)["rows"]
    assert [(row["name"], row["seed"]) for row in rows] == [("map", 0), ("abnn", 0), ("abnn", 1)]
    assert all(0 < row["measures"]["test"]["nll"] < 10 for row in rows)
    assert rows[1]["measures"]["test"] != rows[2]["measures"]["test"], "the seed is used"
    assert rows[1]["config"]["method"]["class"] == "ABNN"
    main(words, {"tiny": configs})
    assert (tmp_path / "tiny.json").read_text() == text, "everything is there"
    other = dataclasses.replace(configs[0], task=dataclasses.replace(QUICK, epochs=3))
    main(words, {"tiny": [other]})
    assert len(json.loads((tmp_path / "tiny.json").read_text())["rows"]) == 4, "another task is another row"
    capsys.readouterr()


@pytest.mark.slow
def test_rows_with_the_same_fit_share_it_and_measures_leave_it_alone(tmp_path):
    ways = Predictors((Predictor("mean", "mean"), Predictor("streamlined", "streamlined")))
    config = Config("a", QUICK, bayesify.BayesAdapter(epochs=1), (ways, Scored(num_draws=3)))
    first = measured(config, 0, work=tmp_path)
    posterior, setting = fitted(dataclasses.replace(config, name="b", measures=()), work=tmp_path)
    again = Scored(num_draws=3)(posterior, setting, seed=0, trial=False)
    assert {key: first[key] for key in again} == again
    assert first["mean"]["test"]["accuracy"] == pytest.approx(again["test"]["accuracy"], abs=0.05)
    assert set(first["streamlined"]) == {"test", "test, scaled", "variance scale", "predictor"}
    assert [path.name for path in tmp_path.iterdir()] == [f"{config.fit_hash()}-0"]


def test_scored_is_what_evaluate_says(tmp_path):
    posterior, setting = fitted(Config("a", QUICK, bayesify.MCDropout(), ()), work=tmp_path)
    row = Scored(num_draws=4)(posterior, setting, seed=5, trial=False)
    theirs = bayesify.evaluate(posterior, setting.test, ood=setting.ood, num_draws=4, seed=5).metrics
    for ours, name in (("accuracy", "accuracy"), ("nll", "nll"), ("ece", "ece"), ("aurc", "aurc"), ("brier", "brier")):
        assert row["test"][ours] == pytest.approx(theirs[name], abs=2e-5)
    assert row["test"]["auroc-total/photos"] == pytest.approx(theirs["auroc/photos"], abs=2e-5)
    assert row["test"]["auroc-epistemic/photos"] == pytest.approx(theirs["auroc-epistemic/photos"], abs=2e-5)
    assert row["test, calibrated"]["nll"] <= row["test"]["nll"] + 0.05


def test_results_belong_to_an_experiment_or_a_script():
    """No results file is left of what nobody can run."""
    texts = "".join((ROOT / (name.replace(".", "/") + ".py")).read_text("utf-8") for name in MODULES)
    for path in RESULTS.glob("*.json"):
        stem = path.stem.removesuffix("_pairs")  # of the scoreboard, beside its rows
        words = stem.removesuffix("_resnet20").removesuffix("_fcNN1").removesuffix("_fcNN2").split("_")
        assert stem in experiments() or any("_".join(words[:n]) in texts for n in (len(words), len(words) - 1)), path


# Importing transformers reads torchvision, which is installed without its operators where only tests need it.
AS_MODULE = """
import runpy, sys
from tests.torchvision_stub import declare_torchvision_operators
declare_torchvision_operators()
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def run_trial(*words: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["src", ".", os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", AS_MODULE, *words, "--trial"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


needs_data = pytest.mark.skipif(
    not os.environ.get("BAYESIFY_DATA"), reason="BAYESIFY_DATA names no folder of real data"
)


@pytest.mark.slow
@needs_data
@pytest.mark.parametrize("name", experiments())
def test_an_experiment_runs(name, tmp_path):
    """The last line of each table, on a few examples: the first is mostly the plain network."""
    run_trial("experiments.run", name, "--only", experiments()[name][-1].name, "--work", str(tmp_path))


@pytest.mark.slow
@needs_data
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in ("experiments.run", *PARTS)])
def test_a_script_runs(name):
    run_trial(name)


@pytest.mark.slow
@needs_data
@pytest.mark.parametrize(("name", "part"), [(name, part) for name, parts in PARTS.items() for part in parts])
def test_a_part_of_a_script_runs(name, part):
    run_trial(name, "--part", part)


def test_a_row_can_be_an_ensemble_of_fits_and_the_student_of_it(tmp_path):
    fine = bayesify.MAP(epochs=1, lr=0.05)
    members = (Fit(QUICK, bayesify.MAP()), Fit(QUICK, fine), Fit(QUICK, fine, 0))
    own = Config("fine-tuned", QUICK, fine, (Scored(),))
    row = Config("both", QUICK, bayesify.MAP(), (Scored(),), members=members)
    fitted(own, work=tmp_path)
    kept = sorted(path.name for path in tmp_path.iterdir())
    posterior, setting = fitted(row, work=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == kept, "the fit that is there is taken"
    x = next(iter(setting.test))[0]
    expected = [setting.network(x), *2 * [fitted(own, work=tmp_path)[0].network(x)]]
    probs = torch.stack([one.softmax(-1) for one in expected]).mean(0)
    assert torch.allclose(bayesify.predict(posterior, x).probs, probs, atol=1e-6)
    taught = dataclasses.replace(row, name="student", student=Student(epochs=1, views=()))
    assert len({row.fit_hash(), own.fit_hash(), taught.fit_hash()}) == 3
    student, _ = fitted(taught, work=tmp_path)
    assert isinstance(student.law, StudentLaw)
    assert "members" not in own.described()
    assert {"members", "student"} <= taught.described().keys()


def test_a_kept_folder_has_the_figures_of_its_row(tmp_path):
    fine = bayesify.MAP(epochs=1, lr=0.05)
    board = Board(way=Way(temperatures="each", pooling="log-probs"))
    members = (Fit(QUICK, bayesify.MAP()), Fit(QUICK, fine))
    row = Config("both", QUICK, bayesify.MAP(), (board,), members=members)
    options = {"seed": 0, "work": tmp_path / "work"}
    keep(tmp_path / "kept", row, ("tiny", "both"), **options)
    figures = measure(tmp_path / "kept", row, **options)
    expected = measured(row, 0, work=tmp_path / "work")["test"]
    assert {name: round(value, 5) for name, value in figures.items()} == expected
    assert json.loads((tmp_path / "kept" / "row.json").read_text()) == {"row": ["tiny", "both"], "seed": 0}


def test_members_of_a_kept_folder_are_taken_by_other_rows(tmp_path):
    fine = bayesify.MAP(epochs=1, lr=0.05)
    members = (Fit(QUICK, bayesify.MAP()), Fit(QUICK, fine), Fit(QUICK, fine, 1))
    row = Config("all", QUICK, bayesify.MAP(), (Board(),), members=members)
    keep(tmp_path / "kept", row, ("tiny", "all"), seed=0, work=tmp_path / "there")
    unpack(tmp_path / "kept", row, seed=0, work=tmp_path / "here")
    other = dataclasses.replace(row, members=(members[2], members[0]))
    posterior, setting = fitted(other, work=tmp_path / "here")
    assert not [path for path in (tmp_path / "here").iterdir() if path.is_dir()], "nothing is fitted again"
    last = fitted(Config("", QUICK, fine, ()), 1, work=tmp_path / "there")[0].network
    x = next(iter(setting.test))[0]
    probs = torch.stack([one(x).softmax(-1) for one in (last, setting.network)]).mean(0)
    assert torch.allclose(bayesify.predict(posterior, x).probs, probs, atol=1e-6)
